"""What ranks write, on real ranks: complete, in order, in whole lines; and what they can read."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LINES = 20_000
DEADLINE_SECONDS = 120


def test_nothing_is_lost_and_no_line_is_torn_when_a_rank_fails(launch_ranks: Callable[..., Any]) -> None:
    # Each line is written in three pieces, and the last word has no end.
    code = f"""
for number in range({LINES}):
    os.write(1, b"a line "), os.write(1, b"with a number "), os.write(1, b"%d\\n" % number)
os.write(2, b"the last word")
comm.Barrier()
if rank == 1:
    os._exit(3)
signal.pause()
"""
    job = launch_ranks(3, code, "--prefix-output")
    assert job.finish() == 3
    for rank in range(3):
        mine = [line for line in job.stdout.lines if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] a line with a number {number}" for number in range(LINES)]
        assert f"[{rank}] the last word" in job.stderr.lines
    assert len(job.stdout.lines) == 3 * LINES


def test_prefix_only_when_asked(launch: Callable[..., Any]) -> None:
    code = "print('one'); print('two', end='')"
    # A network is for ranks on several hosts: here it changes nothing.
    command = ["run", "-np", "1", "--network-interfaces", "lo", sys.executable, "-c", code]
    plain, prefixed = launch(*command), launch(command[0], "--prefix-output", *command[1:])
    assert plain.finish() == prefixed.finish() == 0
    assert plain.stdout.lines == ["one", "two"]
    assert prefixed.stdout.lines == ["[0] one", "[0] two"]


def test_a_question_with_a_prefix_is_seen_before_the_answer(tmp_path: Path) -> None:
    door = tmp_path / "door"
    os.mkfifo(door)
    script = tmp_path / "rank.py"
    script.write_text(f"""
import os
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
print("hello", input("name? ") if rank == "0" else open({str(door)!r}).read())
""")
    command = [sys.executable, "-m", "horovodish.launcher", "run", "-np", "2", "--prefix-output", sys.executable]
    process = subprocess.Popen([*command, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    said = b""

    def hear(end: bytes) -> None:
        nonlocal said
        while not said.endswith(end):
            assert select.select([process.stdout], [], [], DEADLINE_SECONDS)[0], said
            said += os.read(process.stdout.fileno(), 1000)

    try:
        hear(b"[0] name? ")
        door.write_text("rank 0")
        hear(b"rank 0\n")
        process.stdin.write(b"Bob\n")
        process.stdin.close()
        hear(b"Bob\n")
        assert process.wait(DEADLINE_SECONDS) == 0
    finally:
        process.terminate()
        process.wait()
    assert said == b"[0] name? \n[1] hello rank 0\n[0] hello Bob\n"


def test_rank_0_reads_the_launchers_stdin_and_the_others_nothing(launch_ranks: Callable[..., Any]) -> None:
    job = launch_ranks(2, "print(repr(sys.stdin.read()))", mpi=False, stdin="some words")
    assert job.finish() == 0
    assert sorted(job.stdout.lines) == [repr(""), repr("some words")]


def test_the_job_ends_when_nobody_reads_on(launch: Callable[..., Any]) -> None:
    horovodish = f"{sys.executable} -m horovodish.launcher"
    done = subprocess.run(
        ["bash", "-c", f"{horovodish} run -np 2 yes | head -n 3; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "y\ny\ny\n"
    assert done.returncode == 141


@pytest.mark.usefixtures("threads_are_chosen")
@pytest.mark.parametrize("keep", [False, True])
def test_the_job_goes_on_when_stdout_cannot_be_written(keep: bool, tmp_path: Path) -> None:
    flags = ["--output-filename", str(tmp_path)] if keep else []
    ranks = ["sh", "-c", "seq 100000; echo done >&2"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "horovodish.launcher", "run", "-np", "1", *flags, *ranks],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
        )
    rest = f"in {tmp_path} alone" if keep else "lost"
    assert done.returncode == 0
    assert sorted(done.stderr.splitlines()) == [
        "done",
        f"horovodish: stdout cannot be written: No space left on device; the rest is {rest}",
    ]


@pytest.mark.usefixtures("threads_are_chosen")
@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_standard_files_can_be_closed(closed: str, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    rank = f"readlink /proc/self/fd/0 >> {seen}; cat >> {seen}; echo on; echo on >&2"
    command = f"{sys.executable} -m horovodish.launcher run -np 1 sh -c '{rank}' {closed}"
    done = subprocess.run(["sh", "-c", command], input="read", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    assert done.stdout == ("" if ">&-" in closed.split() else "on\n")
    assert done.stderr == ("" if "2>&-" in closed.split() else "on\n")
    if "<&-" in closed.split():
        assert seen.read_text() == "/dev/null\n"
    else:
        assert seen.read_text().endswith("read")


def test_ranks_see_the_terminal(launch: Callable[..., Any]) -> None:
    ours, theirs = pty.openpty()
    code = "import sys; print([file.isatty() for file in (sys.stdin, sys.stdout, sys.stderr)])"
    command = [sys.executable, "-m", "horovodish.launcher", "run", "-np", "2", sys.executable, "-c", code]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(command, env=environ, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL)
    assert process.wait(120) == 0
    os.close(theirs)
    said = []
    with os.fdopen(ours) as terminal, contextlib.suppress(OSError):  # which says that no more will come
        for line in terminal:
            said.append(line.strip())
    assert sorted(said) == ["[False, True, False]", "[True, True, False]"]
