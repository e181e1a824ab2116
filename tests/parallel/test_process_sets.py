"""Process sets: overlapping ones busy at once, every collective in them, their life and their errors, both planes."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest

import horovodish as hvd
from horovodish._native import DTYPES
from horovodish.collectives.operation import Operation
from horovodish.collectives.submission import submit
from support.expect import mismatch, the_engine_goes_on
from support.model import OPS, PLANES, difference, reduced, values
from support.on_ranks import on_ranks

MAGNITUDE = 10.0
NOT_IN_USE = r"the process set of ranks \[0\] is not in use: add it with hvd\.add_process_set"


def pairs() -> list[hvd.ProcessSet]:
    return [hvd.add_process_set(ranks) for ranks in ([0, 1], [0, 2], [1, 2])]


def remove_all(sets: list[hvd.ProcessSet]) -> None:
    for process_set in sets:
        assert hvd.remove_process_set(process_set)


@on_ranks(1, planes=PLANES)
def test_the_only_rank_is_in_a_set_already() -> None:
    with pytest.raises(ValueError, match=r"a process set of all ranks is in use already; use hvd\.global_process_set"):
        hvd.add_process_set([0])


@on_ranks(3, 4, planes=PLANES)
def test_a_set_of_one_rank() -> None:
    for rank in range(hvd.size()):
        alone = hvd.add_process_set([rank])
        assert (alone.ranks, alone.size(), alone.included()) == ([rank], 1, hvd.rank() == rank)
        if alone.included():
            assert alone.rank() == 0
            own = np.full(5, rank + 1.0)
            np.testing.assert_array_equal(hvd.allreduce(own, process_set=alone), own)
            np.testing.assert_array_equal(hvd.allgather(own, process_set=alone), own)
            np.testing.assert_array_equal(hvd.broadcast(own, rank, process_set=alone), own)
            np.testing.assert_array_equal(hvd.alltoall(own, process_set=alone), own)
            np.testing.assert_array_equal(hvd.reducescatter(own, process_set=alone), own)
            hvd.barrier(alone)
        assert hvd.remove_process_set(alone)


@on_ranks(1, 3, 4, planes=PLANES)
def test_the_global_set() -> None:
    world = hvd.global_process_set
    assert (world.process_set_id, world.ranks) == (0, list(range(hvd.size())))
    assert (world.size(), world.rank(), world.included()) == (hvd.size(), hvd.rank(), True)
    np.testing.assert_array_equal(hvd.allreduce(np.ones(2), op=hvd.Sum, process_set=world), np.full(2, hvd.size()))
    assert hvd.remove_process_set(world) is False
    with pytest.raises(ValueError, match=r"in use already; use hvd\.global_process_set"):
        hvd.add_process_set(range(hvd.size()))
    with pytest.raises(ValueError, match=r"in use already; use hvd\.global_process_set"):
        hvd.add_process_set(world)
    the_engine_goes_on()


@on_ranks(3, 4, planes=PLANES)
def test_wrong_ranks() -> None:
    size = hvd.size()
    for ranks in ([], [0, 0], [1, 0, 1]):
        text = re.escape(f"a process set needs at least one rank and each at most once, not {ranks}")
        with pytest.raises(ValueError, match=text):
            hvd.add_process_set(ranks)
    wrong: list[object] = [0, None, [0.0], ["0"], "0"]
    for no_ranks in wrong:
        with pytest.raises(ValueError, match=re.escape(f"a process set needs ranks such as [0, 1], not {no_ranks!r}")):
            hvd.add_process_set(no_ranks)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"process_set must be a ProcessSet, .* not list"):
        hvd.remove_process_set([0])  # type: ignore[arg-type]
    for ranks in ([0, size], [-1, 0]):
        with pytest.raises(ValueError, match=re.escape(f"process set {ranks}: the ranks are 0 to {size - 1}")):
            hvd.add_process_set(ranks)
    first = hvd.add_process_set([0])
    for again in (first, [0], hvd.ProcessSet([0])):
        with pytest.raises(ValueError, match=re.escape("a process set of ranks [0] is in use already; use that one")):
            hvd.add_process_set(again)
    assert hvd.remove_process_set(first)
    with pytest.raises(TypeError, match=r"process_set must be a ProcessSet, .* not list"):
        hvd.allreduce(np.ones(2), process_set=[0])  # type: ignore[arg-type]
    the_engine_goes_on()


@on_ranks(3, 4, planes=PLANES)
def test_calls_outside_of_a_set() -> None:
    last = hvd.size() - 1
    others = hvd.add_process_set(range(last))
    if hvd.rank() == last:
        text = re.escape(
            f"rank {last} is not in process set {others.process_set_id} of ranks {list(range(last))}. "
            "Make the call on those ranks only: if process_set.included(): ..."
        )
        own = np.zeros((last, 2))
        calls: list[Any] = [
            lambda: hvd.allreduce(own, process_set=others),
            lambda: hvd.allreduce_async_(own, process_set=others),
            lambda: hvd.grouped_allreduce([own], process_set=others),
            lambda: hvd.allgather(own, process_set=others),
            lambda: hvd.grouped_allgather([own], process_set=others),
            lambda: hvd.broadcast(own, 0, process_set=others),
            lambda: hvd.alltoall(own, process_set=others),
            lambda: hvd.reducescatter(own, process_set=others),
            lambda: hvd.grouped_reducescatter([own], process_set=others),
            lambda: hvd.barrier(others),
            others.rank,
        ]
        for call in calls:
            with pytest.raises(ValueError, match=text):
                call()
    else:
        for call in (hvd.broadcast, hvd.broadcast_):
            with pytest.raises(ValueError, match=f"root_rank={last} is not in the process set of ranks"):
                call(np.zeros(2), last, process_set=others)
    assert hvd.remove_process_set(others)
    the_engine_goes_on()


@on_ranks(3, 4, planes=PLANES)
def test_sets_come_and_go() -> None:
    """More sets than there is room for at once, one after the other, each of them works."""
    seen = set()
    for turn in range(70):
        process_set = hvd.add_process_set([turn % hvd.size()] if turn % 2 else [0, 1])
        seen.add(process_set.process_set_id)
        if process_set.included():
            total = hvd.allreduce(np.full(3, turn), op=hvd.Sum, process_set=process_set, name="the same name")
            np.testing.assert_array_equal(total, np.full(3, turn * process_set.size()))
        assert hvd.remove_process_set(process_set)
    assert len(seen) == 70
    the_engine_goes_on()


@on_ranks(3, 4, planes=PLANES)
def test_from_communicators() -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    half = world.Split(hvd.rank() % 2, key=-hvd.rank())  # ranks in descending order
    ranks = sorted(rank for rank in range(hvd.size()) if rank % 2 == hvd.rank() % 2)
    mine = hvd.ProcessSet(half)
    assert mine.ranks == ranks
    evens, odds = (hvd.ProcessSet(range(parity, hvd.size(), 2)) for parity in (0, 1))
    added = [hvd.add_process_set(mine if hvd.rank() % 2 == parity else (evens, odds)[parity]) for parity in (0, 1)]
    assert added[hvd.rank() % 2] is mine
    total = hvd.allreduce(np.full(3, hvd.rank()), op=hvd.Sum, process_set=mine)
    np.testing.assert_array_equal(total, np.full(3, sum(ranks)))
    assert mine.mpi_comm is not None
    assert mine.mpi_comm.Get_size() == len(ranks)
    assert mine.mpi_comm.Get_rank() == mine.rank()
    assert mine.mpi_comm.allgather(hvd.rank()) == ranks
    assert added[1 - hvd.rank() % 2].mpi_comm is None
    remove_all(added)
    assert mine.mpi_comm is None
    half.Free()


@on_ranks(3, 4, planes=PLANES)
def test_names_and_counts_are_apart() -> None:
    """The same name is used in two sets at once, and calls without names are counted for each set."""
    both = hvd.add_process_set([0, 1])
    if both.included():
        own = hvd.allreduce_async(np.full(2, 1.0), op=hvd.Sum, name="shared", process_set=both)
        for _ in range(3):
            hvd.allreduce(np.zeros(1), process_set=both)
            hvd.barrier(both)
        everywhere = hvd.allreduce_async(np.full(3, 2), op=hvd.Max, name="shared")
        np.testing.assert_array_equal(hvd.synchronize(own), [2.0, 2.0])
    else:
        everywhere = hvd.allreduce_async(np.full(3, hvd.rank()), op=hvd.Max, name="shared")
    np.testing.assert_array_equal(hvd.synchronize(everywhere), np.full(3, max(2, hvd.size() - 1)))
    np.testing.assert_array_equal(hvd.allreduce(np.full(2, hvd.rank()), op=hvd.Min), [0, 0])
    hvd.barrier()
    assert hvd.remove_process_set(both)


@on_ranks(3, 4, planes=PLANES)
def test_removal() -> None:
    process_set = hvd.add_process_set([0])
    other = hvd.ProcessSet([0])
    assert hvd.remove_process_set(other) is False  # equal, but not the one that was added
    assert hvd.remove_process_set(process_set)
    assert process_set.process_set_id is None
    assert hvd.remove_process_set(process_set) is False
    assert other.process_set_id is None
    for removed in (process_set, other):
        calls: list[Any] = [
            removed.size,
            removed.rank,
            removed.included,
            lambda removed=removed: hvd.allreduce(np.zeros(2), process_set=removed),
            lambda removed=removed: hvd.broadcast(np.zeros(2), 0, process_set=removed),
            lambda removed=removed: hvd.alltoall(np.zeros(2), process_set=removed),
            lambda removed=removed: hvd.barrier(removed),
            lambda removed=removed: hvd.allgather_object(1, process_set=removed),
        ]
        for call in calls:
            with pytest.raises(ValueError, match=NOT_IN_USE):
                call()
    again = hvd.add_process_set(process_set)
    assert again is process_set
    assert hvd.remove_process_set(again)
    the_engine_goes_on()


@on_ranks(3, 4, planes=PLANES)
def test_disagreement_about_sets() -> None:
    last = hvd.size() - 1
    ranks = [0] if hvd.rank() < last else [0, 1]
    text = re.escape(
        f"add_process_set: rank 0 names [0], rank {last} names [0, 1]. Remedy: every rank must make the same"
    )
    with pytest.raises(hvd.MismatchError, match=text):
        hvd.add_process_set(ranks)
    one, two = hvd.add_process_set([0]), hvd.add_process_set([1])
    text = f"remove_process_set: rank 0 names {one.process_set_id}, rank {last} names {two.process_set_id}"
    with pytest.raises(hvd.MismatchError, match=text):
        hvd.remove_process_set(one if hvd.rank() < last else two)
    remove_all([one, two])
    the_engine_goes_on()


@on_ranks(3, 4, planes=PLANES)
def test_disagreement_within_a_set() -> None:
    """The message names ranks of the world, not numbers within the set."""
    low, high = hvd.size() - 2, hvd.size() - 1
    both = hvd.add_process_set([low, high])
    if both.included():
        for _ in range(2):
            own = np.zeros(2 if hvd.rank() == low else 3)
            with mismatch("'x' failed", "shape", f"rank {low} has (2,)", f"rank {high} has (3,)"):
                hvd.allreduce(own, name="x", process_set=both)
            with mismatch("root rank", f"rank {low} has {low}", f"rank {high} has {high}"):
                hvd.broadcast(np.zeros(2), hvd.rank(), name="x", process_set=both)
            total = hvd.allreduce(np.ones(2), op=hvd.Sum, name="x", process_set=both)
            np.testing.assert_array_equal(total, [2.0, 2.0])
    assert hvd.remove_process_set(both)


@on_ranks(3, 4, planes=PLANES)
def test_every_collective() -> None:
    sets = pairs()
    for process_set in sets:
        if process_set.included():
            use_every_collective(process_set)
    remove_all(sets)


def use_every_collective(process_set: hvd.ProcessSet) -> None:
    ranks, me = process_set.ranks, process_set.rank()
    size = process_set.size()
    assert (size, me) == (2, ranks.index(hvd.rank()))
    for op in OPS:
        for length in (1, 70_001):
            arrays = [values("float32", length, rank, op) for rank in ranks]
            chosen = getattr(hvd, op)
            told = difference(
                hvd.allreduce(arrays[me], op=chosen, process_set=process_set), reduced(arrays, op), MAGNITUDE
            )
            assert not told, f"allreduce {op} in {process_set}: {told}"
            result = hvd.reducescatter(arrays[me], op=chosen, process_set=process_set)
            told = difference(result, np.array_split(reduced(arrays, op), size)[me], MAGNITUDE)
            assert not told, f"reducescatter {op} in {process_set}: {told}"
    for root in ranks:  # a rank of the world
        result = hvd.broadcast(np.full(9, hvd.rank()), root, process_set=process_set)
        np.testing.assert_array_equal(result, np.full(9, root))
        assert hvd.broadcast_object(hvd.rank(), root, process_set=process_set) == root
    gathered = hvd.allgather(np.full(hvd.rank(), hvd.rank()), process_set=process_set)
    np.testing.assert_array_equal(gathered, np.concatenate([np.full(rank, rank) for rank in ranks]))
    rows, received = hvd.alltoall(np.arange(3) + 10 * hvd.rank(), [1, 2], process_set=process_set)
    expected = [(np.arange(3) + 10 * rank)[[0] if me == 0 else [1, 2]] for rank in ranks]
    np.testing.assert_array_equal(rows, np.concatenate(expected))
    np.testing.assert_array_equal(received, [me + 1] * 2)
    group = hvd.grouped_allreduce([np.full(2, hvd.rank()), np.ones(3)], op=hvd.Sum, process_set=process_set)
    np.testing.assert_array_equal(group[0], np.full(2, sum(ranks)))
    assert hvd.allgather_object(hvd.rank(), process_set=process_set) == ranks
    with pytest.raises(ValueError, match="must be 2 non-negative numbers"):
        hvd.alltoall(np.zeros(3), [1, 1, 1], process_set=process_set)
    hvd.barrier(process_set)


@on_ranks(3, 4, planes=PLANES)
def test_overlapping_sets_are_busy_at_once() -> None:
    """Each rank submits to its sets, and waits for them, in an order of its own; the world is busy as well."""
    sets = pairs()
    order = random.Random(hvd.rank())
    for turn in range(40):
        length = order.choice([5]) if turn % 4 else 300_000
        mine = [process_set for process_set in [*sets, hvd.global_process_set] if process_set.included()]
        order.shuffle(mine)
        own = np.full(length, hvd.rank() + 1.0, np.float32)
        handles: list[tuple[hvd.ProcessSet, Any, Any]] = []
        for process_set in mine:
            sum_handle = hvd.allreduce_async(own, op=hvd.Sum, process_set=process_set, name=f"turn {turn % 8}")
            gather = hvd.allgather_async(own[: hvd.rank()], process_set=process_set, name=f"rows {turn % 8}")
            handles.append((process_set, sum_handle, gather))
        order.shuffle(handles)
        for process_set, sum_handle, gather in handles:
            ranks = process_set.ranks
            np.testing.assert_array_equal(hvd.synchronize(sum_handle), np.full(length, sum(ranks) + len(ranks)))
            np.testing.assert_array_equal(hvd.synchronize(gather), np.repeat(ranks, ranks) + 1.0)
    remove_all(sets)


@on_ranks(3, 4, planes=PLANES)
def test_waits_in_a_circle() -> None:
    """Each rank waits for the set of its successor first: with one blocking thread per rank this deadlocks."""
    sets = pairs()
    first = {0: 0, 1: 2, 2: 1}  # rank 0 begins with {0, 1}, rank 1 with {1, 2}, rank 2 with {0, 2}
    for _ in range(5):
        mine = [process_set for process_set in sets if process_set.included()]
        mine.sort(key=lambda process_set: process_set is not sets[first[hvd.rank()]])
        handles = [hvd.allreduce_async(np.ones(200_000), op=hvd.Sum, process_set=each, name="circle") for each in mine]
        for handle in handles:
            np.testing.assert_array_equal(hvd.synchronize(handle), np.full(200_000, 2.0))
    remove_all(sets)


@on_ranks(3, 4, planes=PLANES)
def test_disagreement_in_one_set_leaves_the_others_alone() -> None:
    sets = pairs()
    handles = {
        index: hvd.allreduce_async(
            np.ones(hvd.rank() + 1 if index == 1 else 3), op=hvd.Sum, process_set=process_set, name="x"
        )
        for index, process_set in enumerate(sets)
        if process_set.included()
    }
    for index, handle in handles.items():
        if index == 1:
            with mismatch("'x'", "shape", "rank 0 has (1,)", "rank 2 has (3,)"):
                hvd.synchronize(handle)
        else:
            np.testing.assert_array_equal(hvd.synchronize(handle), np.full(3, 2.0))
    remove_all(sets)
    the_engine_goes_on()


@on_ranks(3, 4, planes=PLANES)
def test_a_root_outside_the_set() -> None:
    """As a framework's native code may hand it over: Python has checked the root when it traced."""
    pair = hvd.add_process_set([1, 2])
    if pair.included():
        array = np.zeros(5)
        handle = submit(
            Operation("broadcast", "outside", pair),
            [(array.ctypes.data, array.ctypes.data, DTYPES["float64"], array.shape)],
            keep_alive=array,
            result=lambda _: None,
        )
        with pytest.raises(
            hvd.HorovodInternalError, match=r"broadcast 'outside'.*root_rank=0 is not in the process set"
        ):
            handle.wait()
        np.testing.assert_array_equal(hvd.broadcast(np.full(3, hvd.rank()), 2, process_set=pair), [2, 2, 2])
    remove_all([pair])


@on_ranks(1, 3, 4, planes=PLANES)
def test_after_shutdown() -> None:
    """The sets of an engine end with it; they can be added to the next one."""
    from mpi4py import MPI

    old = hvd.ProcessSet([0])
    if hvd.size() > 1:
        hvd.add_process_set(old)
    MPI.COMM_WORLD.Barrier()
    hvd.shutdown()
    for call in (old.size, old.included, lambda: hvd.allreduce(np.zeros(2), process_set=old)):
        with pytest.raises(hvd.NotInitializedError, match=r"init\(\)"):
            call()
    with pytest.raises(hvd.NotInitializedError, match=r"init\(\)"):
        hvd.add_process_set([0])
    MPI.COMM_WORLD.Barrier()
    hvd.init()
    with pytest.raises(ValueError, match=NOT_IN_USE):
        hvd.allreduce(np.zeros(2), process_set=old)
    if hvd.size() > 1:
        assert hvd.add_process_set(old) is old
        if old.included():
            np.testing.assert_array_equal(hvd.allreduce(np.ones(2), process_set=old), np.ones(2))
    the_engine_goes_on()


@on_ranks(3, planes=PLANES)
def test_a_set_with_operations_under_way_stays() -> None:
    """Removal raises on every rank, and the set can be used and removed afterwards."""
    both = hvd.add_process_set([0, 1])
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(np.full(3, 1.0), op=hvd.Sum, process_set=both, name="under way")
    hvd.barrier()
    text = f"process set {both.process_set_id} has operations under way on rank 0. Remedy: synchronize them"
    with pytest.raises(ValueError, match=text):
        hvd.remove_process_set(both)
    if hvd.rank() == 1:
        handle = hvd.allreduce_async(np.full(3, 2.0), op=hvd.Sum, process_set=both, name="under way")
    if both.included():
        np.testing.assert_array_equal(hvd.synchronize(handle), np.full(3, 3.0))
    assert hvd.remove_process_set(both)
    the_engine_goes_on()


@on_ranks(3, planes=PLANES)
def test_a_set_with_refused_calls_can_be_removed() -> None:
    """A rank refuses its own call, and the others never make theirs: nobody waits."""
    both = hvd.add_process_set([0, 1])
    if hvd.rank() == 1:
        with pytest.raises(ValueError, match="prescale_factor"):
            hvd.allreduce(np.ones(3), prescale_factor=None, process_set=both)  # type: ignore[arg-type]
    assert hvd.remove_process_set(both)
    again = hvd.add_process_set([0, 1])
    if again.included():
        np.testing.assert_array_equal(hvd.allreduce(np.ones(3), op=hvd.Sum, process_set=again), np.full(3, 2.0))
    assert hvd.remove_process_set(again)
    the_engine_goes_on()
