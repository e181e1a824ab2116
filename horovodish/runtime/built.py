"""The features of this installation: Horovod's questions about how it was built."""

from horovodish.runtime import nccl_library

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "nccl_built",
    "rocm_built",
]


def mpi_built() -> bool:
    """True: the engine looks MPI's functions up at run time and needs no build of its own for it."""
    return True


def nccl_built() -> int:
    """The version of the NCCL library that is found, such as 22900 for 2.29.0; 0 if there is none that can be used."""
    found = nccl_library.find()
    if found is None or found.version is None or found.too_old:
        return 0
    major, minor, patch = found.version
    return major * 10000 + minor * 100 + patch


def cuda_built() -> bool:
    """True: the engine looks the functions of CUDA's driver up at run time and needs no build of its own for it."""
    return True


def rocm_built() -> bool:
    """False: there is no ROCm support."""
    return False


def gloo_built() -> bool:
    """False: shared memory and MPI take the place of gloo."""
    return False


def gloo_enabled() -> bool:
    """False: shared memory and MPI take the place of gloo."""
    return False


def ddl_built() -> bool:
    """False: there is no IBM DDL support."""
    return False


def ccl_built() -> bool:
    """False: there is no oneCCL support."""
    return False
