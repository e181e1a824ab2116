"""What the engine needs to know about a tensor, and the checks that it can take the tensor at all."""

from __future__ import annotations

from typing import TypeVar

import torch

from horovodish._native import DTYPES
from horovodish.errors import UnsupportedTensorError

TensorT = TypeVar("TensorT", bound=torch.Tensor)

_CODES = {getattr(torch, name): code for name, code in DTYPES.items()}

Member = tuple[int, int, int, tuple[int, ...]]
"""As the engine takes it: source address, target address, dtype, shape."""


def dtype_code(dtype: torch.dtype, name: str, *, reduces: bool) -> int:
    """The engine's number of a dtype.

    Args:
        dtype: any dtype of torch.
        name: what to call the tensor in an error.
        reduces: whether the operation does arithmetic, which bool has none of.

    Returns:
        A value of `_native.DTYPES`.

    Raises:
        UnsupportedTensorError: the engine has no such dtype, or it is bool and the operation reduces.
    """
    if dtype == torch.bool and reduces:
        raise UnsupportedTensorError(f"{name}: bool tensors cannot be reduced; pass tensor.to(torch.uint8)")
    code = _CODES.get(dtype)
    if code is None:
        raise UnsupportedTensorError(f"{name}: dtype {dtype} is not supported; supported are {', '.join(DTYPES)}")
    return code


def check_host_memory(tensor: object, name: str) -> None:
    """Passes dense tensors in host memory, whatever their strides.

    Args:
        tensor: anything that a user passed.
        name: what to call it in an error.

    Raises:
        UnsupportedTensorError: no tensor, on another device, or sparse.
    """
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedTensorError(
            f"{name}: expected a torch.Tensor, got {type(tensor).__name__}; pass torch.as_tensor(value)"
        )
    if tensor.device.type == "cuda":
        raise UnsupportedTensorError(
            f"{name}: the tensor is on {tensor.device}; CUDA tensors come with the NCCL plane, which is not there yet. "
            "Pass tensor.cpu()"
        )
    if tensor.device.type != "cpu":
        raise UnsupportedTensorError(f"{name}: device {tensor.device} is not supported; pass tensor.cpu()")
    if tensor.layout != torch.strided:
        raise UnsupportedTensorError(f"{name}: layout {tensor.layout} is not supported; pass tensor.to_dense()")


def source_of(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """`tensor` outside of the autograd graph, copied where its elements do not lie one after another, row-major.

    Raises:
        UnsupportedTensorError: as `check_host_memory`.
    """
    check_host_memory(tensor, name)
    return tensor.detach().contiguous()


def target_of(tensor: TensorT, name: str) -> TensorT:
    """`tensor` itself, for an operation in place.

    Raises:
        UnsupportedTensorError: as `check_host_memory`, or `tensor` is not contiguous.
    """
    check_host_memory(tensor, name)
    if not tensor.is_contiguous():
        raise UnsupportedTensorError(
            f"{name}: the tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()} is not contiguous, so "
            "no result can be written into it; use the operation without _ and copy its result back"
        )
    return tensor


def member(source: torch.Tensor, target: torch.Tensor | None, name: str, *, reduces: bool) -> Member:
    """The engine's view of one tensor and of the place for its result, which the engine allocates if there is none.

    Raises:
        UnsupportedTensorError: as `dtype_code`.
    """
    target_address = 0 if target is None else target.data_ptr()
    return source.data_ptr(), target_address, dtype_code(source.dtype, name, reduces=reduces), tuple(source.shape)
