"""The facts that the engine needs about a tensor, and the checks that it can take the tensor at all."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch.nn.parameter import is_lazy

from horovodish._native import DTYPES
from horovodish.collectives.arrays import FLOATING, checked_dtype
from horovodish.collectives.consistency import Checksums
from horovodish.collectives.operation import Member
from horovodish.collectives.reduce_ops import Adasum, ReduceOp, Sum
from horovodish.errors import UnsupportedTensorError

TensorT = TypeVar("TensorT", bound=torch.Tensor)

_CODES = {getattr(torch, name): code for name, code in DTYPES.items() if hasattr(torch, name)}  # uint16 since 2.3
_FAST_CODES = {dtype: code for dtype, code in _CODES.items() if code in FLOATING}
"""Numbers of the dtypes that every operation takes."""


def dtype_code(dtype: torch.dtype, name: object, *, reduces: bool) -> int:
    """The engine's number of a dtype.

    Args:
        dtype: any dtype of torch.
        name: what to call the tensor in an error.
        reduces: whether the operation does arithmetic, which some dtypes have none of.

    Returns:
        A value of `_native.DTYPES`.

    Raises:
        UnsupportedTensorError: the engine has no such dtype, or the operation reduces and this dtype is only moved.
    """
    if dtype not in _CODES:
        remedy = "; pass torch.view_as_real(tensor.resolve_conj())" if dtype.is_complex else ""
        supported = ", ".join(DTYPES)
        raise UnsupportedTensorError(f"{name}: dtype {dtype} is not supported; supported are {supported}{remedy}")
    return checked_dtype(
        str(dtype).removeprefix("torch."), name, Sum if reduces else None, "tensor", "tensor.to(torch.{})"
    )


def check_tensor(tensor: object, name: object) -> None:
    """Raise unless this is a dense tensor with memory, on the host or on a CUDA device, of any strides.

    Args:
        tensor: anything that a user passed.
        name: what to call it in an error.

    Raises:
        UnsupportedTensorError: no tensor, on a device of another kind, sparse, or without memory.
    """
    if type(tensor) is not torch.Tensor and not isinstance(tensor, torch.Tensor):
        raise UnsupportedTensorError(
            f"{name}: expected a torch.Tensor, got {type(tensor).__name__}; pass torch.as_tensor(value)"
        )
    if (tensor.is_cpu or tensor.is_cuda) and tensor.layout is torch.strided and not tensor.is_nested:
        if _has_memory(tensor):
            return
        if is_lazy(tensor):
            raise UnsupportedTensorError(
                f"{name}: this {type(tensor).__name__} has no shape yet; call the model with one batch before that"
            )
        raise UnsupportedTensorError(
            f"{name}: this {type(tensor).__name__} has no memory of its own, like a DTensor or a tensor "
            "within torch.func; pass a plain tensor of this rank, such as tensor.to_local()"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise UnsupportedTensorError(f"{name}: device {tensor.device} is not supported; pass tensor.cpu()")
    if tensor.is_nested:
        raise UnsupportedTensorError(
            f"{name}: a nested tensor is not supported; pass tensor.values(), or each tensor of tensor.unbind()"
        )
    raise UnsupportedTensorError(
        f"{name}: layout {tensor.layout} is not supported; pass tensor.to_dense(), or use sparse_allreduce_async"
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether `check_tensor` takes the tensor."""
    try:
        check_tensor(tensor, "")
    except UnsupportedTensorError:
        return False
    return True


def source_of(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """`tensor` outside of the autograd graph, copied where its elements do not lie one after another, row-major.

    Raises:
        UnsupportedTensorError: as `check_tensor`.
    """
    check_tensor(tensor, name)
    row_major = (tensor.detach() if tensor.requires_grad else tensor).contiguous()
    return row_major.resolve_neg() if row_major.is_neg() else row_major


def target_of(tensor: TensorT, name: str) -> TensorT:
    """`tensor` itself, for an operation in place.

    Raises:
        UnsupportedTensorError: as `check_tensor`, or `tensor` is not contiguous, or is a view that negates its memory.
    """
    check_tensor(tensor, name)
    if tensor.is_neg():
        raise UnsupportedTensorError(
            f"{name}: the tensor is a view that negates its memory, such as the imaginary part of a conjugate, so no "
            "result can be written into it; use the operation without _ and copy its result back"
        )
    if not tensor.is_contiguous():
        raise UnsupportedTensorError(
            f"{name}: the tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()} is not contiguous, so "
            "no result can be written into it; use the operation without _ and copy its result back"
        )
    return tensor


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return tensor.data_ptr() != 0 or tensor.numel() == 0
    except (RuntimeError, ValueError):  # within torch.func transforms; parameters of lazy modules
        return False


def moves_as_bytes(tensor: torch.Tensor) -> bool:
    """Whether the engine does not know the dtype, but can move the bytes, which quantized tensors do not lend."""
    return tensor.dtype not in _CODES and not tensor.is_quantized


def member(source: torch.Tensor, target: torch.Tensor | None, name: object, op: ReduceOp | None = None) -> Member:
    """The engine's view of one tensor and of the place for its result, which the engine allocates if there is none.

    Raises:
        UnsupportedTensorError: as `dtype_code`, or Adasum of integers. `op` is None where nothing is reduced.
    """
    dtype = source.dtype
    code = _FAST_CODES.get(dtype)
    if code is None:
        code = dtype_code(dtype, name, reduces=op is not None)
        if op is Adasum:
            raise UnsupportedTensorError(f"{name}: op=Adasum needs floating-point numbers, not {dtype}; use op=Sum")
    start = source.data_ptr()
    target_start = start if target is source else 0 if target is None else target.data_ptr()
    return start, target_start, code, source.shape


BROADCAST_REMEDY = "call hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first step"
_WORDS_OF_A_BLOCK = 1 << 20
_ODD = (-0x61C8864680B583EB, -0x3D4D51C2D82B14B1, 0x2545F4914F6CDD1D)  # odd, bits of no pattern; 64 bits with a sign
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in the order of the rows, one after the other. A copy unless they lie like this already."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()


def checksum_of(tensor: torch.Tensor, start: int = 0) -> int:
    """The CRC-32 of a dense tensor's bytes, on any device. `start`: the checksum of what comes before."""
    return zlib.crc32(in_rows(tensor).view(torch.uint8).cpu().numpy().data, start) if tensor.numel() else start


def sum_of_words(tensor: torch.Tensor) -> torch.Tensor:
    """A sum of a dense tensor's words of at most 32 bits, each times an odd number of its place. A GPU is quick at it.

    The sum is modulo 2^64. A product with an odd number loses no bits, and values that change places change the sum.
    Beside the tensor it takes 16 MiB at most.
    """
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    words = in_rows(real).view(_WORDS[real.element_size()])
    factors = _factors(min(len(words), _WORDS_OF_A_BLOCK), words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for block in words.split(_WORDS_OF_A_BLOCK):
        total = total * _ODD[2] + (block * factors[: len(block)]).sum()
    return total


def _factors(count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers of 64 bits, one for each place, that look random and are the same on every rank."""
    factors = torch.arange(1, count + 1, dtype=torch.int64, device=device).mul_(_ODD[0])
    return factors.bitwise_xor_(factors >> 32).mul_(_ODD[1]).bitwise_or_(1)


@torch.no_grad()
def parameter_checksums(named: Sequence[tuple[str, torch.Tensor]]) -> Checksums:
    """Numbers that differ if parameters differ. Those of a GPU are sums, so that the parameters stay there."""
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for _, parameter in named:
        if parameter.device.type != "cpu":
            sums.setdefault(parameter.device, []).append(sum_of_words(parameter))
    found = {device: iter(torch.stack(those).tolist()) for device, those in sums.items()}
    return {
        f"parameter '{name}'": (
            f"{parameter.dtype} of shape {tuple(parameter.shape)}",
            next(found[parameter.device]) if parameter.device in found else checksum_of(parameter),
        )
        for name, parameter in named
    }
