"""Which arrays the engine can take, and what is said about the others."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from horovodish import _native
from horovodish._native import DTYPES
from horovodish.collectives.arrays import dtype_code, host_array, writable_array
from horovodish.collectives.reduce_ops import Sum
from horovodish.errors import UnsupportedTensorError


class OnDevice:
    """An array that says it lies on a CUDA device."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 1)

    def __dlpack__(self, *, stream: Any = None) -> Any:
        raise BufferError("not reached")


class OnHost:
    """An array of another library, in host memory."""

    def __init__(self, array: np.ndarray[Any, Any]):
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.array.__dlpack__(**arguments)


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "bfloat16"])
def test_every_dtype_has_its_number(dtype: str) -> None:
    assert dtype_code(np.zeros(1, dtype), "x") == DTYPES[dtype]


def test_bfloat16_comes_from_ml_dtypes() -> None:
    assert dtype_code(np.zeros(1, ml_dtypes.bfloat16), "x", op=Sum) == DTYPES["bfloat16"]


def test_aliases_of_a_dtype_have_its_number() -> None:
    assert dtype_code(np.zeros(1, np.longlong), "x", op=Sum) == DTYPES["int64"]


@pytest.mark.parametrize("dtype", ["complex64", "float128", "S3", "O", "datetime64[s]", "i4,f4"])
def test_other_dtypes_are_refused(dtype: str) -> None:
    with pytest.raises(UnsupportedTensorError, match=r"^x: dtype .* is not supported; supported are .*float32"):
        dtype_code(np.zeros(1, dtype), "x")


def test_the_other_byte_order_is_refused() -> None:
    with pytest.raises(UnsupportedTensorError, match="is not in native byte order"):
        dtype_code(np.zeros(1, ">f4"), "x")


@pytest.mark.parametrize(
    ("dtype", "instead"), [("bool", "uint8"), ("uint16", "int32"), ("uint32", "int64"), ("uint64", "int64")]
)
def test_what_is_only_moved_is_not_reduced(dtype: str, instead: str) -> None:
    assert dtype_code(np.zeros(1, dtype), "x") == DTYPES[dtype]
    with pytest.raises(
        UnsupportedTensorError, match=rf"{dtype} arrays cannot be reduced; pass array.astype\(numpy.{instead}\)"
    ):
        dtype_code(np.zeros(1, dtype), "x", op=Sum)


@pytest.mark.parametrize("array", [np.zeros((4, 6))[:, ::2], np.zeros((4, 6)).T, np.zeros(6)[::-1]])
def test_non_contiguous_arrays_are_refused(array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(UnsupportedTensorError, match=r"is not C-contiguous; pass numpy.ascontiguousarray"):
        host_array(array, "x")


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1), (2, 3)])
def test_contiguous_arrays_are_taken_as_they_are(shape: tuple[int, ...]) -> None:
    array = np.zeros(shape)
    assert host_array(array, "x") is array
    assert _native.address(array) == array.ctypes.data


@pytest.mark.parametrize("value", [3, 2.5, [1.0, 2.0], None, "text"])
def test_what_is_no_array_is_refused(value: Any) -> None:
    with pytest.raises(UnsupportedTensorError, match=r"got (int|float|list|NoneType|str); pass numpy.asarray"):
        host_array(value, "x")


def test_numpy_scalars_are_arrays_of_zero_dimensions() -> None:
    assert host_array(np.float32(2.5), "x").shape == ()
    with pytest.raises(UnsupportedTensorError, match="a NumPy scalar cannot be written in place"):
        writable_array(np.float32(2.5), "x")


def test_masked_arrays_are_refused() -> None:
    with pytest.raises(UnsupportedTensorError, match=r"pass array.filled\(value\)"):
        host_array(np.ma.masked_array([1.0, 2.0], [True, False]), "x")


def test_read_only_arrays_are_input_only() -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    assert host_array(array, "x") is array
    with pytest.raises(UnsupportedTensorError, match="is read-only"):
        writable_array(array, "x")


def test_dlpack_arrays_share_their_memory() -> None:
    array = np.arange(3.0)
    assert host_array(OnHost(array), "x").ctypes.data == array.ctypes.data


def test_dlpack_arrays_elsewhere_are_refused() -> None:
    with pytest.raises(UnsupportedTensorError, match=r"OnDevice is on DLPack device \(2, 1\), not in host memory"):
        host_array(OnDevice(), "x")


def test_dlpack_arrays_that_numpy_cannot_view_are_refused() -> None:
    class Strange(OnHost):
        def __dlpack__(self, **arguments: Any) -> Any:
            raise BufferError("a strange dtype")

    with pytest.raises(UnsupportedTensorError, match=r"NumPy cannot view this Strange \(a strange dtype\)"):
        host_array(Strange(np.zeros(1)), "x")


def test_arrays_that_are_not_aligned_are_refused() -> None:
    array = np.zeros(17, np.uint8)[1:].view(np.float32)
    for take in (host_array, writable_array):
        with pytest.raises(UnsupportedTensorError, match=r"^x: .* not aligned .* pass array\.copy\(\)"):
            take(array, "x")
    assert host_array(array.copy(), "x").flags.aligned
