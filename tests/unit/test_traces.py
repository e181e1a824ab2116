"""What the timeline writes, whatever is missing; and the ring between the engine and its writer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from horovodish._native import testing
from horovodish.reports.merge_traces import merged
from support.traces import events_of, is_complete, marks_of, tracks_of

SUBMITTED, DECIDED, PHASE, SETTLED = range(1, 5)
PAGE_BYTES = 4096
Record = tuple[int, int, int, int, str]


def write(path: Path, records: list[Record], dropped: int = 0) -> Path:
    testing.write_timeline(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), records, dropped)
    return path


def operation(track: int, begin: int, name: str = "") -> list[Record]:
    return [
        (SUBMITTED, track, begin, begin, name),
        (DECIDED, track, begin + 100, begin + 100, ""),
        (PHASE, track, begin + 250, begin + 270, ""),
        (PHASE, track, begin + 300, begin + 1400, ""),
        (SETTLED, track, begin + 1400, begin + 1400, ""),
    ]


def test_an_operation(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.json", operation(2, 5000, "gradient"))
    (slices,) = tracks_of(path, 0).values()
    (one,) = slices
    assert (one.name, one.begin, one.end) == ("allreduce", 5000, 6400)
    assert one.arguments == {"bytes": 12, "tensors": 1}
    assert [(phase.name, phase.begin, phase.end) for phase in one.within] == [
        ("negotiate", 5000, 5100),
        ("queue", 5100, 5250),
        ("pack", 5250, 5270),
        ("pack", 5300, 6400),
    ]
    assert is_complete(path)


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(4, 5), min_size=1, max_size=8), st.data())
def test_slices_nest_whatever_records_are_dropped(tmp_path: Path, tracks: list[int], data: st.DataObject) -> None:
    records = [record for number, track in enumerate(tracks) for record in operation(track, 2000 * number)]
    named = set()
    kept = []
    for what, track, begin, end, _ in records:
        if data.draw(st.booleans()):
            # The engine describes a track until it has got a description into the ring.
            first = what == SUBMITTED and track not in named
            named |= {track} if first else set()
            kept.append((what, track, begin, end, f"tensor {track}" if first else ""))
    shown = tracks_of(write(tmp_path / "trace.json", kept), 0)
    assert set(shown) == {f"tensor {track}" for track in named}
    assert sum(map(len, shown.values())) == sum(record[0] == SUBMITTED for record in kept)


def test_what_was_dropped_is_said(tmp_path: Path) -> None:
    (mark,) = marks_of(write(tmp_path / "trace.json", operation(2, 0, "x"), dropped=3))
    assert (mark["name"], mark["args"]) == ("records dropped", {"count": 3, "total": 3})


@pytest.mark.parametrize(
    "name", ['"quoted" \\ and\ncontrolled\x01', "Gewichtung/ü/层", "long " * 1000, "\x02" * 3000, "层" * 3000]
)
def test_any_name_is_valid_json(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "trace.json", operation(2, 0, name))
    (shown,) = tracks_of(path, 0)
    assert shown == name or (shown.endswith("...") and name.startswith(shown[:-3]) and len(shown) > 80)


def test_no_event_lies_across_two_pages(tmp_path: Path) -> None:
    """A kill ends a write between pages only, so what lies within one is there as a whole or not at all."""
    names = [f"{'layer' * (number % 90)}{number}" for number in range(300)]
    records = [record for number, name in enumerate(names) for record in operation(number + 2, 10**6 * number, name)]
    path = write(tmp_path / "trace.json", records)
    assert set(tracks_of(path, 0)) == set(names)
    content = path.read_bytes()
    assert len(content) > 20 * PAGE_BYTES
    for end in range(PAGE_BYTES, len(content), PAGE_BYTES):
        assert content[end - 1 : end] == b"\n"
        json.loads(content[:end] + b"]")


def test_the_ring_is_full_at_its_capacity_and_goes_on_when_it_was_emptied() -> None:
    ring = testing.Ring(4)
    for begin in (0, 10, 20):
        assert [ring.push(begin + i) for i in range(6)] == [True] * 4 + [False] * 2
        assert [ring.take() for _ in range(5)] == [begin, begin + 1, begin + 2, begin + 3, None]


def merge(*paths: Path | str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "horovodish.launcher", "merge-traces", *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_several_traces_become_one_also_where_one_was_cut_off(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.json", operation(2, 0, "x"))
    cut = tmp_path / "cut.json"
    cut.write_text(write(tmp_path / "other.json", operation(2, 0, "y")).read_text()[:-20])
    done = merge(whole, cut)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)[: len(events_of(whole))] == events_of(whole)
    assert {event["args"]["name"] for event in json.loads(done.stdout) if event.get("name") == "thread_name"} == {
        "x",
        "y",
    }
    assert list(merged([])) == ["[\n", "]\n"]


def test_a_trace_may_be_cut_off_anywhere(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.json", operation(2, 0, "x"))
    content, events = whole.read_text(), events_of(whole)
    for length in range(len(content)):
        lines = content[:length].splitlines(keepends=True)
        assert json.loads("".join(merged([lines]))) == events[: max(0, content.count("\n", 0, length) - 1)]


@pytest.mark.parametrize("nuls", ["", "\0" * 300])
@pytest.mark.parametrize("length", [1, 2, 5, 1000])
def test_what_a_rank_has_left_that_was_killed_is_a_trace(length: int, nuls: str, tmp_path: Path) -> None:
    """Also one that had written nothing yet, or whose host has lost what it had written."""
    left = tmp_path / "left.json"
    left.write_text(write(tmp_path / "whole.json", operation(2, 0, "x")).read_text()[:length] + nuls)
    done = merge(left)
    assert (done.returncode, done.stderr) == (0, "")
    assert (len(json.loads(done.stdout)) > 0) == (length == 1000)


@pytest.mark.parametrize("path", ["/bin/ls", __file__], ids=["program", "script"])
def test_what_is_no_trace_is_refused_before_anything_is_written(path: str, tmp_path: Path) -> None:
    done = merge(write(tmp_path / "whole.json", operation(2, 0, "x")), path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"horovodish: {path} is not a trace that the timeline wrote; leave it out\n"


@pytest.mark.parametrize(
    ("arguments", "status", "what"),
    [
        ([], 2, "the following arguments are required: FILE (see horovodish merge-traces --help)"),
        (["no-such-file"], 1, "horovodish: no-such-file cannot be read: No such file or directory"),
        (["a", "b", "a"], 1, "horovodish: a is named twice"),
        (["."], 1, "horovodish: . cannot be read: Is a directory"),
        (
            [os.devnull],
            1,
            f"horovodish: nothing was written to {os.devnull}: a killed rank may write nothing",
        ),
    ],
)
def test_merging_nothing_says_so(arguments: list[str], status: int, what: str) -> None:
    done = merge(*arguments)
    assert done.returncode == status
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.endswith(what)


def test_a_merged_trace_that_nobody_reads(tmp_path: Path) -> None:
    trace = write(tmp_path / "whole.json", operation(2, 0, "x"))
    source, closed = os.pipe()
    os.close(source)
    command = [sys.executable, "-m", "horovodish.launcher", "merge-traces", str(trace)]
    done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(closed)
    assert (done.returncode, done.stderr) == (1, "horovodish: the trace cannot be written: Broken pipe\n")
