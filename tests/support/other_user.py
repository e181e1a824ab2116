"""A second user of this machine, who knows all that others can see and puts things where all can write."""

from __future__ import annotations

import contextlib
import os
import pickle
import pwd
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.orphans import mark_of_this_process

NAME = "nobody"


def skip_without_another_user() -> None:
    """Skips the test, with the reason, where these tests cannot act as a second user."""
    if os.geteuid() != 0:
        pytest.skip("only root can act as a second user: sudo make test")
    with contextlib.suppress(KeyError):
        pwd.getpwnam(NAME)
        return
    pytest.skip(f"there is no user {NAME} on this machine")


def as_other_user(function: Callable[[], Any]) -> Any:
    """Calls a function as the second user, in a child process; returns what it returns, or the `OSError` it raises."""
    skip_without_another_user()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(read_end)
            become_other_user()
            try:
                result = function()
            except OSError as problem:
                result = problem
            with open(write_end, "wb") as pipe:
                pickle.dump(result, pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    assert answer, "the second user's function has failed; see its traceback"
    return pickle.loads(answer)


def become_other_user() -> None:
    """Gives up the rights of root for good."""
    user = pwd.getpwnam(NAME)
    os.setgroups([])
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)
    os.umask(0)


def uid() -> int:
    """The number of the second user."""
    return pwd.getpwnam(NAME).pw_uid


@contextlib.contextmanager
def folder_of_all(parent: str = "/tmp") -> Iterator[Path]:
    """A folder in which all users can write and none can remove what is another's, as in /tmp."""
    folder = tempfile.mkdtemp(prefix=mark_of_this_process(), dir=parent)  # only this user can enter pytest's own
    try:
        os.chmod(folder, 0o1777)
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def sockets_of_another_user() -> Iterator[None]:
    """Meanwhile this process connects and listens as the second user does: the kernel notes the effective user."""
    skip_without_another_user()
    os.seteuid(uid())
    try:
        yield
    finally:
        os.seteuid(0)
