"""How the bytes of a pipe become lines."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from horovodish.errors import SettingError
from horovodish.launcher.job.output import LONGEST_LINE_BYTES, STDERR, STDOUT, Line, Output, beginning, coloured_files
from horovodish.launcher.options import LaunchOptions


def test_only_whole_lines_are_passed_on() -> None:
    line = Line(STDOUT)
    assert line.take(b"one\ntw") == b"one\n"
    assert line.take(b"") == b""
    assert line.take(b"o\nthree") == b"two\n"
    assert line.flush() == b"three"
    assert line.flush() == b""


def test_each_line_gets_the_prefix() -> None:
    line = Line(STDOUT, lambda: b"[3] ")
    assert line.take(b"one\n\ntw") == b"[3] one\n[3] \n"
    assert line.take(b"o\n") == b"[3] two\n"
    assert line.take(b"end") == b""
    assert line.flush() == b"[3] end\n"


def test_a_line_that_goes_on_gets_one_prefix() -> None:
    line = Line(STDOUT, lambda: b"[0] ")
    assert line.take(b"one\nname? ") == b"[0] one\n"
    assert line.unfinished() == b"[0] name? "
    assert line.unfinished() == b""
    assert line.take(b"well, ") == b""
    assert line.unfinished() == b"well, "
    assert line.take(b"hello\nBob\n") == b"hello\n[0] Bob\n"
    assert line.take(b"name? ") + line.unfinished() == b"[0] name? "
    assert line.flush() == b"\n"
    assert line.flush() == b""


def test_a_progress_bar_is_live() -> None:
    line = Line(STDOUT, lambda: b"[0] ")
    assert line.take(b" 10%\r 20%\r 3") == b"[0]  10%\r[0]  20%\r"
    assert line.take(b"0%\r\n") == b"[0]  30%\r\n"


def test_bytes_are_not_changed() -> None:
    data = bytes(range(256)) + b"\x0b\x0c\x1c\xe2\x80\xa8\n"
    line = Line(STDOUT)
    assert line.take(data) + line.flush() == data


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    line = Line(STDOUT)
    assert line.take(b"x" * LONGEST_LINE_BYTES) == b"x" * LONGEST_LINE_BYTES


NOON = datetime(2026, 1, 2, 12, 0, 0, 7000)


def test_what_a_line_begins_with() -> None:
    prefix, time = LaunchOptions(prefix_output=True), LaunchOptions(prefix_output_with_timestamp=True)
    assert beginning(LaunchOptions(), 3, NOON, coloured=True) == b""
    assert beginning(prefix, 3, NOON, coloured=False) == b"[3] "
    assert beginning(time, 3, NOON, coloured=False) == b"2026-01-02 12:00:00.007 [3] "
    assert beginning(prefix, 1, NOON, coloured=True) == b"\x1b[33m[1]\x1b[0m "
    assert beginning(prefix, 7, NOON, coloured=True) == b"\x1b[33m[7]\x1b[0m "
    assert beginning(time, 1, NOON, coloured=True) == b"\x1b[33m2026-01-02 12:00:00.007 [1]\x1b[0m "


def test_colours_are_for_terminals_and_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda file: file == STDERR)
    assert coloured_files({}) == coloured_files({"NO_COLOR": ""}) == {STDERR}
    assert coloured_files({"NO_COLOR": "1"}) == coloured_files({"TERM": "dumb"}) == set()


def test_a_folder_in_which_nothing_can_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match=r"--output-filename: .*/file/rank\.0/stdout cannot be written: Not a dir"):
        Output(LaunchOptions(np=1, output_filename=str(tmp_path / "file")), {})


@pytest.mark.parametrize(
    ("flags", "nps", "names"),
    [
        ({}, [10], ["rank.0", "rank.9"]),
        ({}, [11], ["rank.00", "rank.10"]),
        ({"min_np": 2}, [2, 11], ["rank.0", "rank.10"]),
        ({"min_np": 2, "max_np": 12}, [2, 11], ["rank.00", "rank.10"]),
        ({"min_np": 2, "max_np": 10}, [2, 10], ["rank.0", "rank.9"]),
    ],
)
def test_the_names_of_folders(flags: dict[str, Any], nps: list[int], names: list[str], tmp_path: Path) -> None:
    """They stay the same while an elastic job grows."""
    for start, np in enumerate(nps):
        Output(LaunchOptions(np=np, output_filename=str(tmp_path), **flags), {}, appends=start > 0).close()
    made = sorted(path.name for path in tmp_path.iterdir())
    assert len(made) == nps[-1]
    assert [made[0], max(made, key=lambda name: int(name[5:]))] == names
