"""How supervisors are started: the folder of a run, and the command that mpirun runs in place of every rank."""

import base64
import contextlib
import os
import socket
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from horovodish.launcher.supervisor import supervisor, tcp_end
from horovodish.launcher.supervisor.supervisor import LAUNCHER_VARIABLE, MEMORY, SEGMENTS

TEXT_VARIABLE = "HOROVODISH_SUPERVISOR"
EXPORTED = (LAUNCHER_VARIABLE, TEXT_VARIABLE)
"""Variables that supervisors on other hosts need in their environment. They do not pass them on to the ranks."""

LONGEST_PATH_BYTES = 107  # the kernel's limit for the name of a socket

# Makes two modules of the text that the variable holds. The package need not be installed there, nor in the same place.
_LOADER = (
    "import base64,os,sys,types,zlib;"
    f"l,s=zlib.decompress(base64.b64decode(os.environ.pop('{TEXT_VARIABLE}'))).split(b'\\0');"
    "m=sys.modules['horovodish.launcher.supervisor.tcp_end']=types.ModuleType('horovodish.launcher.supervisor.tcp_end');"
    "exec(l,m.__dict__);exec(s)"
)


def supervisor_text() -> str:
    """The value of `TEXT_VARIABLE`."""
    texts = [Path(module.__file__).read_bytes() for module in (tcp_end, supervisor) if module.__file__]
    return base64.b64encode(zlib.compress(b"\0".join(texts), 9)).decode()


def supervisor_command(folder: Path, rank_variable: str, segments_variable: str, *, is_far: bool) -> list[str]:
    """The supervisor process that mpirun starts in place of each rank.

    Args:
        folder: of the run, on this host.
        rank_variable: the variable that tells a process its rank, set by mpirun.
        segments_variable: the variable that tells MPI its folder for shared memory; empty if MPI needs none.
        is_far: whether another host than this one takes part. The same Python must be there.
    """
    program = ["-c", _LOADER] if is_far else [str(supervisor.__file__)]
    words = [f"host={socket.gethostname()}", f"socket={socket_path(folder)}"]
    words += [f"rank={rank_variable}", f"segments={segments_variable}"]
    return [sys.executable, "-I", "-S", *program, *words]


def socket_path(run_dir: Path) -> Path:
    """The Unix socket where supervisors of this host report."""
    return run_dir / "launcher.socket"


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """A private folder on this host that exists as long as the run. On other hosts each supervisor makes its own.

    It has a link to a folder in memory. With the link the supervisors find and remove both if the launcher was killed.
    """
    parent = os.path.realpath(tempfile.gettempdir())  # the owner of a link could let it lead elsewhere later
    if len(str(socket_path(Path(parent, "horovodish-XXXXXXXX")))) > LONGEST_PATH_BYTES:
        parent = "/tmp"
    with tempfile.TemporaryDirectory(prefix="horovodish-", dir=parent, ignore_cleanup_errors=True) as folder:
        if not os.access(MEMORY, os.W_OK):
            yield Path(folder)
            return
        with tempfile.TemporaryDirectory(prefix="hvd-", dir=MEMORY, ignore_cleanup_errors=True) as in_memory:
            Path(folder, SEGMENTS).symlink_to(in_memory)
            yield Path(folder)
