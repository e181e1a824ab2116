"""Before init, after shutdown, init again, children of ranks."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import horovodish as hvd
from support.model import PLANES
from support.mpi_command import is_open_mpi
from support.on_ranks import on_ranks
from support.ranks import RanksFailedError, run_ranks


def total_works() -> None:
    total = hvd.allreduce(np.full(1000, hvd.rank() + 1), op=hvd.Sum)
    np.testing.assert_array_equal(total, np.full(1000, sum(range(1, hvd.size() + 1))))


def start_and_stop() -> None:
    everything_says_that_init_is_missing()
    for _ in range(3):
        hvd.init()
        assert hvd.is_initialized()
        hvd.init()  # a second time changes nothing
        total_works()
        hvd.shutdown()
        assert not hvd.is_initialized()
        hvd.shutdown()
        everything_says_that_init_is_missing()


def everything_says_that_init_is_missing() -> None:
    calls: list[Callable[[], object]] = [
        hvd.rank,
        hvd.size,
        hvd.local_rank,
        hvd.local_size,
        hvd.cross_rank,
        hvd.cross_size,
        hvd.is_homogeneous,
        lambda: hvd.allreduce(np.zeros(2)),
        lambda: hvd.allreduce_async(np.zeros(2), name="x"),
        lambda: hvd.allgather(np.zeros(2)),
        lambda: hvd.broadcast(np.zeros(2), 0),
        hvd.barrier,
    ]
    for call in calls:
        with pytest.raises(hvd.NotInitializedError, match=r"init\(\)"):
            call()
        with pytest.raises(ValueError):  # as in Horovod
            call()


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("np", [1, 3])
def test_start_and_stop(np: int, plane: str) -> None:
    run_ranks(start_and_stop, np, env={"HOROVODISH_PLANE": plane}, fresh=True)


def start_with_ranks_that_take_part() -> None:
    from mpi4py import MPI

    own, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    for all_of_them in (list(range(size)), tuple(range(size)), range(size), np.arange(size)):
        hvd.init(all_of_them)
        assert (hvd.rank(), hvd.size()) == (own, size)
        total_works()
        hvd.shutdown()
    if own > 0:
        hvd.init(range(size - 1, 0, -1))
        assert (hvd.rank(), hvd.size()) == (size - 1 - own, size - 1)
        hvd.shutdown()
    for wrong in ((), (own, own), range(size, 2 * size)):
        with pytest.raises(ValueError, match="the list must name every rank once"):
            hvd.init(wrong)
    for wrong_type in ("0", 0, [0.5]):
        with pytest.raises(TypeError, match="comm is None for all ranks, ranks such as"):
            hvd.init(wrong_type)  # type: ignore[arg-type]


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("np", [1, 3])
def test_start_with_ranks_that_take_part(np: int, plane: str) -> None:
    run_ranks(start_with_ranks_that_take_part, np, env={"HOROVODISH_PLANE": plane})


@on_ranks(3, planes=PLANES)
def test_pending_operations_end() -> None:
    """What is pending when its own rank stops ends in an error."""
    from mpi4py import MPI

    if hvd.rank() == 0:
        handle = hvd.allreduce_async(np.zeros(2), name="only rank 0 submits this")
        hvd.shutdown()
        assert handle.poll()
        for _ in range(2):
            with pytest.raises(hvd.EngineStoppedError, match=r"only rank 0.*shutdown\(\) was called on rank 0"):
                hvd.synchronize(handle)
    MPI.COMM_WORLD.Barrier()  # no other rank leaves before


def start_often() -> None:
    from horovodish import _native

    for _ in range(_native.GENERATIONS + 2):
        hvd.init()
        total_works()
        hvd.shutdown()


def test_start_more_often_than_there_are_tags() -> None:
    run_ranks(start_often, 2, env={"HOROVODISH_PLANE": "mpi_ring"}, fresh=True)


def segment_of_a_start(starts_mpi: bool) -> int:
    from horovodish.runtime import basics

    if starts_mpi and os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
        from mpi4py import MPI

        assert MPI.Is_initialized()
    hvd.init()
    return basics.running().settings.ring_segment_kb


@pytest.mark.skipif(not is_open_mpi(), reason="the limit is Open MPI's")
@pytest.mark.parametrize(
    ("starts_mpi", "env", "expected"),
    [
        (False, {}, 252),
        (False, {"OMPI_MCA_btl_tcp_eager_limit": "131072"}, 124),
        (False, {"HOROVODISH_RING_SEGMENT_KB": "1000"}, 1000),
        (True, {}, 60),
    ],
)
def test_segments_that_mpi_sends_at_once(starts_mpi: bool, env: dict[str, str], expected: int) -> None:
    """One rank that has started MPI without the raised limit decides for all."""
    assert run_ranks(segment_of_a_start, 2, args=(starts_mpi,), env=env, fresh=True) == [expected] * 2


def start_on_communicators_that_are_freed() -> None:
    """MPI gives the handle of a communicator that was freed to another one."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    handles = []
    for reverse in (False, True, False, True):
        comm = world.Split(0, -world.Get_rank() if reverse else world.Get_rank())
        handles.append(MPI._handleof(comm))
        for _ in range(2):
            hvd.init(comm)
            assert hvd.rank() == comm.Get_rank()
            total_works()
            hvd.shutdown()
        comm.Free()
    assert len(set(handles)) < len(handles), "no handle came twice: this test shows nothing"


def test_start_on_communicators_that_are_freed() -> None:
    run_ranks(start_on_communicators_that_are_freed, 3)


def place() -> tuple[int, ...]:
    return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()


def in_the_child(of_parent: tuple[int, ...], pending: hvd.collectives.Handle | None, ends: Callable[[], None]) -> None:
    """Everything that needs the engine says that this is a forked child; leaving does not disturb the parent."""
    try:
        assert place() == of_parent
        assert hvd.is_homogeneous()
        for call in (lambda: hvd.allreduce(np.zeros(2)), hvd.barrier, lambda: hvd.broadcast(np.zeros(2), 0)):
            with pytest.raises(hvd.ForkedProcessError, match="fork"):
                call()
        if pending is not None and not pending.poll():
            with pytest.raises(hvd.ForkedProcessError, match="fork"):
                pending.wait()
        ends()
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def leave_like_python() -> None:
    """A script may well call shutdown(); Python calls what is registered for its end, and clears modules."""
    hvd.shutdown()
    atexit._run_exitfuncs()
    vars(hvd.runtime.basics).clear()
    os._exit(0)


@on_ranks(1, 2, planes=PLANES)
def test_forked_children_are_told_and_harmless() -> None:
    pending = hvd.allreduce_async(np.ones(3), op=hvd.Sum, name="pending") if hvd.rank() == 0 else None
    for ends in (lambda: os._exit(0), leave_like_python):
        of_parent = place()
        child = os.fork()
        if child == 0:
            in_the_child(of_parent, pending, ends)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0, "the child's output says what went wrong"
    if pending is None:
        pending = hvd.allreduce_async(np.ones(3), op=hvd.Sum, name="pending")
    np.testing.assert_array_equal(pending.wait(), np.full(3, hvd.size()))
    for _ in range(20):
        total_works()


def start_workers() -> None:
    """They begin with the script that started them; if that calls init() right away, they must not pass for ranks."""
    hvd.init()
    for method in ("spawn", "forkserver"):
        with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as workers:
            with pytest.raises(hvd.ForkedProcessError, match=f"process {os.getpid()}, which is a rank"):
                workers.submit(hvd.init).result()
            assert workers.submit(hvd.is_initialized).result() is False
    hvd.barrier()


def test_workers_that_are_spawned_are_no_ranks() -> None:
    run_ranks(start_workers, 2, fresh=True)


IN_ANOTHER_JOB = """
import horovodish as hvd
hvd.init()
assert hvd.allgather_object(hvd.rank()) == [0, 1]
"""


def start_another_job() -> None:
    hvd.init()
    another = [sys.executable, "-m", "horovodish.launcher", "run", "-np", "2", sys.executable, "-c", IN_ANOTHER_JOB]
    done = subprocess.run(another, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_rank_may_start_another_job() -> None:
    run_ranks(start_another_job, 1, fresh=True)


ALONE = """
import numpy, sys
import horovodish as hvd
hvd.init()
print(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
print(hvd.allreduce(numpy.arange(3), op=hvd.Sum), hvd.allgather(numpy.arange(2)), hvd.broadcast(numpy.arange(2), 0))
hvd.barrier()
"""


def test_without_a_launcher_the_world_is_one_rank() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["0 1 0 1 0 1", "[0 1 2] [0 1] [0 1]"]


def test_a_slurm_step_of_one_task_is_a_world_of_one_rank_and_needs_no_mpi() -> None:
    """As in a shell of `srun --pty`."""
    code = f"import sys\nsys.modules['mpi4py'] = None\n{ALONE}"
    env = {**os.environ, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "0 1 0 1 0 1"


def test_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(hvd.LaunchError, match=r"torchrun has started 4 processes.*horovodish run -np 4 python"):
        hvd.init()
    monkeypatch.setenv("WORLD_SIZE", "1")
    hvd.init()
    hvd.shutdown()


def notices_of_settings() -> list[tuple[str, str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hvd.init()
    return [(str(warning.message), Path(warning.filename).name) for warning in caught]


def test_a_misspelt_setting_is_noticed_once_and_where_init_was_called() -> None:
    env = {"HOROVODISH_SPINUS": "7"}
    on_rank_0, on_rank_1 = run_ranks(notices_of_settings, 2, env=env)
    assert [(text.partition(",")[0], file) for text, file in on_rank_0] == [
        ("HOROVODISH_SPINUS is set", "test_lifecycle.py")
    ]
    assert on_rank_1 == []


def ask_where_it_is() -> tuple[int, ...]:
    hvd.init()
    assert hvd.is_homogeneous()
    return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()


@pytest.mark.parametrize("plane", PLANES)
def test_where_each_rank_is(plane: str) -> None:
    seen = run_ranks(ask_where_it_is, 3, env={"HOROVODISH_PLANE": plane})
    assert [answer[:2] for answer in seen] == [(0, 3), (1, 3), (2, 3)]
    expected = [(0, 3, 0, 1), (1, 3, 0, 1), (2, 3, 0, 1)]
    assert [answer[2:] for answer in seen] == expected


def fail_with_shared_memory() -> None:
    hvd.init()
    print(*re.findall(r"/dev/shm/\S+", Path("/proc/self/maps").read_text()))
    hvd.barrier()
    raise ValueError("a reason")


def test_ranks_that_fail_leave_no_shared_memory_of_mpis() -> None:
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(fail_with_shared_memory, 2)
    files = {file for outcome in failure.value.outcomes for file in re.findall(r"/dev/shm/\S+", outcome.output)}
    assert files
    assert not any(Path(file).exists() for file in files)


def use_little_time_when_idle() -> float:
    """CPU seconds that this process, the engine's thread included, uses in a second without work."""
    hvd.init()
    total_works()
    before = time.process_time()
    time.sleep(1.0)
    return time.process_time() - before


@pytest.mark.parametrize("plane", PLANES)
def test_an_idle_engine_sleeps(plane: str) -> None:
    assert max(run_ranks(use_little_time_when_idle, 2, env={"HOROVODISH_PLANE": plane})) < 0.2
