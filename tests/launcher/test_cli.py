"""The command line: what it means, and what is said about one that makes no sense."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horovodish.errors import SettingError
from horovodish.launcher.cli import main, parser, request
from horovodish.launcher.run import Request
from horovodish.settings import Setting, table
from horovodish.version import __version__


def parsed(*arguments: str) -> Request:
    return request(parser().parse_args(["run", *arguments]))


def test_the_commands_own_flags_are_left_alone() -> None:
    assert parsed("-np", "2", "python", "train.py", "-np", "3", "--verbose", "--", "x") == Request(
        np=2, command=["python", "train.py", "-np", "3", "--verbose", "--", "x"], settings={}
    )


def test_two_dashes_end_the_flags() -> None:
    assert parsed("--num-proc", "4", "--verbose", "--prefix-output", "--", "./train") == Request(
        np=4, command=["./train"], settings={}, prefix_output=True, verbose=True
    )


def test_every_setting_has_a_flag() -> None:
    for row in table():
        if not row.is_switch:
            assert parsed("-np", "1", row.flag, str(row.default), "true").settings == {row.name: str(row.default)}
    assert parsed("-np", "1", "--start-timeout", "9", "true").settings == {"start_timeout_seconds": "9"}


@pytest.mark.parametrize("row", [row for row in table() if row.is_switch], ids=lambda row: row.name)
def test_a_switch_has_two_flags(row: Setting) -> None:
    assert parsed("-np", "1", row.flag, "true").settings == {row.name: "1"}
    assert parsed("-np", "1", row.flag.replace("--", "--no-"), "true").settings == {row.name: "0"}
    assert parsed("-np", "1", "true").settings == {}


def test_a_bad_setting_is_refused_by_its_flag() -> None:
    with pytest.raises(SettingError, match=r"--plane='ring' is not accepted: plane is one of auto, mpi_ring"):
        parsed("-np", "1", "--plane", "ring", "true")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required"),
        (["walk"], "invalid choice: 'walk'"),
        (["run", "python", "train.py"], "the following arguments are required: -np"),
        (["run", "-np", "2"], "COMMAND is missing"),
        (["run", "-np", "2", "--"], "COMMAND is missing"),
        (["run", "-np", "0", "true"], "'0' is not a number of ranks"),
        (["run", "-np", "two", "true"], "'two' is not a number of ranks"),
        (["run", "-np", "2", "--no-such-flag", "true"], "--no-such-flag"),
        (["run", "-np", "2", "--chunk", "8", "true"], "--chunk"),
    ],
)
def test_arguments_that_make_no_sense(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"horovodish {__version__}\n"


@pytest.mark.parametrize("source", ["--spin-us", "HOROVODISH_SPIN_US"])
def test_a_bad_value_is_a_usage_error(
    source: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = []
    if source.startswith("--"):
        flags = [source, "fast"]
    else:
        monkeypatch.setenv(source, "fast")
    assert main(["run", "-np", "1", *flags, "true"]) == 2
    expected = (
        f"horovodish: {source}='fast' is not accepted: spin_us is a whole number from 0 to 1000000 (default 50)\n"
    )
    assert capsys.readouterr().err == expected


def test_an_unknown_variable_is_noticed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOROVODISH_SPINUS", "3")
    assert main(["run", "-np", "1", "no-such-command"]) == 127
    assert "HOROVODISH_SPINUS is set, but there is no such setting. Did you mean HOROVODISH_SPIN_US?" in (
        capsys.readouterr().err
    )


def test_a_command_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-np", "2", "no-such-command"]) == 127
    assert capsys.readouterr().err == "horovodish: no-such-command: command not found\n"


def test_a_script_without_its_interpreter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('hello')")
    assert main(["run", "-np", "2", str(script)]) == 126
    assert capsys.readouterr().err == f"horovodish: {script} is not executable: start it with python {script}\n"


def test_settings_given_as_flags_reach_the_ranks(launch: Callable[..., Any]) -> None:
    code = "import os; print(os.environ['HOROVODISH_PLANE'])"
    job = launch("run", "-np", "2", "--plane", "mpi_ring", sys.executable, "-c", code)
    assert job.finish() == 0
    assert job.stdout.lines == ["mpi_ring", "mpi_ring"]


def test_verbose_shows_what_is_run(launch: Callable[..., Any]) -> None:
    job = launch("run", "-np", "1", "--verbose", "true")
    assert job.finish() == 0
    assert any("libmpi" in line and "started by" in line for line in job.stderr.lines)
    assert any("-np 1" in line and line.endswith(" true") for line in job.stderr.lines)
