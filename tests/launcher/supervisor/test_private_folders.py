"""The supervisor's folders and its socket: everybody can read their names, and a second user has been there first."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from horovodish.launcher.supervisor import supervisor
from horovodish.launcher.supervisor.supervisor import (
    STATE_FOLDER_VARIABLE,
    UnixSupervisorEnd,
    connect,
    make_folder,
    make_private,
    problem_of_daemon,
    problem_of_state,
    remove_later,
    state_folder,
)
from horovodish.launcher.supervisor.tcp_end import TcpSupervisorEnd
from support import other_user
from support.door import Door
from support.other_user import as_other_user, become_other_user, folder_of_all, skip_without_another_user


@pytest.fixture
def memory() -> Iterator[Path]:
    """Stands for /dev/shm."""
    with folder_of_all() as folder:
        yield folder


def mode(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode)


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_every_level_is_private(memory: Path, umask: int) -> None:
    former = os.umask(umask)
    try:
        make_private(f"{memory}/job/host", levels=2)
    finally:
        os.umask(former)
    assert mode(memory / "job") == mode(memory / "job/host") == 0o700
    assert mode(memory) == 0o1777, "the folder around them stays as it is"


def test_what_is_private_already_is_taken(memory: Path) -> None:
    for name in ("host", "other", "host"):  # hosts may be one machine, and a job has several ranks on a host
        make_private(f"{memory}/job/{name}", levels=2)
    assert sorted(os.listdir(memory / "job")) == ["host", "other"]


PLANTED = {
    "a folder for all": lambda at, own: (at / "host").mkdir(parents=True),
    "a private folder": lambda at, own: os.mkdir(at, 0o700),
    "a link to a private folder": lambda at, own: at.symlink_to(own),
    "a link that leads nowhere": lambda at, own: at.symlink_to(at.with_name("nowhere")),
    "a file": lambda at, own: at.write_text(""),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_what_another_user_has_put_there_is_refused(memory: Path, planted: str) -> None:
    own = memory / "own"
    own.mkdir(0o700)
    as_other_user(lambda: PLANTED[planted](memory / "job", own))
    before = sorted(os.listdir(memory))
    problem = problem_of_state(f"{memory}/job/host")
    text = f"126 {memory}/job belongs to user {other_user.uid()}, and only a private folder of user 0 is used there"
    assert problem == f"{text}: have it removed"
    assert sorted(os.listdir(memory)) == before
    assert os.listdir(own) == []


@pytest.mark.parametrize("level", ["job", "job/host"])
def test_own_folders_that_are_open_to_others_are_refused(memory: Path, level: str) -> None:
    make_private(f"{memory}/job/host", levels=2)
    (memory / level).chmod(0o750)
    with pytest.raises(OSError, match=f"{memory}/{level} has mode 0750, and only a private folder of user"):
        make_private(f"{memory}/job/host", levels=2)


def test_own_links_are_refused_too(memory: Path) -> None:
    (memory / "elsewhere").mkdir(0o700)
    (memory / "job").symlink_to("elsewhere")
    with pytest.raises(OSError, match=f"{memory}/job is a link, and"):
        make_private(f"{memory}/job/host", levels=2)


def test_a_folder_that_cannot_be_made_is_named(memory: Path) -> None:
    assert problem_of_state(f"{memory}/no/job/host") == f"126 {memory}/no: No such file or directory"


def test_a_supervisor_of_earlier_ranks_that_removes_the_folder_does_not_disturb(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, removed = os.mkdir, []

    def make_when_it_has_been_removed(name: str, mode: int, *, dir_fd: int) -> None:
        if name == "host" and len(removed) < 3:
            os.rmdir(memory / "job")
            removed.append(name)
        make(name, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", make_when_it_has_been_removed)
    make_private(f"{memory}/job/host", levels=2)
    assert len(removed) == 3
    assert (memory / "job/host").exists()


def test_the_state_lies_in_memory_or_where_the_launcher_has_made_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    host = socket.gethostname()
    assert state_folder(is_near=True) == state_folder(is_near=False) == ""
    monkeypatch.setenv(STATE_FOLDER_VARIABLE, "/dev/shm/hvd-state-x")
    here = os.path.realpath("/dev/shm")
    assert state_folder(is_near=True) == state_folder(is_near=False) == f"{here}/hvd-state-x/{host}"
    monkeypatch.setenv(STATE_FOLDER_VARIABLE, "/tmp/hvd-state-x")  # the launcher's host has no memory for files
    assert state_folder(is_near=True) == f"{os.path.realpath('/tmp')}/hvd-state-x/{host}"
    assert state_folder(is_near=False) == ""
    monkeypatch.setattr(supervisor, "MEMORY", "/no/memory")
    monkeypatch.setenv(STATE_FOLDER_VARIABLE, "/no/memory/hvd-state-x")
    assert state_folder(is_near=False) == ""


def test_a_folder_of_another_user_that_open_mpis_daemon_has_taken_is_refused(memory: Path) -> None:
    """The daemon asks nobody whose it is."""
    own, theirs = memory / "prted.1", memory / "prted.2"
    own.mkdir()
    as_other_user(theirs.mkdir)
    assert problem_of_daemon("") == problem_of_daemon(str(memory / "none")) == problem_of_daemon(str(own)) == ""
    text = f"126 {theirs}, where Open MPI keeps data of the job, belongs to user {other_user.uid()}: have it removed"
    assert problem_of_daemon(str(theirs)) == text


def test_a_later_change_of_a_link_in_tmpdir_changes_nothing(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = memory / "link"
    (memory / "first").mkdir()
    as_other_user(lambda: link.symlink_to(memory / "first"))
    monkeypatch.setenv("TMPDIR", str(link))
    monkeypatch.setattr(supervisor, "MEMORY", str(memory))
    folder = Path(make_folder())
    as_other_user(lambda: [link.unlink(), link.symlink_to("/")])
    assert folder.parent == memory / "first"
    assert mode(folder) == 0o700
    assert mode(folder / "segments") == 0o700


def test_others_do_not_see_the_memory_of_mpi(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(memory))
    monkeypatch.setattr(supervisor, "MEMORY", str(memory))
    segments = (Path(make_folder()) / "segments").resolve()
    (segments / "sm_segment").write_bytes(b"gradients")
    for attempt in (lambda: os.listdir(segments), (segments / "sm_segment").read_bytes, (segments / "own").mkdir):
        assert isinstance(as_other_user(attempt), PermissionError)


def forget(state: Path, folder: Path) -> None:
    """As a supervisor whose job has ended."""
    former = children()
    stdin = remove_later(os.getpid(), str(folder), state=str(state))
    (cleaner,) = children() - former
    os.write(stdin, b"ended forget\n")
    os.close(stdin)
    os.waitpid(cleaner, 0)


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def test_the_state_is_removed_with_the_folder_of_the_job(memory: Path) -> None:
    for name in ("host", "other"):
        make_private(f"{memory}/job/{name}", levels=2)
        (memory / "job" / name / "0-0-a.state").write_text("state")
    forget(memory / "job/host", memory / "none")
    assert os.listdir(memory / "job") == ["other"]
    forget(memory / "job/other", memory / "none")
    assert os.listdir(memory) == []


def test_what_removes_the_state_follows_no_link_of_another_user(memory: Path) -> None:
    """Everybody can list the name of the job's folder, and put a link of that name there when the folder is gone."""
    own = memory / "own"
    (own / "host").mkdir(parents=True)
    (own / "host/thesis").write_text("the only copy")
    as_other_user(lambda: (memory / "job").symlink_to(own))
    forget(memory / "job/host", memory / "none")
    assert (own / "host/thesis").exists()


def test_what_removes_folders_removes_a_link_and_not_what_it_leads_to(memory: Path) -> None:
    own = memory / "own"
    own.mkdir()
    (own / "thesis").write_text("the only copy")
    as_other_user(lambda: [(memory / "run").symlink_to(own), (memory / "job/host").mkdir(parents=True)])
    forget(memory / "job/host", memory / "run")
    assert (own / "thesis").exists()
    assert (memory / "job/host").exists(), "the folder of another user"


@contextlib.contextmanager
def socket_of_another_user(path: Path) -> Iterator[None]:
    """Somebody listens there, and answers whoever connects with a program to run."""
    skip_without_another_user()
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            become_other_user()
            path.parent.mkdir(exist_ok=True)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(str(path))
                listener.listen()
                os.write(told, b"!")
                while True:
                    with contextlib.suppress(BrokenPipeError):  # the supervisor may have hung up by now
                        listener.accept()[0].send(b"start 0 LD_PRELOAD=/tmp/theirs.so")
        finally:
            os._exit(1)
    try:
        assert os.read(ready, 1) == b"!"
        yield
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(told)


def test_a_supervisor_takes_no_orders_from_a_socket_of_another_user(memory: Path) -> None:
    path = memory / "run/launcher.socket"
    with socket_of_another_user(path):
        with pytest.raises(PermissionError, match=re.escape(f"the socket {path} belongs to user {other_user.uid()}")):
            UnixSupervisorEnd(str(path))
        with pytest.raises(PermissionError):
            connect(str(path), socket.gethostname(), "")


def test_on_another_host_of_the_same_name_it_calls_the_launcher_instead(memory: Path, tmp_path: Path) -> None:
    path = memory / "run/launcher.socket"
    door = Door(tmp_path)
    try:
        with socket_of_another_user(path):
            assert isinstance(connect(str(path), socket.gethostname(), door.address), TcpSupervisorEnd)
    finally:
        door.close()


def test_the_launchers_socket_admits_nobody_else(memory: Path) -> None:
    """The folder of the run keeps others out of all that is in it."""
    run = memory / "run"
    make_private(str(run))
    for name in ("rank-0.phases", "rank-0.news", "rank-0.failure"):
        (run / name).write_text("")
        (run / name).chmod(0o666)
    path = str(run / "launcher.socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        os.chmod(path, 0o777)
        attempts: dict[str, Callable[[], object]] = {
            "list": lambda: os.listdir(run),
            "connect": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(path),
            "read": lambda: (run / "rank-0.failure").read_text(),
            "write": lambda: (run / "rank-0.news").write_text("end\n"),
            "add": lambda: (run / "rank-1.phases").write_text("exit 1\n"),
            "replace": lambda: run.rename(memory / "theirs"),
            "remove": lambda: shutil.rmtree(run),
        }
        for what, attempt in attempts.items():
            assert isinstance(as_other_user(attempt), PermissionError), what
