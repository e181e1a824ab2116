"""Grouped allreduce and allgather: mixed dtypes and shapes as one unit, against NumPy, over both planes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import horovodish as hvd
from support.expect import every_rank_raises, unless_last
from support.model import FLOATS, INTEGERS, OPS, PLANES, Array, difference, reduced, values
from support.on_ranks import on_ranks

MAGNITUDE = 10.0
SHAPES: list[tuple[int, ...]] = [(7,), (), (0,), (3, 5), (1,), (30_011,), (4, 0, 2), (1025,), (2, 2)]
FOUR, TWO = np.zeros(4, np.float32), np.zeros(2, np.float32)


def group_of(rank: int, op: str) -> list[Array]:
    """One array of each dtype, each of another shape."""
    return [values(dtype, shape, rank, op) for dtype, shape in zip(INTEGERS + FLOATS, SHAPES, strict=True)]


@on_ranks(1, 3, 4, planes=PLANES)
def test_every_dtype_in_one_group() -> None:
    for op in OPS:
        arrays = [group_of(rank, op) for rank in range(hvd.size())]
        results = hvd.grouped_allreduce(arrays[hvd.rank()], op=getattr(hvd, op), name=f"group {op}")
        assert len(results) == len(SHAPES)
        for index, result in enumerate(results):
            same = [of_rank[index] for of_rank in arrays]
            assert result.dtype == same[0].dtype
            told = difference(result, reduced(same, op), MAGNITUDE)
            assert not told, f"{op}, {result.dtype} of shape {result.shape}: {told}"
            np.testing.assert_array_equal(arrays[hvd.rank()][index], group_of(hvd.rank(), op)[index])


@on_ranks(1, 3, 4, planes=PLANES)
def test_scales_count_for_every_array() -> None:
    own = [np.full(5, hvd.rank() + 1.0), np.full((2, 3), hvd.rank() + 1.0, np.float32)]
    total = sum(range(1, hvd.size() + 1))
    for result in hvd.grouped_allreduce(own, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0):
        np.testing.assert_array_equal(result, np.full(result.shape, total * 2.0))
    for result in hvd.grouped_allreduce(own, average=True, postscale_factor=2.0):
        np.testing.assert_array_equal(result, np.full(result.shape, total * 2.0 / hvd.size()))


@on_ranks(1, 3, 4, planes=PLANES)
def test_in_place() -> None:
    total = sum(range(hvd.size()))
    own = [np.full(4, hvd.rank()), np.full((2, 2), hvd.rank(), np.float32), np.zeros(0)]
    results = hvd.grouped_allreduce_(own, average=False)
    assert [given is result for given, result in zip(own, results, strict=True)] == [True] * 3
    handle = hvd.grouped_allreduce_async_(own, op=hvd.Max)
    assert [given is result for given, result in zip(own, hvd.synchronize(handle), strict=True)] == [True] * 3
    np.testing.assert_array_equal(own[0], np.full(4, total))
    np.testing.assert_array_equal(own[1], np.full((2, 2), total))


@on_ranks(1, 3, 4, planes=PLANES)
def test_groups_among_single_arrays() -> None:
    """Each rank submits groups and single arrays in an order of its own, several times, so that they are remembered."""
    order = random.Random(hvd.rank())
    total = sum(range(1, hvd.size() + 1))
    for _ in range(4):
        turns = list(range(40))
        order.shuffle(turns)
        handles: dict[int, Any] = {}
        for turn in turns:
            own = np.full(turn * 20, turn * (hvd.rank() + 1.0))
            if turn % 4:
                handles[turn] = hvd.grouped_allreduce_async([own] * (turn % 4), op=hvd.Sum, name=f"mixed {turn}")
            else:
                handles[turn] = hvd.allreduce_async(own, op=hvd.Sum, name=f"mixed {turn}")
        for turn, handle in handles.items():
            results = hvd.synchronize(handle)
            for result in results if turn % 4 else [results]:
                np.testing.assert_array_equal(result, np.full(turn * 20, turn * float(total)))
            assert not turn % 4 or len(results) == turn % 4


@on_ranks(1, 3, 4, planes=PLANES)
def test_a_group_waits_for_all_ranks() -> None:
    """One handle for all of it, which is not done before the last rank has submitted."""
    last = hvd.size() - 1
    if hvd.rank() < last:
        handle = hvd.grouped_allreduce_async([np.ones(3), np.ones(70_000)], op=hvd.Sum, name="waits")
        hvd.barrier()
        assert not hvd.poll(handle)
        hvd.barrier()
    else:
        hvd.barrier()
        hvd.barrier()
        handle = hvd.grouped_allreduce_async([np.ones(3), np.ones(70_000)], op=hvd.Sum, name="waits")
    for result in hvd.synchronize(handle):
        np.testing.assert_array_equal(result, np.full(result.shape, float(hvd.size())))


@on_ranks(1, 3, 4, planes=PLANES)
def test_gathered_groups() -> None:
    rows = [[rank + 1, (rank * 2) % 3, 0 if rank else 4, 5000 * rank, 0] for rank in range(hvd.size())]
    kinds = [("bool", (3,)), ("float16", ()), ("int64", (2, 2)), ("uint8", ()), ("float64", (7,))]

    def arrays(rank: int) -> list[Array]:
        return [values(kind, (rows[rank][i], *shape), rank) for i, (kind, shape) in enumerate(kinds)]

    expected = [np.concatenate(of_index) for of_index in zip(*map(arrays, range(hvd.size())), strict=True)]
    for turn in range(3):
        handle = hvd.grouped_allgather_async(arrays(hvd.rank()), name=f"gathered {turn % 2}")
        for result, right in zip(hvd.synchronize(handle), expected, strict=True):
            np.testing.assert_array_equal(result, right, strict=True)
            result[:] = 0  # writable, and nobody else's
    numbers, none = hvd.grouped_allgather([np.array(hvd.rank()), np.empty((0, 3))])
    np.testing.assert_array_equal(numbers, np.arange(hvd.size()), strict=True)
    assert none.shape == (0, 3)


@on_ranks(1, 3, 4, planes=PLANES)
def test_wrong_groups() -> None:
    for call in (hvd.grouped_allreduce, hvd.grouped_allreduce_, hvd.grouped_allgather):
        with pytest.raises(ValueError, match=r"grouped_all\w+: the group is empty; pass at least one array"):
            call([])
        with pytest.raises(TypeError, match=r"grouped_all\w+: expected a list of arrays, got dict"):
            call({"x": FOUR})
    with pytest.raises(hvd.UnsupportedTensorError, match=r"flags: bool arrays cannot be reduced"):
        hvd.grouped_allreduce([FOUR, np.ones(2, bool)], name="flags")
    with pytest.raises(hvd.UnsupportedTensorError, match="op=Adasum needs floating-point numbers"):
        hvd.grouped_allreduce([FOUR, np.ones(2, np.int8)], op=hvd.Adasum)
    with pytest.raises(ValueError, match="average= and op= were both given"):
        hvd.grouped_allreduce([FOUR], average=True, op=hvd.Sum)


def reduce(*group: Array, **options: Any) -> None:
    hvd.grouped_allreduce(list(group), name="g", **options)


def gather(*group: Array) -> None:
    hvd.grouped_allgather(list(group), name="g")


DISAGREEMENTS: dict[str, tuple[str, str, str, str, Callable[[], None]]] = {
    "length": ("g", "number of tensors", "2", "3", lambda: reduce(FOUR, FOUR, *unless_last([], [FOUR]))),
    "shape": ("g[1]", "shape", "(4,)", "(2,)", lambda: reduce(FOUR, unless_last(FOUR, TWO))),
    "dtype": ("g[0]", "dtype", "float32", "int64", lambda: reduce(unless_last(FOUR, np.zeros(4, int)), TWO)),
    "op": ("g", "reduction op", "sum", "max", lambda: reduce(FOUR, TWO, op=unless_last(hvd.Sum, hvd.Max))),
    "prescale": ("g", "prescale_factor", "1", "0.25", lambda: reduce(FOUR, TWO, prescale_factor=unless_last(1, 0.25))),
    "postscale": ("g", "postscale_factor", "3", "1", lambda: reduce(FOUR, postscale_factor=unless_last(3, 1))),
    "columns": ("g[1]", "shape", "(any, 2)", "(any, 3)", lambda: gather(FOUR, np.zeros((1, unless_last(2, 3))))),
    "collective": ("g", "collective", "allreduce", "allgather", lambda: unless_last(reduce, gather)(FOUR, TWO)),
}


@on_ranks(2, 4, planes=PLANES)
@pytest.mark.parametrize("about", DISAGREEMENTS)
def test_disagreement(about: str) -> None:
    for _ in range(2):  # the second time the cache knows the name with other arguments
        every_rank_raises(*DISAGREEMENTS[about])
        results = hvd.grouped_allreduce([np.full(2, 1.0), np.full(3, 2)], op=hvd.Sum, name="g")
        np.testing.assert_array_equal(results[0], np.full(2, 1.0 * hvd.size()))
        np.testing.assert_array_equal(results[1], np.full(3, 2 * hvd.size()))


@on_ranks(2, 3, planes=PLANES)
def test_a_gather_of_many_tensors() -> None:
    """Tensors of different lengths, also none: more tensors than messages are sent at once, in more messages each."""
    group = [values("float32", ((hvd.rank() + i) % 4 * 200_003, 2), hvd.rank()) for i in range(9)]
    for i, gathered in enumerate(hvd.grouped_allgather(group)):
        of_ranks = [values("float32", ((rank + i) % 4 * 200_003, 2), rank) for rank in range(hvd.size())]
        np.testing.assert_array_equal(gathered, np.concatenate(of_ranks))
