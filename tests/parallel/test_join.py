"""join: ranks run out of data at different times while the others go on with every collective, over both planes."""

from __future__ import annotations

import importlib
import re
from itertools import permutations, product

import numpy as np
import pytest

import horovodish as hvd
from horovodish.collectives.comparison import compared_on_all_ranks
from horovodish.gradients.shard_sets import members_set
from horovodish.runtime import basics
from support.expect import mismatch, the_engine_goes_on
from support.model import OPS, PLANES, difference, reduced, values
from support.on_ranks import on_ranks
from support.ranks import run_ranks

MAGNITUDE = 10.0


@on_ranks(1, 3, 4, planes=PLANES)
def test_ranks_join_in_any_order() -> None:
    """In six of the orders, or in all if there are fewer."""
    orders = list(permutations(range(hvd.size())))
    for order in orders[:: max(1, len(orders) // 6)]:
        join_in_order(order)


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


@on_ranks(3, (3, "mpi_ring"), (3, "join_average=size"))
def test_what_an_average_divides_by() -> None:
    """The ranks that have not joined, or, as in Horovod, all ranks. Small arrays travel with the negotiation."""
    average_on_the_others(over_size=basics.running().settings.join_average == "size")


def average_on_the_others(*, over_size: bool) -> None:
    if hvd.rank() != 1:
        for length in (1, 100_000):
            array = np.full(length, 6.0, np.float32)
            expected = 4.0 if over_size else 6.0
            assert (hvd.allreduce(array) == expected).all()
            assert (hvd.grouped_allreduce([array, array.astype(np.int64)])[1] == expected).all()
            assert (hvd.allreduce(array, op=hvd.Sum) == 12.0).all()
        assert (hvd.reducescatter(np.full(6, 6.0)) == 6.0).all()
    hvd.join()
    the_engine_goes_on()


def test_an_average_is_horovods_where_a_rank_imports_horovod() -> None:
    run_ranks(average_with_an_import, 3, fresh=True)


def average_with_an_import() -> None:
    hvd.init()
    rank = hvd.rank()
    hvd.shutdown()
    if rank == 2:
        importlib.import_module("horovodish.as_horovod")
    hvd.init()
    average_on_the_others(over_size=True)
    hvd.shutdown()


@on_ranks(1, 3, 4, planes=PLANES)
def test_what_was_submitted_before_counts() -> None:
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
    the_engine_goes_on()


@on_ranks(1, 3, 4, planes=PLANES)
def test_everybody_at_once() -> None:
    for _ in range(3):
        last = hvd.join()
        assert 0 <= last < hvd.size()
        np.testing.assert_array_equal(hvd.allgather(np.array(last)), np.full(hvd.size(), last))


@on_ranks(1, 3, 4, planes=PLANES)
def test_calls_without_names_meet_afterwards() -> None:
    """Ranks that made fewer calls without names before they joined still meet the others afterwards."""
    for _ in range(hvd.rank() + 1):
        hvd.allreduce(np.ones(2))
        hvd.barrier()
        hvd.allgather(np.ones(2))
    hvd.join()
    np.testing.assert_array_equal(hvd.allreduce(np.full(2, hvd.rank()), op=hvd.Max), np.full(2, hvd.size() - 1))
    np.testing.assert_array_equal(hvd.allgather(np.array(hvd.rank())), np.arange(hvd.size()))
    hvd.barrier()


@on_ranks(3, 4, planes=PLANES)
def test_a_root_that_has_joined() -> None:
    """Every rank that still has data raises, also when the broadcast is one that the cache knows, and goes on."""
    root = hvd.size() - 1
    for _ in range(3):
        hvd.broadcast(np.zeros(3), root, name="known")
    if hvd.rank() == root:
        hvd.join()
    else:
        for name in ["known", "new", "known"]:
            with pytest.raises(hvd.MismatchError) as raised:
                hvd.broadcast(np.zeros(3), root, name=name)
            said = str(raised.value)
            assert f"broadcast '{name}' failed" in said
            assert re.search(rf"rank {root} is the root of this broadcast and has joined\b", said)
            assert "Remedy: broadcast from a rank that still has data, or after all ranks have joined." in said
            total = hvd.allreduce(np.ones(3), op=hvd.Sum, name=name)
            np.testing.assert_array_equal(total, np.full(3, float(root)))
        assert hvd.join() != root
    the_engine_goes_on()


@on_ranks(3, 4, planes=PLANES)
def test_a_process_set_without_the_joined_rank() -> None:
    others = hvd.add_process_set(range(1, hvd.size()))
    if others.included():
        hvd.allreduce(np.ones(2), name="rank 0 has joined or will")
        total = hvd.allreduce(np.ones(2), op=hvd.Sum, process_set=others)
        np.testing.assert_array_equal(total, np.full(2, hvd.size() - 1.0))
        hvd.barrier(others)
    hvd.join()
    assert hvd.remove_process_set(others)
    the_engine_goes_on()


@on_ranks(3, 4, planes=PLANES)
def test_a_process_set_with_the_joined_rank() -> None:
    """It goes on without that rank, also in a set that only its members know, and has the same names afterwards."""
    last = hvd.size() - 1
    everybody = hvd.global_process_set
    sets = [hvd.add_process_set([0, last]), members_set(range(hvd.size()), everybody, "a set of members")]
    included = [process_set for process_set in sets if process_set.included()]
    for step in range(2 + hvd.rank()):
        for process_set in included:
            with_data = sum(rank >= step - 1 for rank in process_set.ranks)
            ones = np.ones(3)
            np.testing.assert_array_equal(hvd.allreduce(ones, process_set=process_set), ones)
            np.testing.assert_array_equal(hvd.allreduce(ones, op=hvd.Sum, process_set=process_set), with_data * ones)
    assert hvd.join() == last
    for process_set in included:
        total = hvd.allreduce(np.ones(2), op=hvd.Sum, process_set=process_set)
        np.testing.assert_array_equal(total, np.full(2, process_set.size()))
    assert hvd.remove_process_set(sets[0])
    the_engine_goes_on()


@on_ranks(3, 4, planes=PLANES)
def test_agreements_without_rank_0() -> None:
    """Errors name the right ranks, and process sets stay the same on all of them."""
    last = hvd.size() - 1
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
    the_engine_goes_on()


@on_ranks(3, 4, planes=PLANES)
def test_objects() -> None:
    """A rank that has joined has no object; a root that has joined is an error as for a broadcast."""
    root = hvd.size() - 1
    if hvd.rank() < root:
        assert hvd.allgather_object({"rank": hvd.rank()}) == [{"rank": rank} for rank in range(root)]
        assert hvd.broadcast_object(hvd.rank(), root_rank=root - 1) == root - 1
        with pytest.raises(hvd.MismatchError, match=rf"rank {root} is the root of this broadcast and has joined"):
            hvd.broadcast_object(hvd.rank(), root_rank=root)
    hvd.join()
    the_engine_goes_on()


@on_ranks(3, planes=PLANES)
def test_scales_leave_joined_ranks_out() -> None:
    """They do not touch what stands for a joined rank."""
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
