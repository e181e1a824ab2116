"""The private folder of a run on the launcher's host. On other hosts each supervisor has one."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from horovodish.launcher.program import socket_path
from horovodish.launcher.reception import LONGEST_PATH_BYTES
from horovodish.launcher.supervisor import MEMORY, SEGMENTS

__all__ = ["run_folder"]


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """A private folder that exists as long as the run, with a link to one in memory.

    The link lets the supervisors remove both when the launcher was killed.
    """
    longest = LONGEST_PATH_BYTES - len(str(socket_path(Path("/horovodish-XXXXXXXX"))))
    parent = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(
        prefix="horovodish-", dir=parent if len(parent) <= longest else "/tmp", ignore_cleanup_errors=True
    ) as folder:
        if not os.access(MEMORY, os.W_OK):
            yield Path(folder)
            return
        with tempfile.TemporaryDirectory(prefix="hvd-", dir=MEMORY, ignore_cleanup_errors=True) as in_memory:
            Path(folder, SEGMENTS).symlink_to(in_memory)
            yield Path(folder)
