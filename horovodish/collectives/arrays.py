"""The facts that the engine needs about a NumPy array, and the checks that it can take the array at all."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from horovodish._native import DTYPES
from horovodish.collectives.reduce_ops import Adasum, ReduceOp
from horovodish.errors import UnsupportedTensorError

Array: TypeAlias = npt.NDArray[Any]


@runtime_checkable
class SupportsDLPack(Protocol):
    """Any array that can show its memory by the DLPack protocol, such as a CPU tensor of PyTorch or JAX."""

    def __dlpack__(self, *, stream: Any = None) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, Any]: ...


_DLPACK_CPU = 1
FLOATING = frozenset(DTYPES[name] for name in ("float16", "bfloat16", "float32", "float64"))
"""The engine's numbers of the dtypes that Adasum takes."""
ITEM_BYTES = {code: 2 if name == "bfloat16" else np.dtype(name).itemsize for name, code in DTYPES.items()}
"""How many bytes a number of each of the engine's dtypes takes."""
REDUCED_AS = {"bool": "uint8", "uint16": "int32", "uint32": "int64", "uint64": "int64"}
"""The dtypes that are moved and never reduced, and for each the one to convert to before a reduction."""
_codes: dict[ReduceOp | None, dict[Any, int]] = {op: {} for op in (None, *ReduceOp)}


def host_array(tensor: Array | SupportsDLPack, name: str) -> Array:
    """`tensor` as a C-contiguous NumPy array over the same memory.

    Args:
        tensor: a NumPy array or scalar, or any CPU array with `__dlpack__`.
        name: what to call it in an error.

    Returns:
        The array itself, or one that shares its memory.

    Raises:
        UnsupportedTensorError: no array, not in host memory, masked, not aligned, or not C-contiguous.
    """
    array = tensor if type(tensor) is np.ndarray else _converted(tensor, name)
    flags = array.flags
    if not flags.aligned:
        raise UnsupportedTensorError(
            f"{name}: the array's memory is not aligned for {array.dtype}; pass array.copy(), and for an operation in "
            "place copy the result back"
        )
    if not flags.c_contiguous:
        raise UnsupportedTensorError(
            f"{name}: the array of shape {array.shape} with strides {array.strides} is not C-contiguous; "
            "pass numpy.ascontiguousarray(array), and for an operation in place copy the result back"
        )
    return array


def writable_array(tensor: Array | SupportsDLPack, name: str) -> Array:
    """As `host_array`, for an operation in place.

    Raises:
        UnsupportedTensorError: as for `host_array`, or the array is read-only.
    """
    array = host_array(tensor, name)
    if array is not tensor and isinstance(tensor, np.generic):
        raise UnsupportedTensorError(f"{name}: a NumPy scalar cannot be written in place; pass an array")
    if not array.flags.writeable:
        raise UnsupportedTensorError(
            f"{name}: the array is read-only, so no result can be written into it; pass a copy"
        )
    return array


def dtype_code(array: Array, name: str, *, op: ReduceOp | None = None) -> int:
    """The engine's number of the array's dtype.

    Args:
        array: any array.
        name: what to call it in an error.
        op: how it is reduced; None when it is only moved.

    Returns:
        A value of `_native.DTYPES`.

    Raises:
        UnsupportedTensorError: the engine has no such dtype, its bytes are in the other machine's order, or it
            cannot be reduced in this way.
    """
    dtype = array.dtype
    code = _codes[op].get(dtype)
    if code is None:
        if not dtype.isnative:
            raise UnsupportedTensorError(
                f"{name}: dtype {dtype} is not in native byte order; pass array.astype(array.dtype.newbyteorder('='))"
            )
        # bfloat16 is no dtype of NumPy's: ml_dtypes adds it, and only its name tells.
        known = dtype.name if dtype.name in DTYPES else str(dtype)
        code = _codes[op][dtype] = checked_dtype(known, name, op, "array", "array.astype(numpy.{})")
    return code


def checked_dtype(dtype: str, name: object, op: ReduceOp | None, noun: str, conversion: str) -> int:
    """The engine's number of a dtype.

    Args:
        dtype: its name.
        name: what to call the tensor in an error.
        op: how it is reduced; None when it is only moved.
        noun: what messages call a tensor.
        conversion: how to make one of another dtype, with `{}` in its place.

    Raises:
        UnsupportedTensorError: the engine has no such dtype, or it cannot be reduced in this way.
    """
    if dtype not in DTYPES:
        parts = "pass the real and the imaginary part, each as an array"
        remedy = parts if "complex" in dtype else "allgather_object() and broadcast_object() take any values"
        supported = ", ".join(DTYPES)
        raise UnsupportedTensorError(f"{name}: dtype {dtype} is not supported; supported are {supported}; {remedy}")
    if op is not None and dtype in REDUCED_AS:
        raise UnsupportedTensorError(
            f"{name}: {dtype} {noun}s cannot be reduced; pass {conversion.format(REDUCED_AS[dtype])}"
        )
    if op is Adasum and DTYPES[dtype] not in FLOATING:
        raise UnsupportedTensorError(f"{name}: op=Adasum needs floating-point numbers, not {dtype}; use op=Sum")
    return DTYPES[dtype]


def _converted(tensor: Any, name: str) -> Array:
    if hasattr(tensor, "mask") and isinstance(tensor, np.ndarray):
        raise UnsupportedTensorError(f"{name}: the mask of a masked array would be lost; pass array.filled(value)")
    if isinstance(tensor, np.ndarray | np.generic):
        return np.asarray(tensor)
    if not isinstance(tensor, SupportsDLPack):
        raise UnsupportedTensorError(
            f"{name}: expected a NumPy array or an array with __dlpack__, got {type(tensor).__name__}; "
            "pass numpy.asarray(value)"
        )
    if hasattr(tensor, "is_neg") and tensor.is_neg():
        raise UnsupportedTensorError(
            f"{name}: this {type(tensor).__name__} is a view that negates its memory, and DLPack does not say so; pass "
            "tensor.resolve_neg()"
        )
    kind, index = tensor.__dlpack_device__()
    if kind != _DLPACK_CPU:
        raise UnsupportedTensorError(
            f"{name}: {type(tensor).__name__} is on DLPack device ({int(kind)}, {int(index)}), not in host memory; "
            "use its framework's module, such as horovodish.torch, or copy it to the host"
        )
    try:
        return np.from_dlpack(tensor)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedTensorError(
            f"{name}: NumPy cannot view this {type(tensor).__name__} ({error}); "
            "use its framework's module, such as horovodish.torch"
        ) from error
