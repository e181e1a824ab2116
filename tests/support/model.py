"""What the collectives should give, computed by NumPy from values that every rank can make for all ranks."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

INTEGERS = ["uint8", "int8", "int16", "int32", "int64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
MOVED = ["bool", "uint16", "uint32", "uint64"]
"""What no operation reduces."""
OPS = ["Average", "Sum", "Min", "Max", "Product"]
PLANES = ["auto", "mpi_ring"]
LENGTHS = [0, 1, 7, 1_000_003]


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name)


def values(dtype: str, shape: int | tuple[int, ...], rank: int, op: str = "Sum") -> Array:
    """The values of one rank: signed where the dtype and the op allow it, and small enough that nothing overflows."""
    random = np.random.default_rng([rank, len(dtype), int(np.prod(shape))])
    if dtype == "bool":
        return random.integers(0, 2, shape).astype(bool)
    if dtype in INTEGERS or dtype in MOVED:
        low, high = (1, 4) if op == "Product" else (0 if dtype.startswith("u") else -30, 31)
        return random.integers(low, high, shape).astype(dtype)
    low, high = (0.5, 1.5) if op == "Product" else (-2.0, 2.0)
    return random.uniform(low, high, shape).astype(dtype_of(dtype))


def reduced(arrays: list[Array], op: str, prescale: float = 1.0, postscale: float = 1.0) -> Array:
    """The exact result for integers; in float64, not yet rounded to the dtype, for the others."""
    integer = arrays[0].dtype.kind in "iu"
    stack = np.stack([scaled(array.astype(np.int64 if integer else np.float64), prescale) for array in arrays])
    combine = {"Average": np.sum, "Sum": np.sum, "Min": np.min, "Max": np.max, "Product": np.prod}[op]
    result: Array = combine(stack, axis=0)
    # An average of integers and its scale are rounded once, together.
    result = scaled(result, postscale / len(arrays) if op == "Average" else postscale)
    return result.astype(arrays[0].dtype) if integer else result


def scaled(array: Array, factor: float) -> Array:
    if factor == 1.0:
        return array
    return np.trunc(array * factor).astype(array.dtype) if array.dtype.kind in "iu" else array * factor


def adasum(arrays: list[Array]) -> Array:
    """The recursion of the paper (arXiv:2006.02924) in float64; a rank without a partner goes up as it is."""
    if len(arrays) == 1:
        return arrays[0].astype(np.float64)
    distance = 1
    while 2 * distance < len(arrays):
        distance *= 2
    a, b = adasum(arrays[:distance]), adasum(arrays[distance:])
    common = float(np.vdot(a, b))
    return (1 - common / (2 * _square(a))) * a + (1 - common / (2 * _square(b))) * b


def _square(array: Array) -> float:
    return float(np.vdot(array, array)) or np.inf


def difference(result: Array, expected: Array, scale: float) -> str:
    """What is wrong with a result, or nothing.

    Args:
        result: what came back.
        expected: from `reduced`.
        scale: a bound on the magnitude of any intermediate value, to which rounding errors are relative.
    """
    if result.shape != expected.shape:
        return f"shape {result.shape} instead of {expected.shape}"
    if result.dtype.kind in "biu":
        wrong = np.flatnonzero(result != expected)
    else:
        # Four ranks are added in three steps. Each may round by half a unit in the last place.
        bound = 4 * float(ml_dtypes.finfo(result.dtype).eps) * scale
        error = np.abs(result.astype(np.float64) - expected)
        wrong = np.flatnonzero(~(error <= bound) & ~(np.isnan(expected) & np.isnan(result.astype(np.float64))))
    if wrong.size == 0:
        return ""
    first = wrong[0]
    return f"{wrong.size} of {result.size} wrong, [{first}] is {result.flat[first]} instead of {expected.flat[first]}"
