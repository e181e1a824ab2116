"""Which NCCL library is used: the one that is loaded, else a wheel's, else the system's. Standard library only."""

import ctypes
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = [
    "CUDA_VARIABLE",
    "NCCL_VARIABLE",
    "OLDEST",
    "Found",
    "candidates",
    "cuda_library",
    "find",
    "number",
    "ranks_share_gpus",
]

OLDEST = (2, 18)
"""The first NCCL whose communicators do all that is asked of them."""

CUDA_VARIABLE = "HOROVODISH_TEST_CUDA"
NCCL_VARIABLE = "HOROVODISH_TEST_NCCL"
"""For tests: the files of the libraries to take for CUDA's driver and NCCL."""

SHARED_GPU_VARIABLE = "HOROVODISH_TEST_SHARED_GPU"
"""For tests on a machine with one GPU: several ranks use it."""

_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_NAME = "libnccl.so"


@dataclass(frozen=True)
class Found:
    """An NCCL library.

    Attributes:
        path: what to open: a file, or a name for the loader.
        origin: where it is from, in words.
        version: major, minor and patch; None if it does not load or is no NCCL.
    """

    path: str
    origin: str
    version: tuple[int, int, int] | None

    @property
    def too_old(self) -> bool:
        """Whether it lacks what the engine calls."""
        return self.version is not None and self.version[:2] < OLDEST

    def __str__(self) -> str:
        return f"{number(self.version)} {self.path} ({self.origin})" if self.version else f"{self.path} ({self.origin})"


def number(version: tuple[int, int, int]) -> str:
    """A version as text."""
    return ".".join(map(str, version))


def cuda_library(environ: Mapping[str, str] = os.environ) -> str:
    """The name of CUDA's driver library, which comes with the driver."""
    return environ.get(CUDA_VARIABLE, "libcuda.so.1")


def ranks_share_gpus(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether several ranks may use one GPU."""
    return SHARED_GPU_VARIABLE in environ


def candidates(environ: Mapping[str, str] = os.environ) -> Iterator[tuple[str, str]]:
    """The files to look at in this process, with their origins, the first choice first."""
    import importlib.metadata  # a sixth of what importing horovodish would take, and few processes need it

    if NCCL_VARIABLE in environ:
        yield environ[NCCL_VARIABLE], NCCL_VARIABLE
        return
    # Two versions in one process would share symbols and settings, so what a framework has loaded is taken.
    yield from ((path, "loaded already") for path in _loaded())
    for wheel in _WHEELS:
        try:
            files = importlib.metadata.files(wheel) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        yield from ((str(file.locate()), wheel) for file in files if file.name.startswith(_NAME))
    yield f"{_NAME}.2", "the system's"


def find(environ: Mapping[str, str] = os.environ) -> Found | None:
    """The library that this process takes, None if there is none. Loads it, and touches no GPU."""
    for path, origin in candidates(environ):
        version = _version_of(path)
        if version is not None:
            return Found(path, origin, version)
    return None


def _loaded() -> list[str]:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = (line.split(maxsplit=5)[5].strip() for line in maps if _NAME in line)
        return list(dict.fromkeys(path for path in paths if os.path.basename(path).startswith(_NAME)))


def _version_of(path: str) -> tuple[int, int, int] | None:
    code = ctypes.c_int()
    try:
        failed = ctypes.CDLL(path).ncclGetVersion(ctypes.byref(code))
    except (OSError, AttributeError):
        return None
    # Until 2.8 the number had one digit less: 2708 is 2.7.8.
    major, rest = divmod(code.value, 10000 if code.value >= 10000 else 1000)
    return None if failed else (major, rest // 100, rest % 100)
