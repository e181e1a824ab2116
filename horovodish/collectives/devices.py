"""CUDA devices as the shims hand them to the engine. Nothing is loaded before the first CUDA tensor."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

from horovodish import _native
from horovodish.collectives.operation import Operation, text_of
from horovodish.collectives.reduce_ops import Sum
from horovodish.errors import UnsupportedTensorError
from horovodish.runtime import basics, nccl_library

__all__ = ["HOST", "ON_HOST", "Placement", "choose", "problem", "problem_for_nccl", "use"]

HOST = -1
"""The engine's device number for host memory."""


class Placement(NamedTuple):
    """Where the engine finds the memory of an operation.

    Attributes:
        device: the CUDA device, or `HOST`.
        current_stream: gives the stream that is current in the calling thread. Called when the operation is submitted,
            for the stream on which the inputs are ready, and in a wait, for the stream that is to wait for the result.
            None for host memory.
        is_staged: the tensors are on a device, but NCCL cannot do this, so copies in host memory travel.
    """

    device: int
    current_stream: Callable[[], int] | None
    is_staged: bool


ON_HOST = Placement(HOST, None, is_staged=False)

_FIRST_WITH_SHARED_GPU = (2, 30, 0)
_REMEDY = "pip install nvidia-nccl-cu13 (or nvidia-nccl-cu12, as torch.version.cuda says)"

_used: int | None = None


def choose(operation: Operation, ordinal: int, dtypes: Sequence[int]) -> int:
    """Where an operation on tensors of a device takes place, the same on all ranks that ask alike. Not collective.

    Args:
        operation: what to do.
        ordinal: of the CUDA device, `HOST` for host memory.
        dtypes: of the tensors, values of `_native.DTYPES`.

    Returns:
        `ordinal`, or `HOST` where NCCL cannot do it, so that the shim has to copy the tensors to the host and back.

    Raises:
        UnsupportedTensorError: as `use`.
    """
    if ordinal == HOST or problem_for_nccl(operation, dtypes):
        return HOST
    use(ordinal, str(operation.name))
    return ordinal


def problem_for_nccl(operation: Operation, dtypes: Sequence[int]) -> str:
    """Why NCCL cannot do an operation, the same on all ranks that ask alike; empty when it can. Not collective."""
    op, factors = Sum if operation.op is None else operation.op, (operation.prescale_factor, operation.postscale_factor)
    kind, codec = _native.KINDS[operation.kind], text_of(operation.codec)
    return _native.problem_for_nccl(kind, op, list(dtypes), *factors, codec)


def problem() -> str:
    """Why CUDA tensors cannot be used in this process, whatever the device; empty when they can. Not collective."""
    try:
        _load()
    except RuntimeError as problem:
        return str(problem)
    return ""


def use(ordinal: int, name: str) -> None:
    """Makes sure that tensors of this device can be handed over. Not collective.

    Args:
        ordinal: of the CUDA device.
        name: what to call the tensor in an error.

    Raises:
        UnsupportedTensorError: no driver, no NCCL or one that is too old, or this rank has used another device.
    """
    global _used
    if ordinal == _used:
        return
    try:
        _load()
        _native.open_device(ordinal)
    except RuntimeError as problem:
        raise UnsupportedTensorError(f"{name}: CUDA tensors cannot be used: {problem}") from None
    if _used is not None:
        raise UnsupportedTensorError(
            f"{name}: the tensor is on GPU {ordinal}, but rank {basics.rank()} has used GPU {_used}, and a rank uses "
            "one GPU. Choose it once, before the first tensor: torch.cuda.set_device(hvd.local_rank())"
        )
    _used = ordinal


@functools.cache
def _load() -> None:
    found = nccl_library.find()
    if found is None and basics.size() > 1:
        raise RuntimeError(f"NCCL was not found. Remedy: {_REMEDY}")
    if found is not None and found.version is not None and found.too_old:
        oldest = ".".join(map(str, nccl_library.OLDEST))
        raise RuntimeError(
            f"NCCL {nccl_library.number(found.version)} of {found.path} ({found.origin}) is too old, {oldest} or later "
            f"is needed. Remedy: {_REMEDY}"
        )
    if nccl_library.ranks_share_gpus() and found is not None and found.version is not None:
        _let_ranks_share(found.version)
    _native.load_device_libraries(nccl_library.cuda_library(), found.path if found else "")


def _let_ranks_share(version: tuple[int, int, int]) -> None:
    """Keeps NCCL from refusing two ranks on one GPU. It reads these variables with its first communicator."""
    if version >= _FIRST_WITH_SHARED_GPU:
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        os.environ.setdefault("NCCL_MAX_CTAS", "8")  # the kernels of all ranks must fit at once
    else:
        # As if every rank were a host of its own: they talk over sockets.
        os.environ.setdefault("NCCL_HOSTID", f"{socket.gethostname()}-{basics.rank()}")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def _forget() -> None:
    global _used
    _used = None


basics.follow(stopped=_forget)
