"""Plans whose ranks get or give their parts by elements, on every plane."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

import horovodish as hvd
from horovodish._native import DTYPES, KINDS
from horovodish.collectives.devices import HOST
from horovodish.errors import from_native
from horovodish.runtime import basics
from support.model import Array, reduced, values
from support.pretended_gpu import Gpu

SHAPES: list[list[tuple[str, tuple[int, ...]]]] = [
    [("float32", (1,))],
    [("float32", (2, 3)), ("float32", ()), ("float32", (5,))],
    [("int32", (4,)), ("float32", (12,)), ("int32", (0, 3)), ("float32", (70_001,))],
    [("float64", (300_007,)), ("float64", (3,))],
]


def run_plan(
    kind: str,
    name: str,
    op: Any,
    sources: list[Array],
    targets: list[Array],
    gpu: Gpu | None = None,
    ends: list[int] | None = None,
) -> None:
    """Carry out one bucket. Collective; blocks.

    Args:
        kind: of the collective.
        name: equal on every rank.
        op: of a reducescatter.
        sources, targets: the members' memory.
        gpu: where that is; None: in host memory.
        ends: where each rank's part ends; None: the parts are even.
    """
    members = [(f"{name}[{i}]", DTYPES[each.dtype.name], each.shape, 0) for i, each in enumerate(sources)]
    plan = basics.engine().plan(
        name, op, 1.0, 1.0, members, [gpu.ordinal if gpu else HOST], kind=KINDS[kind], ends=[ends or []]
    )
    stream = gpu.stream.handle if gpu else 0
    for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
        plan.submit(index, source.ctypes.data, target.ctypes.data, stream)
    while not plan.wait(1.0):
        pass
    error = plan.error()
    if error is not None:
        raise from_native(*error)
    if gpu:
        plan.order_after(stream)
        gpu.stream.wait()


def own_part(arrays: list[Array], dtype: np.dtype[Any]) -> list[Array]:
    """For each array of a dtype a mask of the elements that are this rank's part."""
    total = sum(each.size for each in arrays if each.dtype == dtype)
    rank, size = hvd.rank(), hvd.size()
    begin, end = (total // size * i + total % size * i // size for i in (rank, rank + 1))
    masks, at = [], 0
    for each in arrays:
        mine = np.zeros(each.size, bool)
        if each.dtype == dtype:
            mine[max(begin - at, 0) : max(end - at, 0)] = True
            at += each.size
        masks.append(mine.reshape(each.shape))
    return masks


def parts_by_elements(gpu: Gpu | None = None) -> None:
    """A reducescatter leaves this rank's part of the sums in place, and an allgather of the parts gives all of them."""
    ops = ("Sum", "Max") if gpu else ("Sum", "Average", "Max")  # NCCL has no average of integers
    for (number, shapes), op, in_place in product(enumerate(SHAPES), ops, (True, False)):
        of_ranks = [[values(dtype, shape, rank) for dtype, shape in shapes] for rank in range(hvd.size())]
        sources = [each.copy() for each in of_ranks[hvd.rank()]]
        targets = sources if in_place else [np.full_like(each, 77) for each in sources]
        name = f"parts {number} {op} {in_place}"
        run_plan("reducescatter", name, getattr(hvd, op), sources, targets, gpu)
        for index, target in enumerate(targets):
            mine = own_part(targets, target.dtype)[index]
            expected = reduced([each[index] for each in of_ranks], op)
            np.testing.assert_allclose(target[mine], expected[mine], rtol=1e-5, atol=1e-5)
            others = of_ranks[hvd.rank()][index] if in_place else np.full_like(target, 77)
            np.testing.assert_array_equal(target[~mine], others[~mine])
        gathered = targets if in_place else [np.full_like(each, 55) for each in targets]
        run_plan("allgather", f"whole {name}", hvd.Sum, targets, gathered, gpu)
        for index, target in enumerate(gathered):
            np.testing.assert_allclose(target, reduced([each[index] for each in of_ranks], op), rtol=1e-5, atol=1e-5)
        for of_rank in hvd.allgather_object([each.tobytes() for each in gathered]):
            assert of_rank == [each.tobytes() for each in gathered]
    for sizes in (
        [70_001, *range(1, hvd.size())],
        [*range(hvd.size() - 1, 0, -1), 70_001],
        [0] * (hvd.size() - 1) + [8],
    ):
        parts_of_these_sizes(sizes, gpu)


def parts_of_these_sizes(sizes: list[int], gpu: Gpu | None) -> None:
    """As above; each rank's part has a given size."""
    rank = hvd.rank()
    of_ranks = [values("float32", (sum(sizes),), each) for each in range(hvd.size())]
    whole, ends = of_ranks[rank].copy(), np.cumsum(sizes).tolist()
    run_plan("reducescatter", f"sums of {sizes}", hvd.Sum, [whole], [whole], gpu, ends)
    expected, own = reduced(of_ranks, "Sum"), slice(ends[rank] - sizes[rank], ends[rank])
    np.testing.assert_allclose(whole[own], expected[own], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.delete(whole, own), np.delete(of_ranks[rank], own))
    run_plan("allgather", f"all of {sizes}", hvd.Sum, [whole], [whole], gpu, ends)
    np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-5)
