"""The tests' own tool: results by rank, and what it shows when a rank raises, dies, hangs or leaves a process."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import horovodish
from support.model import PLANES
from support.mpi_command import MEMORY_VARIABLE, is_open_mpi
from support.on_ranks import on_ranks
from support.processes import wait_until_ended
from support.ranks import (
    RanksFailedError,
    framework_of,
    let_idle_ranks_leave,
    run_ranks,
    run_ranks_to_their_ends,
)

LONG_BEFORE_THE_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class Seen:
    rank: int
    size: int
    argument: str
    variable: str


def what_it_sees(argument: str) -> Seen:
    from mpi4py import MPI

    return Seen(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, argument, os.environ["OF_THIS_TEST"])


def rank_one_raises() -> None:
    from mpi4py import MPI

    print(f"rank {MPI.COMM_WORLD.rank} was here, with", *Path(os.environ[MEMORY_VARIABLE]).iterdir())
    MPI.COMM_WORLD.Barrier()
    if MPI.COMM_WORLD.rank == 1:
        raise ValueError("rank one has a reason")
    while True:
        wait_where_the_stack_shows_it()


def rank_one_dies() -> None:
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(0.1)


def every_rank_hangs() -> None:
    wait_where_the_stack_shows_it()


def wait_where_the_stack_shows_it() -> None:
    time.sleep(1000)


def leave_a_file() -> None:
    Path(os.environ[MEMORY_VARIABLE], "segment").touch()


def leave_a_process() -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)


def survive_the_others() -> str:
    from mpi4py import MPI

    atexit.register(os._exit, 0)  # the finalizer of MPI would wait for the dead rank
    rank = MPI.COMM_WORLD.rank
    MPI.COMM_WORLD.Barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        raise ValueError("rank two has a reason")
    while len(living_ranks()) > 1:
        time.sleep(0.05)
    return "survived"


def living_ranks() -> list[str]:
    own = Path("/proc/self/cmdline").read_bytes()
    same = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes() == own:
                same.append(path.parent.name)
    return same


@pytest.mark.parametrize("np", [1, 3])
def test_results_come_by_rank(np: int) -> None:
    seen = run_ranks(what_it_sees, np, args=("an argument",), env={"OF_THIS_TEST": "a value"})
    assert seen == [Seen(rank, np, "an argument", "a value") for rank in range(np)]


def test_a_rank_that_raises_ends_the_run_and_shows_every_rank() -> None:
    began = time.monotonic()
    with pytest.raises(RanksFailedError, match="rank 1 raised") as failure:
        run_ranks(rank_one_raises, 2)
    assert time.monotonic() - began < LONG_BEFORE_THE_TIMEOUT_SECONDS
    assert [outcome.ended for outcome in failure.value.outcomes] == ["ended", "raised"]
    assert failure.value.outcomes[1].error_class == "ValueError"
    message = str(failure.value)
    assert "ValueError: rank one has a reason" in message
    assert "rank 0 was here" in message
    assert "wait_where_the_stack_shows_it" in failure.value.outcomes[0].output
    (files,) = re.findall("rank 0 was here, with(.*)", failure.value.outcomes[0].output)
    assert bool(files) == is_open_mpi()
    assert not any(Path(file).parent.exists() for file in files.split())


def test_a_rank_that_dies_ends_the_run() -> None:
    began = time.monotonic()
    with pytest.raises(RanksFailedError, match="rank 1 died"):
        run_ranks(rank_one_dies, 2)
    assert time.monotonic() - began < LONG_BEFORE_THE_TIMEOUT_SECONDS


def test_hung_ranks_show_their_stacks() -> None:
    run_ranks(own_pid, 2)  # so that their start does not count
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(every_rank_hangs, 2, timeout=3)
    assert [outcome.ended for outcome in failure.value.outcomes] == ["hung", "hung"]
    for outcome in failure.value.outcomes:
        assert "wait_where_the_stack_shows_it" in outcome.output


def test_a_process_left_behind_is_found_and_ended() -> None:
    with pytest.raises(AssertionError, match=r"processes left behind: .*sleep\(100\)"):
        run_ranks(leave_a_process, 1)


def test_a_file_left_in_memory_is_found() -> None:
    with pytest.raises(AssertionError, match=r"shared memory left behind: .*segment"):
        run_ranks(leave_a_file, 1, fresh=True)


def test_survivors_go_on_when_asked_to() -> None:
    outcomes = run_ranks_to_their_ends(survive_the_others, 3)
    assert [outcome.ended for outcome in outcomes] == ["returned", "died", "raised"]
    assert outcomes[0].result == "survived"
    assert "--- mpirun, which ended with status 0:" in outcomes[1].output
    assert "rank two has a reason" in outcomes[2].error


def own_pid() -> int:
    return os.getpid()


def variables_and_folder() -> tuple[str | None, str | None, str]:
    seen = os.environ.get("HOROVODISH_SPIN_US"), os.environ.get("OF_A_CALL"), str(Path.cwd())
    os.environ["OF_A_CALL"] = "a value"
    os.chdir("/")
    return seen


def test_processes_are_kept_and_are_as_they_were() -> None:
    pids = run_ranks(own_pid, 2)
    home = str(Path.cwd())
    assert run_ranks(variables_and_folder, 2, env={"HOROVODISH_SPIN_US": "7"}) == [("7", None, home)] * 2
    assert run_ranks(variables_and_folder, 2) == [(None, None, home)] * 2
    assert run_ranks(own_pid, 2) == pids


@pytest.mark.parametrize("how", [{"fresh": True}, {"env": {"OF_THIS_TEST": "a value"}}], ids=["fresh", "variable"])
def test_fresh_processes_end_with_their_call(how: dict[str, Any]) -> None:
    (kept,) = run_ranks(own_pid, 1)
    (fresh,) = run_ranks(own_pid, 1, **how)
    assert fresh != kept
    assert not Path(f"/proc/{fresh}").exists()
    assert run_ranks(own_pid, 1) == [kept]


def test_processes_are_kept_for_each_backend_of_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    before = run_ranks(own_pid, 1)
    with monkeypatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "jax")
        assert run_ranks(own_pid, 1) != before
    assert run_ranks(own_pid, 1) == before


def print_something() -> int:
    print("printed by the first call")
    return os.getpid()


def print_and_raise() -> None:
    print("printed by the second call")
    raise ValueError("a reason")


def test_processes_are_new_after_a_failure_and_show_that_call_alone() -> None:
    pids = run_ranks(print_something, 2)
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(print_and_raise, 2)
    for outcome in failure.value.outcomes:
        assert "printed by the second call" in outcome.output
        assert "printed by the first call" not in outcome.output
    for pid in pids:
        wait_until_ended(pid)
    assert set(run_ranks(own_pid, 2)).isdisjoint(pids)


def leave_badly() -> None:
    atexit.register(os._exit, 3)


def test_it_is_told_when_processes_do_not_leave_as_they_should() -> None:
    let_idle_ranks_leave()
    run_ranks(own_pid, 1)
    run_ranks(leave_badly, 1)
    with pytest.raises(AssertionError, match=r"after own_pid, leave_badly: .*mpirun ended with status 3"):
        let_idle_ranks_leave()


def never_end() -> None:
    threading.Thread(target=wait_where_the_stack_shows_it).start()


def test_a_thread_that_does_not_end_hangs_its_call() -> None:
    run_ranks(own_pid, 1)  # so that its start does not count
    with pytest.raises(RanksFailedError, match="rank 0 hung") as failure:
        run_ranks(never_end, 1, timeout=3)
    assert "wait_where_the_stack_shows_it" in failure.value.outcomes[0].output


@pytest.mark.parametrize("folder", ["", "torch"])
def test_functions_in_a_framework_s_folder_get_processes_of_their_own(folder: str, tmp_path: Path) -> None:
    path = (tmp_path / "frameworks" / folder if folder else tmp_path) / "code.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("def function():\n    pass\n")
    found: dict[str, Any] = {}
    exec(compile(path.read_text(), path, "exec"), found)
    assert framework_of(found["function"]) == folder


@on_ranks(1, 2, planes=PLANES)
@pytest.mark.parametrize("given", ["a value"])
def test_a_body_on_every_rank(given: str, tmp_path: Path) -> None:
    assert horovodish.size() in (1, 2)
    assert os.environ["HOROVODISH_PLANE"] in PLANES
    assert given == "a value"
    assert tmp_path.is_dir()


def test_a_body_that_fails_on_one_rank() -> None:
    with pytest.raises(RanksFailedError, match="rank 1 raised"):
        only_the_first_rank_returns(world=(2, ""))


@on_ranks(2)
def only_the_first_rank_returns() -> None:
    assert horovodish.rank() == 0


def test_a_function_inside_a_function_is_refused() -> None:
    def inner() -> None:
        pass

    with pytest.raises(ValueError, match="not of module level"):
        run_ranks(inner, 1)


def test_mpi_does_not_start_in_the_process_of_the_tests() -> None:
    with pytest.raises(ImportError, match=r"mpi4py\.MPI halted"):
        from mpi4py import MPI  # noqa: F401
