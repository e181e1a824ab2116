"""allreduce against NumPy: every op and dtype, on 1 to 5 ranks, over both planes."""

from __future__ import annotations

import zlib
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import horovodish as hvd
from horovodish import _native
from support.float16 import large_float16_numbers_stay_finite
from support.model import FLOATS, INTEGERS, LENGTHS, OPS, PLANES, difference, dtype_of, reduced, values
from support.on_ranks import on_ranks
from support.ranks import run_ranks

MAGNITUDE = 10.0  # of any intermediate value: 5 ranks x 2.0, or 1.5 to the power of 4


def op_named(name: str) -> Any:
    return getattr(hvd, name)


def reduce_everything() -> list[int]:
    """Checks every case against the model; returns a checksum of each result, for comparing the ranks."""
    hvd.init()
    wrong, checksums = [], []
    for dtype, op, length in product(INTEGERS + FLOATS, OPS, LENGTHS):
        arrays = [values(dtype, length, rank, op) for rank in range(hvd.size())]
        own = arrays[hvd.rank()]
        before = zlib.crc32(own.tobytes())
        result = hvd.allreduce(own, op=op_named(op), name=f"{dtype} {op} {length}")
        told = difference(result, reduced(arrays, op), MAGNITUDE)
        if told or result.dtype != own.dtype or zlib.crc32(own.tobytes()) != before:
            wrong.append(f"{dtype} {op} {length}: {told or 'another dtype, or the input was changed'}")
        checksums.append(zlib.crc32(result.tobytes()))
    assert not wrong, "\n".join(wrong)
    return checksums


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("np", [1, 2, 3, pytest.param(4, marks=pytest.mark.soak)])
def test_every_op_and_dtype(np: int, plane: str) -> None:
    checksums = run_ranks(reduce_everything, np, env={"HOROVODISH_PLANE": plane})
    assert all(of_rank == checksums[0] for of_rank in checksums), "the ranks hold different bits"


@on_ranks(2, 3, 4, planes=PLANES)
def test_an_average_of_large_float16_numbers_is_no_infinity() -> None:
    large_float16_numbers_stay_finite()


@on_ranks((5, "mpi_ring"))
def test_five_hosts_reduce_in_two_steps() -> None:
    for dtype, op in product(["int32", "float16", "float32"], ["Sum", "Average", "Max"]):
        length = 200_000 // dtype_of(dtype).itemsize + 3
        assert _native.fastest_allreduce(5, length * dtype_of(dtype).itemsize) == "two_step"
        arrays = [values(dtype, length, rank) for rank in range(5)]
        result = hvd.allreduce(arrays[hvd.rank()], op=op_named(op), name=f"{dtype} {op}")
        assert not difference(result, reduced(arrays, op), MAGNITUDE)
        checksums = hvd.allgather(np.array([zlib.crc32(result.tobytes())], np.int64))
        assert len(set(checksums.tolist())) == 1, "the ranks hold different bits"
    large_float16_numbers_stay_finite()


@on_ranks(1, 3, planes=PLANES)
def test_scaled_results() -> None:
    for dtype, op, length in product(INTEGERS + FLOATS, ["Sum", "Average", "Max"], [7, 70_001]):
        arrays = [values(dtype, length, rank) for rank in range(hvd.size())]
        result = hvd.allreduce(
            arrays[hvd.rank()], op=op_named(op), prescale_factor=0.75, postscale_factor=1.5, name=f"{dtype}{op}{length}"
        )
        told = difference(result, reduced(arrays, op, 0.75, 1.5), MAGNITUDE)
        assert not told, f"{dtype} {op} {length}: {told}"


@on_ranks(1, 3, planes=PLANES)
def test_integers_wrap_around() -> None:
    for dtype in INTEGERS:
        largest = np.iinfo(dtype).max
        own = np.array([largest, 3], dtype)
        with np.errstate(over="ignore"):
            total = np.sum([own] * hvd.size(), axis=0, dtype=dtype)
            power = np.prod([own] * hvd.size(), axis=0, dtype=dtype)
        np.testing.assert_array_equal(hvd.allreduce(own, op=hvd.Sum), total)
        np.testing.assert_array_equal(hvd.allreduce(own, op=hvd.Product), power)


@on_ranks(1, 3, planes=PLANES)
def test_integer_averages_round_towards_zero() -> None:
    # Rank 0 has -1, -3, 5, the others 0: the exact averages are no integers.
    for dtype in ["int8", "int16", "int32", "int64"]:
        own = np.array([-1, -3, 5] if hvd.rank() == 0 else [0, 0, 0], dtype)
        expected = [int(total / hvd.size()) for total in (-1, -3, 5)]
        np.testing.assert_array_equal(hvd.allreduce(own), expected)


@on_ranks(1, 3, planes=PLANES)
def test_nan_wins_in_min_and_max() -> None:
    for dtype, op, holder in product(FLOATS, ["Min", "Max"], range(hvd.size())):
        own = np.arange(300).astype(dtype_of(dtype))
        if hvd.rank() == holder:
            own[[0, 17, 299]] = np.nan
        result = hvd.allreduce(own, op=op_named(op)).astype(np.float64)
        expected = np.arange(300).astype(dtype_of(dtype)).astype(np.float64)
        expected[[0, 17, 299]] = np.nan
        np.testing.assert_array_equal(result, expected, err_msg=f"{dtype} {op}, NaN on rank {holder}")


@on_ranks(1, 3, planes=PLANES)
def test_infinities_and_signed_zeros() -> None:
    for dtype in FLOATS:
        own = np.array([np.inf, -np.inf, -0.0, np.nan], dtype_of(dtype))
        result = hvd.allreduce(own, op=hvd.Sum).astype(np.float64)
        np.testing.assert_array_equal(result, [np.inf, -np.inf, -0.0, np.nan])
        opposite = np.array([np.inf if hvd.rank() == 0 else -np.inf], dtype_of(dtype))
        assert np.isnan(hvd.allreduce(opposite, op=hvd.Sum).astype(np.float64)) or hvd.size() == 1
        every_bit = np.full(own.nbytes, 0xFF, np.uint8).view(own.dtype)  # a NaN, too
        assert np.isnan(hvd.allreduce(every_bit).astype(np.float64)).all()
        largest = np.array([ml_dtypes.finfo(dtype_of(dtype)).max], dtype_of(dtype))
        np.testing.assert_array_equal(hvd.allreduce(largest, op=hvd.Max), largest)


@on_ranks(1, 3, planes=PLANES)
def test_any_shape() -> None:
    for shape in [(), (1,), (0, 5), (3, 0), (2, 3, 4), (1, 1, 1, 1)]:
        own = np.full(shape, hvd.rank() + 1.0)
        result = hvd.allreduce(own, op=hvd.Sum)
        assert isinstance(result, np.ndarray)
        np.testing.assert_array_equal(result, np.full(shape, float(sum(range(1, hvd.size() + 1)))), strict=True)


@on_ranks(1, 3, planes=PLANES)
def test_in_place() -> None:
    own = np.full(5, hvd.rank(), np.float32)
    assert hvd.allreduce_(own, average=False) is own
    np.testing.assert_array_equal(own, np.full(5, sum(range(hvd.size()))))
    handle = hvd.allreduce_async_(own, op=hvd.Max)
    assert hvd.synchronize(handle) is own


@on_ranks(1, 3, planes=PLANES)
def test_lengths_around_every_chunk() -> None:
    """The planes cut tensors into chunks and segments; one element more or less must not matter."""
    for kib, bytes_each in product([64, 128, 256, 512], [1, 4]):
        for off in (-1, 0, 1):
            length = kib * 1024 // bytes_each + off
            own = (np.arange(length) % 50 + hvd.rank()).astype("uint8" if bytes_each == 1 else "float32")
            result = hvd.allreduce(own, op=hvd.Max)
            expected = (np.arange(length) % 50 + hvd.size() - 1).astype(own.dtype)
            assert np.array_equal(result, expected), f"{length} elements of {bytes_each} bytes"


@on_ranks(3, planes=PLANES, env={"HOROVODISH_CHUNK_KB": "4", "HOROVODISH_RING_SEGMENT_KB": "4"})
def test_the_smallest_chunks_and_segments() -> None:
    for dtype, length in product(["uint8", "float16", "float64"], [1, 1023, 1024, 1025, 10_007]):
        arrays = [values(dtype, length, rank) for rank in range(hvd.size())]
        result = hvd.allreduce(arrays[hvd.rank()], op=hvd.Sum)
        told = difference(result, reduced(arrays, "Sum"), MAGNITUDE)
        assert not told, f"{dtype} {length}: {told}"
