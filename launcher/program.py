"""The command that mpirun runs in place of every rank: the supervisor, as a file or as its text."""

import base64
import socket
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

from horovodish.launcher import far_link, supervisor
from horovodish.launcher.supervisor import LAUNCHER_VARIABLE

__all__ = ["EXPORTED", "TEXT_VARIABLE", "supervisor_command", "supervisor_text"]

TEXT_VARIABLE = "HOROVODISH_SUPERVISOR"
EXPORTED = (LAUNCHER_VARIABLE, TEXT_VARIABLE)
"""What supervisors on other hosts must find in their environment. They keep it from the ranks."""

# Makes two modules of the text that the variable holds. The package need not be installed there, nor in the same place.
_LOADER = (
    "import base64,os,sys,types,zlib;"
    f"l,s=zlib.decompress(base64.b64decode(os.environ.pop('{TEXT_VARIABLE}'))).split(b'\\0');"
    "m=sys.modules['horovodish.launcher.far_link']=types.ModuleType('horovodish.launcher.far_link');"
    "exec(l,m.__dict__);exec(s)"
)


def supervisor_text() -> str:
    """The value of `TEXT_VARIABLE`."""
    texts = [Path(module.__file__).read_bytes() for module in (far_link, supervisor) if module.__file__]
    return base64.b64encode(zlib.compress(b"\0".join(texts), 9)).decode()


def supervisor_command(
    run_dir: Path, rank_variable: str, segments_variable: str, command: Sequence[str], *, is_far: bool
) -> list[str]:
    """What every rank's place is taken by.

    Args:
        run_dir: the folder of the run on this host.
        rank_variable: in which mpirun tells a process its rank.
        segments_variable: in which MPI is told a folder for shared memory; empty if it needs none.
        command: what each rank runs.
        is_far: whether another host than this one takes part. The same Python must be there.
    """
    options = {
        "host": socket.gethostname(),
        "socket": str(socket_path(run_dir)),
        "rank": rank_variable,
        "segments": segments_variable,
    }
    program = ["-c", _LOADER] if is_far else [str(supervisor.__file__)]
    words = [f"{name}={value}" for name, value in options.items()]
    return [sys.executable, "-I", "-S", *program, *words, "--", *command]


def socket_path(run_dir: Path) -> Path:
    """The Unix socket on which supervisors of this host report."""
    return run_dir / "launcher.socket"
