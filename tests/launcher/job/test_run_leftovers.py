"""What MPI and Python keep in files goes with the run, however the run ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horovodish.launcher.supervisor.supervisor import DAEMONS_FOLDER, remove_later
from support.mpi_command import is_open_mpi
from support.processes import wait_until

ENDS_WITHIN_SECONDS = 30

# Each rank says which folders there are, and that they are in use; then it waits for its end.
CODE = """
comm.Barrier()
folders = [os.environ["PMIX_SERVER_TMPDIR"], os.path.realpath(os.environ["OMPI_MCA_btl_sm_backing_directory"])]
assert all(os.listdir(folder) for folder in folders), folders
assert os.environ["PMIX_SERVER_TMPDIR"].startswith(os.environ["HOROVODISH_RUN_DIR"])
assert os.environ.get("TMPDIR") == os.environ.get("USERS_TMPDIR")
comm.Barrier()
os.write(1, (" ".join([os.environ["HOROVODISH_RUN_DIR"], *folders]) + "\\n").encode())
os.write(1, f"{rank} is process {os.getpid()}\\nready\\n".encode())
signal.pause()
"""


def started(launch_ranks: Callable[..., Any], **variables: str) -> tuple[Any, list[Path], int]:
    """The job, the folders that are in use, and the process id of rank 1."""
    if not is_open_mpi():
        pytest.skip("MPICH has no folder for its files")
    job = launch_ranks(2, CODE, env=variables)
    job.stdout.wait_for("ready", 2)
    folders = next(line for line in job.stdout.lines if line.startswith("/")).split()
    process = next(line for line in job.stdout.lines if line.startswith("1 is process "))
    assert all(Path(folder).exists() for folder in folders)
    return job, [Path(folder) for folder in folders], int(process.split()[-1])


def test_a_killed_rank(launch_ranks: Callable[..., Any]) -> None:
    job, folders, rank_1 = started(launch_ranks)
    os.kill(rank_1, signal.SIGKILL)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 137
    assert not any(folder.exists() for folder in folders)


def test_a_killed_mpirun(launch_ranks: Callable[..., Any]) -> None:
    job, folders, _ = started(launch_ranks)
    (mpirun,) = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
    os.kill(int(mpirun), signal.SIGKILL)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 137
    assert not any(folder.exists() for folder in folders)


def test_a_killed_launcher(launch_ranks: Callable[..., Any]) -> None:
    job, folders, _ = started(launch_ranks)
    job.process.kill()
    assert job.finish(within=ENDS_WITHIN_SECONDS) == -signal.SIGKILL
    assert not any(folder.exists() for folder in folders)


def test_what_removes_folders_later_survives_signals_of_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_there(*_: Any, **__: Any) -> None:
        raise NotImplementedError("as in a Python that was built with a glibc before 2.26")

    monkeypatch.setattr(os, "posix_spawn", not_there)
    folder = tmp_path / "folder"
    folder.mkdir()
    former = children(os.getpid())
    stdin = remove_later(os.getpid(), str(folder))
    (cleaner,) = children(os.getpid()) - former
    try:
        ends_at = time.monotonic() + ENDS_WITHIN_SECONDS
        while not (stolid := ignored(cleaner) & 1 << signal.SIGTERM - 1) and time.monotonic() < ends_at:
            os.sched_yield()
        assert stolid
        assert os.getsid(cleaner) == cleaner, "a signal to the group of the supervisor does not reach it"
    finally:
        os.close(stdin)
        os.waitpid(cleaner, 0)
    assert not folder.exists()


def test_the_folder_of_a_daemon_that_ends_in_haste_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "prted"
    folder.mkdir()
    monkeypatch.setenv(DAEMONS_FOLDER, str(folder))
    daemon = subprocess.Popen(["sleep", "1000"])
    former = children(os.getpid())
    stdin = remove_later(daemon.pid)
    (cleaner,) = children(os.getpid()) - former
    os.write(stdin, b"ended keep\n")
    os.close(stdin)
    wait_until(lambda: bool(children(cleaner)))  # it waits for the daemon
    assert folder.exists()
    daemon.kill()
    daemon.wait()
    os.waitpid(cleaner, 0)
    assert not folder.exists()


def children(process: int) -> set[int]:
    return set(map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()))


def ignored(process: int) -> int:
    """The signals that a process ignores, as bits."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn")), 16)


def test_the_users_own_folders_stay(launch_ranks: Callable[..., Any], tmp_path: Path) -> None:
    variables = {"TMPDIR": str(tmp_path), "USERS_TMPDIR": str(tmp_path)}
    job, folders, _ = started(launch_ranks, OMPI_MCA_btl_sm_backing_directory=str(tmp_path), **variables)
    assert folders[2] == tmp_path
    job.process.kill()
    assert job.finish(within=ENDS_WITHIN_SECONDS) == -signal.SIGKILL
    assert not folders[0].exists()
    assert (tmp_path / "rank.py").exists()


# A process that each rank starts removes the segment when all of the rank's processes have ended.
SEGMENT = """
from multiprocessing.shared_memory import SharedMemory
segment = SharedMemory(create=True, size=1)
worker = os.fork()
if worker:
    os.write(1, f"{rank} is process {os.getpid()} with segment {segment.name}\\nready\\n".encode())
signal.pause()
"""


def test_shared_memory_of_python(launch_ranks: Callable[..., Any]) -> None:
    job = launch_ranks(2, SEGMENT)
    job.stdout.wait_for("ready", 2)
    pids, segments = {}, []
    for rank, _, _, pid, _, _, name in (line.split() for line in job.stdout.lines if line != "ready"):
        pids[rank] = int(pid)
        segments.append(Path("/dev/shm", name))
    assert all(segment.exists() for segment in segments)
    os.kill(pids["1"], signal.SIGKILL)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 137
    assert not any(segment.exists() for segment in segments)
