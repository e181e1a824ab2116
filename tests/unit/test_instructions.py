"""Reductions and copies give the same bytes with every level of vector instructions."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from horovodish._native import DTYPES, REDUCE_OPS, testing

BASELINE, HIGHER = 0, (1, 2)
REDUCED = ["uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
OPS = ["sum", "average", "min", "max", "product"]
# Not a multiple of any vector's length, and an odd number.
ELEMENTS = 1037


def values(dtype: str, ranks: int) -> list[np.ndarray]:
    """Every bit pattern may come, so infinities, denormals and, of floating-point numbers, NaN."""
    random = np.random.default_rng(ranks)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return [np.frombuffer(random.bytes(ELEMENTS * kind.itemsize), kind) for _ in range(ranks)]


def reduced(level: int, dtype: str, op: str, arrays: list[np.ndarray], scales: tuple[float, float]) -> np.ndarray:
    made = testing.reduce_with(
        level=level,
        dtype=DTYPES[dtype],
        op=REDUCE_OPS[op],
        values=[array.tobytes() for array in arrays],
        prescale=scales[0],
        postscale=scales[1],
        divisor=len(arrays) if op == "average" else 1,
    )
    if made is None:
        pytest.skip("this processor has no such instructions")
    return np.frombuffer(made, arrays[0].dtype)


@pytest.mark.parametrize("level", HIGHER, ids=["v3", "v4"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", REDUCED)
def test_each_level_gives_the_same_bits(dtype: str, op: str, level: int) -> None:
    for ranks in (1, 2, 3, 5):
        arrays = values(dtype, ranks)
        for scales in ((1.0, 1.0), (1.0, 0.375), (0.375, 1.0)):
            expected = reduced(BASELINE, dtype, op, arrays, scales)
            got = reduced(level, dtype, op, arrays, scales)
            if "float" in dtype:  # which of two NaN goes on is the compiler's choice, and so are its digits
                with np.errstate(invalid="ignore"):
                    numbers = ~(np.isnan(expected) & np.isnan(got))
                expected, got = expected[numbers], got[numbers]
            assert got.tobytes() == expected.tobytes(), (ranks, scales)


@pytest.mark.parametrize("level", [BASELINE, *HIGHER])
@pytest.mark.parametrize("dtype", [name for name in REDUCED if "int" in name])
def test_an_integer_and_its_factors_are_rounded_once(dtype: str, level: int) -> None:
    three, four = np.full(100, 3, dtype), np.full(100, 4, dtype)
    assert set(reduced(level, dtype, "average", [three, four], (1.0, 2.0))) == {7}
    assert set(reduced(level, dtype, "average", [three, four], (1.0, 1.0))) == {3}
    assert set(reduced(level, dtype, "sum", [three, four], (1.0, np.nan))) == {0}
    assert set(reduced(level, dtype, "sum", [three, four], (np.nan, 1.0))) == {0}


@pytest.mark.parametrize("length", [0, 1, 2, 3, 31, 32, 33])
@pytest.mark.parametrize("factor", [1.0, 0.375])
def test_pairs_of_bfloat16_are_sums_of_floats(length: int, factor: float) -> None:
    left, right = (np.random.default_rng(seed).standard_normal(length).astype(ml_dtypes.bfloat16) for seed in (1, 2))
    expected = ((left.astype(np.float32) + right.astype(np.float32)) * np.float32(factor)).astype(ml_dtypes.bfloat16)
    assert reduced(BASELINE, "bfloat16", "sum", [left, right], (1.0, factor)).tobytes() == expected.tobytes()


@pytest.mark.parametrize("level", [BASELINE, *HIGHER], ids=["baseline", "v3", "v4"])
def test_copies_write_what_they_shall_and_no_more(level: int) -> None:
    random = np.random.default_rng(level)
    for length in (0, 1, 2047, 2048, 2049, 2048 + 127, 2048 + 128, 10_007):
        for start, to in ((0, 0), (1, 0), (0, 31), (5, 64), (33, 17)):
            source, around = random.bytes(start + length), random.bytes(to + length + 65)
            got = testing.copy_with(level, source, start, around, to)
            if got is None:
                pytest.skip("this processor has no such instructions")
            assert got == around[:to] + source[start:] + around[to + length :], (length, start, to)


def test_what_waiting_costs_is_measured() -> None:
    costs = testing.waiting_costs()
    yielding, waking = costs
    assert 0 < yielding <= 2_000
    assert 5_000 <= waking <= 50_000
    assert testing.waiting_costs() == costs, "once in a process"
