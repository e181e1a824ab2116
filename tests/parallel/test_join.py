"""join: ranks run out of data at different times while the others go on with every collective, over both planes."""

from __future__ import annotations

import re
from itertools import permutations, product

import numpy as np
import pytest

import horovodish as hvd
from horovodish.comparison import compared_on_all_ranks
from support.expect import mismatch, the_engine_goes_on
from support.model import OPS, PLANES, difference, reduced, values
from support.ranks import run_ranks

MAGNITUDE = 10.0


def run_out_of_data() -> None:
    hvd.init()
    orders = list(permutations(range(hvd.size())))
    for order in orders[:: max(1, len(orders) // 6)]:
        join_in_order(order)
    what_was_submitted_before_counts()
    everybody_at_once()
    names_go_on_alike()
    a_root_that_has_joined()
    sets_of_ranks_that_have_not_joined()
    rank_0_is_not_the_first_that_answers()
    objects()
    the_engine_goes_on()


def join_in_order(order: tuple[int, ...]) -> None:
    """In each step all ranks that have data use every collective; then the next of `order` joins."""
    for step, leaver in enumerate(order):
        active = sorted(order[step:])
        train(active, step)
        if hvd.rank() == leaver:
            assert hvd.join() == order[-1]
            break
    the_engine_goes_on()


def train(active: list[int], step: int) -> None:
    own, size = hvd.rank(), hvd.size()
    for op, length in product(OPS, [1, 3000]):
        for dtype in ["float32", "int16"]:
            arrays = [values(dtype, length, rank, op) for rank in active]
            result = hvd.allreduce(arrays[active.index(own)], op=getattr(hvd, op), name=f"{op} {dtype} {length}")
            told = difference(result, reduced(arrays, op), MAGNITUDE)
            assert not told, f"allreduce {op} {dtype} {length} of ranks {active}: {told}"
    arrays = [values("float64", (7, 2), rank) for rank in active]
    for result in hvd.grouped_allreduce([arrays[active.index(own)]] * 3, name="group"):
        assert not difference(result, reduced(arrays, "Average"), MAGNITUDE)
    for op in ["Average", "Sum", "Max"]:
        result = hvd.reducescatter(arrays[active.index(own)], op=getattr(hvd, op), name=f"scattered {op}")
        told = difference(result, np.array_split(reduced(arrays, op), size)[own], MAGNITUDE)
        assert not told, f"reducescatter {op} of ranks {active}: {told}"
    gathered = hvd.allgather(np.full((own + step, 2), own), name="gathered")
    np.testing.assert_array_equal(gathered, np.concatenate([np.full((rank + step, 2), rank) for rank in active]))
    some, none = hvd.grouped_allgather([np.full(2, own), np.zeros((0, 3))], name="gathered group")
    np.testing.assert_array_equal(some, np.repeat(active, 2))
    assert none.shape == (0, 3)
    rows, received = hvd.alltoall(np.full(2 * size, own), [2] * size, name="exchanged")
    np.testing.assert_array_equal(rows, np.repeat(active, 2))
    np.testing.assert_array_equal(received, [2 if rank in active else 0 for rank in range(size)])
    for root in active:
        result = hvd.broadcast(np.full(5000, own), root, name=f"from {root}")
        np.testing.assert_array_equal(result, np.full(5000, root))
    hvd.barrier()


def what_was_submitted_before_counts() -> None:
    """Rank 0 joins while its own operations wait for the others."""
    size = hvd.size()
    handles: list[hvd.collectives.Handle[object]] = []
    if hvd.rank() == 0:
        handles.append(hvd.allreduce_async(np.full(4, 1.0), op=hvd.Sum, name="before"))
        handles.append(hvd.grouped_allreduce_async([np.full(4, 1.0)] * 2, op=hvd.Sum, name="group before"))
        handles.append(hvd.broadcast_async(np.full(4, 7.0), 0, name="broadcast before"))
        hvd.join()
    else:
        handles.append(hvd.allreduce_async(np.full(4, 1.0), op=hvd.Sum, name="before"))
        handles.append(hvd.grouped_allreduce_async([np.full(4, 1.0)] * 2, op=hvd.Sum, name="group before"))
        handles.append(hvd.broadcast_async(np.zeros(4), 0, name="broadcast before"))
    single, group, sent = (hvd.synchronize(handle) for handle in handles)
    np.testing.assert_array_equal(single, np.full(4, float(size)))
    np.testing.assert_array_equal(group, np.full((2, 4), float(size)))
    np.testing.assert_array_equal(sent, np.full(4, 7.0))
    if hvd.rank() != 0:
        hvd.join()


def everybody_at_once() -> None:
    for _ in range(3):
        last = hvd.join()
        assert 0 <= last < hvd.size()
        np.testing.assert_array_equal(hvd.allgather(np.array(last)), np.full(hvd.size(), last))


def names_go_on_alike() -> None:
    """Ranks that made fewer calls without names before they joined still meet the others afterwards."""
    for _ in range(hvd.rank() + 1):
        hvd.allreduce(np.ones(2))
        hvd.barrier()
        hvd.allgather(np.ones(2))
    hvd.join()
    np.testing.assert_array_equal(hvd.allreduce(np.full(2, hvd.rank()), op=hvd.Max), np.full(2, hvd.size() - 1))
    np.testing.assert_array_equal(hvd.allgather(np.array(hvd.rank())), np.arange(hvd.size()))
    hvd.barrier()


def a_root_that_has_joined() -> None:
    """Every rank that still has data raises, also when the broadcast is one that the cache knows, and goes on."""
    root = hvd.size() - 1
    for _ in range(3):
        hvd.broadcast(np.zeros(3), root, name="known")
    if hvd.rank() == root:
        hvd.join()
        return
    for name in ["known", "new", "known"]:
        with pytest.raises(hvd.MismatchError) as raised:
            hvd.broadcast(np.zeros(3), root, name=name)
        assert f"broadcast '{name}' failed" in str(raised.value)
        assert re.search(rf"rank {root} is the root of this broadcast and has joined\b", str(raised.value))
        assert "Remedy: broadcast from a rank that still has data, or after all ranks have joined." in str(raised.value)
        total = hvd.allreduce(np.ones(3), op=hvd.Sum, name=name)
        np.testing.assert_array_equal(total, np.full(3, float(root)))
    assert hvd.join() != root


def sets_of_ranks_that_have_not_joined() -> None:
    """A process set without the joined rank goes on as ever."""
    others = hvd.add_process_set(range(1, hvd.size())) if hvd.size() > 1 else None
    if others is not None and others.included():
        hvd.allreduce(np.ones(2), name="rank 0 has joined or will")
        total = hvd.allreduce(np.ones(2), op=hvd.Sum, process_set=others)
        np.testing.assert_array_equal(total, np.full(2, hvd.size() - 1.0))
        hvd.barrier(others)
    hvd.join()
    if others is not None:
        assert hvd.remove_process_set(others)


def rank_0_is_not_the_first_that_answers() -> None:
    """What the ranks agree upon: errors name the right ranks, and process sets stay the same on all of them."""
    last = hvd.size() - 1
    if last == 0:
        return
    alone = hvd.add_process_set([last])
    if hvd.rank() == 0:
        hvd.join()
    else:
        with mismatch("add_process_set: rank 0 has joined and cannot take part", "Remedy: add and remove process sets"):
            hvd.add_process_set([1])
        with mismatch("remove_process_set: rank 0 has joined and cannot take part"):
            hvd.remove_process_set(alone)
        differ = mismatch("f: the names differ: only rank 1 has of 1", f"only rank {last} has of {last}")
        with differ, compared_on_all_ranks("f", "the names") as names:
            names.append("of 1" if hvd.rank() < last else f"of {last}")
        hvd.join()
    both = hvd.add_process_set([0, last])
    assert len(set(hvd.allgather_object(both.process_set_id))) == 1
    if both.included():
        np.testing.assert_array_equal(hvd.allreduce(np.ones(2), op=hvd.Sum, process_set=both), [2.0, 2.0])
    for added in (alone, both):
        assert hvd.remove_process_set(added)


def objects() -> None:
    """A rank that has joined has no object; a root that has joined is an error as for a broadcast."""
    root = hvd.size() - 1
    if hvd.rank() == root:
        hvd.join()
        return
    active = list(range(root))
    assert hvd.allgather_object({"rank": hvd.rank()}) == [{"rank": rank} for rank in active]
    assert hvd.broadcast_object(hvd.rank(), root_rank=root - 1) == root - 1
    with pytest.raises(hvd.MismatchError, match=rf"rank {root} is the root of this broadcast and has joined"):
        hvd.broadcast_object(hvd.rank(), root_rank=root)
    hvd.join()


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("np", [1, 3, 4])
def test_join(np: int, plane: str) -> None:
    run_ranks(run_out_of_data, np, env={"HOROVODISH_PLANE": plane})


def reduce_with_scales_after_rank_0_has_joined() -> None:
    """The scales do not touch what stands for a joined rank."""
    hvd.init()
    if hvd.rank() == 0:
        hvd.join()
        return
    active = list(range(1, hvd.size()))
    for op, prescale, length in product(OPS, [0.5, -1.0], [3, 40_000]):
        for dtype in ["float32", "int32"]:
            if op == "Average" and dtype == "int32":
                continue  # rounded before or after the scale: no caller should depend on it
            arrays = [values(dtype, length, rank, op) for rank in active]
            result = hvd.allreduce(
                arrays[hvd.rank() - 1],
                op=getattr(hvd, op),
                prescale_factor=prescale,
                postscale_factor=2.0,
                name=f"scaled {op} {dtype} {length}",
            )
            told = difference(result, reduced(arrays, op, prescale, 2.0), MAGNITUDE)
            assert not told, f"{op} {dtype} {length} scaled by {prescale}: {told}"
    hvd.join()


@pytest.mark.parametrize("plane", PLANES)
def test_scales_leave_joined_ranks_out(plane: str) -> None:
    run_ranks(reduce_with_scales_after_rank_0_has_joined, 3, env={"HOROVODISH_PLANE": plane})
