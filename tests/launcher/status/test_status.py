"""The command `horovodish status`: what it prints, whom it answers, and that it does not wait."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horovodish.launcher.job.status_desk import MOST_SILENT
from horovodish.launcher.status import jobs
from horovodish.launcher.status.show import row_of
from horovodish.launcher.status.watch import fitting, rates
from horovodish.launcher.supervisor import supervisor
from support.other_user import as_other_user
from support.processes import is_stopped, wait_until, wait_until_state
from support.status import asked, wait_for_sentence

HANGS = "begin()\ndef forgets_it():\n    time.sleep(1000)\nif rank == 1:\n    forgets_it()\ncall()\n"
MISSING = "rank 1 on .* has not called allreduce 'layer.weight': ranks 0, 2 have waited for it for .*"
STEPS = "begin()\nfor step in range(10 ** 9):\n    basics.engine().begin_step()\n    call(f'x{step % 3}')\n"


def status(*arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "horovodish.launcher", "status", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **how)


def status_of_a_hang(name: str) -> subprocess.CompletedProcess[str]:
    """What is printed once all ranks have answered in time: on a busy machine, one may not."""
    shown = status(name)
    for _ in range(10):
        assert shown.returncode == 0, shown.stderr
        if re.fullmatch(MISSING, shown.stdout.partition("\n")[0]):
            break
        shown = status(name)
    return shown


def wait_for_steps(process: int) -> jobs.JobStatus:
    """An answer in which every rank trains. On a busy machine, an answer may lack a rank."""
    found: list[jobs.JobStatus | None] = []

    def trains() -> bool:
        found.append(asked(process))
        ranks = found[-1].ranks if found[-1] else ()
        return bool(ranks) and all(rank.answers and rank.steps > 0 for rank in ranks)

    wait_until(trains)
    assert found[-1] is not None
    return found[-1]


def test_the_first_line_says_what_is_wrong(hang: Callable[..., Any]) -> None:
    job = hang(HANGS)
    wait_for_sentence(job.process.pid, MISSING)
    script = f"hang_{os.getpid()}"
    for name in (str(job.process.pid), f"{script}.py", script):
        shown = status_of_a_hang(name)
        first, what, _, heads, *rows = shown.stdout.splitlines()
        assert re.fullmatch(MISSING, first)
        assert what == f"job {job.process.pid} {script}.py: 3 ranks on 1 host"
        assert heads.split() == ["rank", "host", "process", "state", "step", "memory", "does"]
        assert [row.split()[0] for row in rows] == ["0", "1", "2"]
        assert all(re.search(r" (sleeps|runs) +1 +\d+ MiB  ", row) for row in rows)
        assert re.search(r"waits in allreduce 'layer.weight' for \d+ s$", rows[2])


def test_stacks_come_without_disturbing_the_script(hang: Callable[..., Any]) -> None:
    """`sleep` of the C library would end early if a signal came to its thread."""
    sleeps = "import ctypes\ndef forgets_it():\n    left = ctypes.PyDLL(None).sleep(1000)\n    print('woken', left)\n"
    job = hang(f"begin()\n{sleeps}if rank == 1:\n    forgets_it()\ncall()\n")
    wait_for_sentence(job.process.pid, MISSING)
    for _ in range(2):
        shown = status(str(job.process.pid), "--stacks").stdout
        assert shown.count("stacks of rank") == 3
        late = shown.partition("stacks of rank 1 ")[2].partition("stacks of rank 2 ")[0]
        assert "forgets_it" in late
        assert "forgets_it" not in shown.replace(late, "")
    assert "woken" not in "".join(job.stdout.lines)


def test_stacks_of_ranks_that_run_python_all_the_time(hang: Callable[..., Any]) -> None:
    """A stack that changes while it is read would crash the rank, as a rule within 20 questions."""
    works = "def works(depth):\n    return depth and sum(map(works, [depth - 1]))\n"
    job = hang(f"begin()\n{works}while True:\n    works(50)\n    call()\n")
    wait_for_steps(job.process.pid)
    for _ in range(100):
        found = asked(job.process.pid, "stacks")
        assert found is not None
        for rank in found.ranks:
            assert f"hang_{os.getpid()}.py" in rank.stacks, job.stderr.lines
            assert "<no Python frame>" not in rank.stacks


def test_py_spy_shows_the_stacks_of_a_stopped_rank(hang: Callable[..., Any], tmp_path: Path) -> None:
    """A program of that name takes its place: the real one needs rights that a container may lack."""
    program = tmp_path / "py-spy"
    program.write_text('#!/bin/sh\necho "seen by py-spy: $*"\n')
    program.chmod(0o755)
    folders = (tmp_path, Path(sys.executable).parent, os.environ["PATH"])  # a launcher puts its own folder first
    job = hang("begin()\nif rank == 1:\n    stop()\ncall()\n", PATH=os.pathsep.join(map(str, folders)))
    wait_for_sentence(job.process.pid, "rank 1 on .* is stopped; ranks 0, 2 have waited .*")
    found = asked(job.process.pid, "stacks")
    assert found is not None
    late = found.ranks[1]
    assert late.stacks.strip() == f"seen by py-spy: dump --nonblocking --pid {late.process}"
    assert "in call" in found.ranks[0].stacks


def test_without_py_spy_a_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    question = supervisor.Question("known", os.getpid(), None, wants_stacks=True)
    assert question.is_over
    assert question.answer.decode() == (
        "stacks\nthis process cannot show its stacks itself. Remedy: pip install py-spy, on each host"
    )


def test_of_a_stopped_rank_the_last_known_is_shown(hang: Callable[..., Any]) -> None:
    job = hang("begin()\nif rank == 1:\n    stop()\ncall()\n")
    wait_for_sentence(job.process.pid, "rank 1 on .* is stopped; ranks 0, 2 have waited .*")
    found = asked(job.process.pid)
    assert found is not None
    _, _, _, state, step, memory, does = row_of(found.ranks[1])
    assert (state, step) == ("stopped", "1")
    assert memory.endswith(" MiB")
    assert re.fullmatch(r"is stopped, last called allreduce 'before' \d+ m?s ago", does)


def test_a_job_that_trains_is_well_and_has_rates(hang: Callable[..., Any]) -> None:
    job = hang(STEPS)
    before = wait_for_steps(job.process.pid)
    now = before
    while not all(rank.steps > was.steps for rank, was in zip(now.ranks, before.ranks, strict=True)):
        now = wait_for_steps(job.process.pid)
    for steps, bandwidth, waited in rates(now, before):
        assert float(steps) > 0
        assert bandwidth.endswith(" MB")
        assert waited.endswith("%")
    well = r"all ranks run, in step \d+; .*\n"
    wait_until(lambda: re.match(well, status(str(job.process.pid)).stdout) is not None)


def test_a_slow_job_has_a_late_rank(hang: Callable[..., Any]) -> None:
    job = hang(STEPS.replace("    call(", "    if rank == 1: time.sleep(0.1)\n    call("))
    late = r"all ranks run, in step \d+; rank 1 on .* is late: others have waited for it in \d+% of the time since init"
    wait_until(lambda: re.match(late, status(str(job.process.pid)).stdout) is not None)


def test_it_is_watched_until_the_job_ends(hang: Callable[..., Any]) -> None:
    pytest.importorskip("rich")
    job = hang(STEPS)
    wait_for_steps(job.process.pid)
    command = [sys.executable, "-m", "horovodish.launcher", "status", str(job.process.pid), "--watch"]
    environ = {**os.environ, "TERM": "xterm", "FORCE_COLOR": "1", "COLUMNS": "160"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as watching:
        assert watching.stdout is not None
        shown = ""
        while not re.search(r"\d\.\d +\d[\d.,]* MB +\d+%", re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown)):
            shown += watching.stdout.readline()
        job.process.terminate()
        watching.stdout.read()
        assert watching.wait() == 0


def test_what_is_watched_goes_to_a_file_at_once(hang: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("rich")
    job = hang(STEPS)
    wait_for_steps(job.process.pid)
    shown = tmp_path / "shown"
    command = [sys.executable, "-m", "horovodish.launcher", "status", str(job.process.pid), "--watch"]
    environ = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    with shown.open("w") as file, subprocess.Popen(command, stdout=file, env=environ) as watching:
        wait_until(lambda: len(re.findall(r"\d\d:\d\d:\d\d\n.*\njob \d+ ", shown.read_text())) > 2)
        assert watching.poll() is None
        job.process.terminate()
        assert watching.wait() == 0
    assert "steps/s  reduced/s  waited for  does" in re.sub("  +", "  ", shown.read_text())


def test_a_narrow_terminal_shows_fewer_columns() -> None:
    heads = ("rank", "host", "process", "state", "step", "memory", "steps/s", "reduced/s", "waited for", "does")
    row = ("0", "alpha", "4711", "sleeps", "118", "1,302 MiB", "2.5", "118.0 MB", "3%", "waits in allreduce 'x' " * 3)
    shown = {width: fitting([heads, row], width) for width in (40, 60, 80, 200)}
    assert {width: rows[0] for width, rows in shown.items()} == {
        40: ["rank", "does"],
        60: ["rank", "host", "steps/s", "does"],
        80: ["rank", "host", "state", "step", "steps/s", "waited for", "does"],
        200: list(heads),
    }
    assert shown[60][1] == ["0", "alpha", "2.5", row[-1]]


def test_without_rich_a_line_says_so(hang: Callable[..., Any], tmp_path: Path) -> None:
    job = hang(STEPS)
    wait_for_steps(job.process.pid)
    (tmp_path / "rich.py").write_text("raise ImportError\n")
    shown = status(str(job.process.pid), "--watch", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert shown.returncode == 1
    assert "--watch needs rich, which is not installed. Remedy: pip install rich" in shown.stderr
    assert shown.stderr.count("\n") == 1


def test_several_jobs_are_listed(launch: Callable[..., Any]) -> None:
    started = [launch("run", "-np", "1", "sleep", "1000") for _ in range(2)]
    for job in started:
        wait_until(lambda job=job: (found := asked(job.process.pid)) is not None and not found.awaited)
    lines = status("sleep").stdout.splitlines()
    for job in started:
        assert any(re.match(rf"{job.process.pid}  sleep  the ranks start: rank 0 ", line) for line in lines)


def test_a_job_is_chosen_before_it_is_asked(launch: Callable[..., Any], tmp_path: Path) -> None:
    """So a launcher that hangs delays nobody who asks for another job."""
    programs = []
    for name in ("hangs", "answers"):
        programs.append(tmp_path / f"{name}_{os.getpid()}")
        programs[-1].write_text("#!/bin/sh\nexec sleep 1000\n")
        programs[-1].chmod(0o755)
    hanging, other = (launch("run", "-np", "1", str(program)) for program in programs)
    for job in (hanging, other):
        wait_until(lambda job=job: (found := asked(job.process.pid)) is not None and not found.awaited)
    silent, connect = [], jobs._described

    def as_if_it_ran(path: str) -> jobs.JobStatus | None:
        """A launcher that hangs is not stopped for the kernel, so its job must not look stopped here."""
        its = connect(path)
        if its is None or its.process != hanging.process.pid:
            return its
        silent.append(its)
        return dataclasses.replace(its, is_stopped=False)

    hanging.process.send_signal(signal.SIGSTOP)
    wait_until_state(hanging.process.pid, "T")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(jobs, "_described", as_if_it_ran)
        patched.setattr(jobs, "PATIENCE_SECONDS", 1000)
        (found,) = jobs.ask(programs[1].name, "status")
    assert silent and found.process == other.process.pid and found.answers
    hanging.process.send_signal(signal.SIGCONT)


def test_the_output_cannot_be_written(launch: Callable[..., Any]) -> None:
    job = launch("run", "-np", "1", "sleep", "1000")
    wait_until(lambda: asked(job.process.pid) is not None)
    command = [sys.executable, "-m", "horovodish.launcher", "status", str(job.process.pid)]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "horovodish: the output cannot be written: No space left on device\n"
    read_end, write_end = os.pipe()
    os.close(read_end)
    ended = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write_end)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_a_job_that_is_not_there() -> None:
    shown = status("no-such-job")
    assert shown.returncode == 1
    assert re.match(
        r"horovodish: (no job of user \d+ on .* runs\. Remedy: ask on the host|there is no job no-such-job)",
        shown.stderr,
    )


def test_a_launcher_that_is_stopped(launch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    job = launch("run", "-np", "1", "sleep", "1000")
    wait_until(lambda: (found := asked(job.process.pid)) is not None and not found.awaited)
    job.process.send_signal(signal.SIGSTOP)
    wait_until_state(job.process.pid, "T")
    assert is_stopped(job.process.pid)
    expected = rf"the launcher, process {job.process.pid}, is stopped\. kill -CONT {job.process.pid} lets it go on"
    assert re.search(expected, status().stdout)
    with monkeypatch.context() as patched:
        patched.setattr(jobs.select, "select", lambda *_: pytest.fail("a stopped launcher is waited for"))
        assert asked(job.process.pid) == jobs.JobStatus(job.process.pid, ("sleep", "1000"), False, True)
    (path,) = [path for path in jobs._sockets() if (its := jobs._described(path)) and its.process == job.process.pid]
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(BlockingIOError):  # the kernel takes only so many for a process that accepts none
            while True:
                asker = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                asker.setblocking(False)
                asker.connect(path)
        found = jobs._answers({path: jobs.JobStatus(job.process.pid, ("sleep", "1000"))}, "status")
        assert [each.process for each in found] == [job.process.pid]
    job.process.send_signal(signal.SIGCONT)


def test_who_asks_nothing_is_sent_away_for_others(launch: Callable[..., Any]) -> None:
    job = launch("run", "-np", "1", "sleep", "1000")
    wait_until(lambda: asked(job.process.pid) is not None)
    (path,) = [path for path in jobs._sockets() if (its := jobs._described(path)) and its.process == job.process.pid]
    with contextlib.ExitStack() as opened:
        silent = []
        for _ in range(3 * MOST_SILENT):
            silent.append(opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)))
            silent[-1].settimeout(20)
            silent[-1].connect(path)
        assert asked(job.process.pid) is not None
        for each in silent[: 2 * MOST_SILENT]:
            assert each.recv(1) == b""
        silent[-1].send(b"status")
        assert silent[-1].recv(64) == b"status"


def test_another_user_learns_nothing(launch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the command, nor by the socket if its folder let others in."""
    job = launch("run", "-np", "1", "sleep", "1000")
    wait_until(lambda: asked(job.process.pid) is not None)
    (path,) = [path for path in jobs._sockets() if (its := jobs._described(path)) and its.process == job.process.pid]
    assert as_other_user(jobs._sockets) == []
    assert isinstance(as_other_user(lambda: os.stat(path)), PermissionError)
    folder = os.path.dirname(path)
    os.chmod(folder, 0o755)
    os.chmod(path, 0o777)
    described = jobs._described(path)
    assert described is not None
    try:
        assert as_other_user(lambda: jobs._answers({path: described}, "status")) == []
        assert len(jobs._answers({path: described}, "status")) == 1
    finally:
        os.chmod(folder, 0o700)


def test_64_ranks_answer(launch: Callable[..., Any]) -> None:
    job = launch("run", "-np", "64", "sleep", "1000")
    wait_until(lambda: (found := asked(job.process.pid)) is not None and not found.awaited)
    wait_until(lambda: (found := asked(job.process.pid)) is not None and all(rank.state for rank in found.ranks))
    found = asked(job.process.pid)
    assert found is not None
    assert len(found.ranks) == 64


def test_the_ranks_of_a_script_that_is_no_training(launch: Callable[..., Any]) -> None:
    job = launch("run", "-np", "2", "sleep", "1000")
    wait_until(lambda: (found := asked(job.process.pid)) is not None and len(found.ranks) == 2)
    wait_until(lambda: "has not called init()" in status(str(job.process.pid)).stdout)
