"""How a rank of `horovodish run` can be asked what it does, by `horovodish status`."""

import faulthandler
import functools
import os
import signal
import socket
from contextlib import ExitStack, suppress

from horovodish import _native
from horovodish.launch import run_folder

__all__ = ["open_for"]

_PAGE_BYTES = 4096
_STACK_SIGNAL = signal.SIGRTMAX - 2
"""No library is known to use it. Only the thread that answers gets it."""


def open_for(engine: _native.Engine) -> None:
    """Let an engine answer, if a launcher may ask. Costs a thread that sleeps and a page of memory.

    Training matters more: where the host has no room for the page, nothing is opened, and `horovodish status` says so.
    """
    page_path, door_path = run_folder.place_in_memory("page"), run_folder.place_in_memory("door")
    if page_path is None or door_path is None or not run_folder.is_followed():
        return
    with suppress(OSError, RuntimeError), ExitStack() as opened:
        for path in (page_path, door_path):
            path.unlink(missing_ok=True)  # of an earlier engine of this rank
        page = os.open(page_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        opened.callback(os.close, page)
        os.posix_fallocate(page, 0, _PAGE_BYTES)  # without room, a write to the page would end the process
        listener = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(str(door_path))
        listener.listen()
        engine.show_status(page, os.dup(listener.fileno()), _stacks(), _STACK_SIGNAL)


@functools.cache
def _stacks() -> int:
    """The file where this process writes its Python stacks upon `_STACK_SIGNAL`. -1: the script uses that signal."""
    if signal.getsignal(_STACK_SIGNAL) is not signal.SIG_DFL:
        return -1
    file = os.memfd_create("horovodish-stacks")
    faulthandler.register(_STACK_SIGNAL, file, all_threads=True, chain=False)
    return file
