"""The report of `horovodish check`: what is installed, and what to do about what is missing."""

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Mapping

from horovodish.errors import LaunchError
from horovodish.launcher.installation import candidates, find_library, inspect, matching
from horovodish.version import __version__

__all__ = ["check", "cuda_driver", "nccl", "version_of"]

# The distributions that bring each framework.
FRAMEWORKS = {
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu"),
    "keras": ("keras",),
    "jax": ("jax",),
}
NCCL_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
MISSING = "not found"


def check(environ: Mapping[str, str]) -> int:
    """Prints what is installed, line by line, then what to do; any process can call it.

    Returns:
        The exit status: 0 if ranks can be started here, 1 if not.
    """
    _line("horovodish", __version__)
    _line("engine", _engine())
    _line("python", f"{platform.python_version()} {sys.executable}")
    _line("cores", str(len(os.sched_getaffinity(0))))
    for framework, distributions in FRAMEWORKS.items():
        _line(framework, version_of(*distributions) or "not installed")

    advice = []
    library = find_library(environ)
    _line("mpi4py", library.mpi4py or "not installed")
    _line("MPI library", f"{library.library} {library.path or ''}" if library.library else MISSING)
    mpiruns = [inspect(path, environ) for path in candidates(environ)]
    for mpirun in mpiruns:
        _line("mpirun", str(mpirun))
    if not mpiruns:
        _line("mpirun", MISSING)
    try:
        _line("pairing", f"good: `horovodish run` takes {matching(library, mpiruns).path}")
    except LaunchError as problem:
        _line("pairing", "none: ranks cannot be started")
        advice.append(str(problem))
    _line("NCCL", nccl() or MISSING)
    _line("CUDA driver", cuda_driver() or MISSING)

    for text in advice:
        print(f"\n{text}")
    return 1 if advice else 0


def version_of(*distributions: str) -> str | None:
    """The version of the first of these distributions that is installed; nothing is imported."""
    for distribution in distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def nccl() -> str | None:
    """Version and origin of the NCCL library: that of a wheel before that of the system. None if there is none."""
    for path in [*_in_wheels(), "libnccl.so.2"]:
        code = _ask(path, "ncclGetVersion")
        if code is not None:
            return f"{code // 10000}.{code % 10000 // 100}.{code % 100} {path}"
    return None


def cuda_driver() -> str | None:
    """The newest CUDA version that the installed driver supports. None if there is no driver."""
    code = _ask("libcuda.so.1", "cuDriverGetVersion")
    return None if code is None else f"supports CUDA {code // 1000}.{code % 1000 // 10}"


def _in_wheels() -> list[str]:
    found = []
    for wheel in NCCL_WHEELS:
        try:
            files = importlib.metadata.files(wheel) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found += [str(file.locate()) for file in files if file.name == "libnccl.so.2"]
    return found


def _ask(library: str, function: str) -> int | None:
    """What a C function of the form `int function(int *version)` says; None if the library does not load."""
    version = ctypes.c_int()
    try:
        failed = getattr(ctypes.CDLL(library), function)(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value


def _engine() -> str:
    native = importlib.util.find_spec("horovodish._native")
    return str(native.origin) if native else "not built"


def _line(name: str, text: str) -> None:
    print(f"{name:<12} {text}".rstrip(), flush=True)
