"""What is installed besides MPI: frameworks and the CUDA driver. Nothing is imported, no GPU is touched."""

import ctypes
import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from horovodish.nccl_library import cuda_library

__all__ = ["FRAMEWORKS", "Package", "cuda_driver", "package", "torchs_cuda"]

# The distributions that bring each framework.
FRAMEWORKS = {
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu"),
    "keras": ("keras",),
    "jax": ("jax",),
}
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


def package(module: str, *distributions: str) -> Package | None:
    """The package of that module, by the first of these distributions that is installed."""
    for distribution in distributions or (module,):
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        spec = importlib.util.find_spec(module)
        return Package(version, str(Path(spec.origin).parent) if spec and spec.origin else "")
    return None


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
        failed = ctypes.CDLL(cuda_library()).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else (version.value // 1000, version.value % 1000 // 10)
