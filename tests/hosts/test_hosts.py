"""Several hosts with several ranks each, as many on each or not: shared memory within a host, MPI between hosts."""

from __future__ import annotations

import os
import random
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from itertools import accumulate, count, product, zip_longest
from typing import Any

import numpy as np
import pytest

import horovodish as hvd
from support import bits
from support.carried import the_second_time_gives_the_bits_of_the_first
from support.expect import every_rank_raises, the_engine_goes_on, unless_last
from support.float16 import large_float16_numbers_stay_finite
from support.hosts import Hosts, hosts, run_on_hosts, run_on_hosts_to_their_ends
from support.model import FLOATS, INTEGERS, LENGTHS, OPS, Array, adasum, difference, reduced, values
from support.parts import parts_by_elements
from support.ranks import RanksFailedError

LAYOUTS = [[1, 1], [2, 2], [2, 1], [2, 1, 2]]
MAGNITUDE = 12.0  # of any intermediate value: 5 ranks x 2.0, or 1.5 to the power of 5
KNOWN_WITHIN_SECONDS = 20.0
SENT_MIB = 16
SENT_TIMES = 4


@pytest.fixture(scope="module")
def three_hosts() -> Iterator[Hosts]:
    with hosts(3) as made:
        yield made


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def layout(request: pytest.FixtureRequest) -> list[int]:
    """The scope is the module, so that the tests of a layout follow each other and use the same ranks."""
    return request.param


def every_op_and_dtype() -> None:
    hvd.init()
    for dtype, op, length in product(INTEGERS + FLOATS, OPS, LENGTHS):
        if length == LENGTHS[-1] and op != "Sum" and dtype != "float32":
            continue
        arrays = [values(dtype, length, rank, op) for rank in range(hvd.size())]
        result = hvd.allreduce(arrays[hvd.rank()], op=getattr(hvd, op), name=f"{dtype} {op} {length}")
        told = difference(result, reduced(arrays, op), MAGNITUDE)
        assert not told, f"{dtype} {op} {length}: {told}"
        assert result.dtype == arrays[0].dtype


def small_and_scaled_and_in_place() -> None:
    hvd.init()
    total = sum(range(hvd.size()))
    for length in (2, hvd.size() - 1, hvd.size() + 1, 2047, 4096, 4097, 65_537, 300_001):
        own = np.full(length, hvd.rank(), np.float32)
        assert hvd.allreduce_(own, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0) is own
        np.testing.assert_array_equal(own, np.full(length, 2.0 * total))
    average = hvd.allreduce(np.full((), float(hvd.rank())))
    np.testing.assert_allclose(average, total / hvd.size(), rtol=1e-12)


def large_float16_numbers() -> None:
    large_float16_numbers_stay_finite()


def adasum_of_everybody() -> None:
    hvd.init()
    for dtype, length in product(FLOATS, LENGTHS):
        arrays = [values(dtype, length, rank, "Product") for rank in range(hvd.size())]
        result = hvd.allreduce(arrays[hvd.rank()], op=hvd.Adasum, name=f"adasum {dtype} {length}")
        told = difference(result, adasum(arrays), 8.0)
        assert not told, f"{dtype} {length}: {told}"


def groups() -> None:
    hvd.init()
    kinds: list[tuple[str, tuple[int, ...]]] = [
        ("float32", (70_001,)),
        ("int16", ()),
        ("bfloat16", (3, 0)),
        ("float32", (9,)),
    ]
    arrays = [[values(dtype, shape, rank) for dtype, shape in kinds] for rank in range(hvd.size())]
    for _ in range(3):
        for index, result in enumerate(hvd.grouped_allreduce(arrays[hvd.rank()], op=hvd.Sum, name="group")):
            told = difference(result, reduced([of_rank[index] for of_rank in arrays], "Sum"), MAGNITUDE)
            assert not told, f"{kinds[index]}: {told}"


def rows_of_every_rank() -> None:
    hvd.init()
    own, size = hvd.rank(), hvd.size()
    for most in (1, 50_021):
        arrays = [values("float64", (rank % 3 * most, 2), rank) for rank in range(size)]
        np.testing.assert_array_equal(hvd.allgather(arrays[own], name="rows"), np.concatenate(arrays))
        flags, numbers = hvd.grouped_allgather(
            [np.full(own % 2, own > 1), np.full((most, 3), own)], name="group of rows"
        )
        np.testing.assert_array_equal(flags, np.array([rank > 1 for rank in range(size) if rank % 2], bool))
        np.testing.assert_array_equal(numbers[:, 0], np.repeat(np.arange(size), most))
        splits = [[(rank + 2 * to) % 3 * most for to in range(size)] for rank in range(size)]
        rows = np.repeat(np.arange(size) + 100 * own, splits[own])
        received, counts = hvd.alltoall(rows, splits[own], name="exchange")
        expected_counts = [of_rank[own] for of_rank in splits]
        np.testing.assert_array_equal(received, np.repeat(100 * np.arange(size) + own, expected_counts))
        np.testing.assert_array_equal(counts, expected_counts)
    assert hvd.allgather_object({"rank": own}) == [{"rank": rank} for rank in range(size)]


def from_every_root() -> None:
    hvd.init()
    for root, length in product(range(hvd.size()), [0, 1, 4099, 700_001]):
        result = hvd.broadcast(values("float32", length, hvd.rank()), root, name=f"{length} from {root}")
        np.testing.assert_array_equal(result, values("float32", length, root))
        assert hvd.broadcast_object(hvd.rank(), root) == root


def scattered() -> None:
    hvd.init()
    own, size = hvd.rank(), hvd.size()
    for op, shape in product(["Average", "Sum", "Max"], [(0, 2), (1, 3), (size,), (size + 1, 2), (100_003,)]):
        arrays = [values("float32", shape, rank) for rank in range(size)]
        result = hvd.reducescatter(arrays[own], op=getattr(hvd, op), name=f"scattered {op} {shape}")
        told = difference(result, np.array_split(reduced(arrays, op), size)[own], MAGNITUDE)
        assert not told, f"reducescatter {op} {shape}: {told}"


def parts() -> None:
    hvd.init()
    parts_by_elements()


def join() -> None:
    """Ranks of both hosts run out at different times, first in ascending, then in descending order."""
    hvd.init()
    size = hvd.size()
    for order in (list(range(size)), list(reversed(range(size)))):
        for step, leaver in enumerate(order):
            active = sorted(order[step:])
            for length in (3, 200_003):
                average = hvd.allreduce(np.full(length, hvd.rank() + 1.0), name=f"average {length}")
                np.testing.assert_allclose(average, np.full(length, sum(active) / len(active) + 1.0), rtol=1e-12)
                largest = hvd.allreduce(np.full(length, -1 - hvd.rank()), op=hvd.Max, name=f"largest {length}")
                np.testing.assert_array_equal(largest, np.full(length, -1 - active[0]))
            gathered = hvd.allgather(np.full(2, hvd.rank()), name="gathered")
            np.testing.assert_array_equal(gathered, np.repeat(active, 2))
            np.testing.assert_array_equal(
                hvd.broadcast(np.full(9, hvd.rank()), active[-1], name=f"{step}"), [active[-1]] * 9
            )
            hvd.barrier()
            if hvd.rank() == leaver:
                assert hvd.join() == order[-1]
                break
        the_engine_goes_on("after join")


def disagreement() -> None:
    hvd.init()
    four = np.zeros((4, 2), np.float32)
    for _ in range(2):
        every_rank_raises(
            "x", "shape", "(4, 2)", "(2, 2)", lambda: hvd.allreduce(unless_last(four, four[:2]), name="x")
        )
        every_rank_raises(
            "x", "dtype", "float32", "int8", lambda: hvd.allgather(four.astype(unless_last("f4", "i1")), name="x")
        )
        every_rank_raises("x", "root rank", "0", "1", lambda: hvd.broadcast(four, unless_last(0, 1), name="x"))
        every_rank_raises(
            "x",
            "reduction op",
            "sum",
            "min",
            lambda: hvd.reducescatter(four, op=unless_last(hvd.Sum, hvd.Min), name="x"),
        )
        every_rank_raises(
            "x", "number of tensors", "2", "1", lambda: hvd.grouped_allreduce([four] * unless_last(2, 1), name="x")
        )


def there_and_back() -> None:
    """The engine starts again on all hosts."""
    hvd.init()
    for _ in range(2):
        hvd.barrier()
        hvd.shutdown()
        hvd.init()
        the_engine_goes_on()


CHECKS = [
    every_op_and_dtype,
    small_and_scaled_and_in_place,
    large_float16_numbers,
    adasum_of_everybody,
    groups,
    rows_of_every_rank,
    from_every_root,
    scattered,
    parts,
    join,
    disagreement,
    there_and_back,
    the_second_time_gives_the_bits_of_the_first,
]


@pytest.mark.parametrize("check", CHECKS)
def test_every_layout(three_hosts: Hosts, layout: list[int], check: Callable[[], None]) -> None:
    run_on_hosts(check, three_hosts, layout)


def sets_within_and_across_hosts(layout: list[int]) -> None:
    """All are busy at once: one per host, the first and the last ranks of the hosts, and pairs in a circle."""
    hvd.init()
    size = hvd.size()
    ends = list(accumulate(layout))
    within = [list(range(end - ranks, end)) for ranks, end in zip(layout, ends, strict=True)]
    across = [[ranks[0] for ranks in within], [ranks[-1] for ranks in within], [0, size - 1]]
    circle = [sorted([rank, (rank + 1) % size]) for rank in range(size)]
    chosen = {tuple(ranks) for ranks in [*within, *across, *circle] if len(ranks) < size}
    sets = [hvd.add_process_set(ranks) for ranks in sorted(chosen)]
    order = random.Random(hvd.rank())
    for turn in range(12):
        mine = [process_set for process_set in sets if process_set.included()]
        order.shuffle(mine)
        own = np.full(5 if turn % 3 else 150_001, hvd.rank() + 1.0, np.float32)
        handles: list[tuple[hvd.ProcessSet, Any, Any, Any]] = []
        for each in mine:
            total = hvd.allreduce_async(own, op=hvd.Sum, process_set=each, name=f"total {turn % 3}")
            last = hvd.broadcast_async(own, each.ranks[-1], process_set=each, name=f"last {turn % 3}")
            rows = hvd.allgather_async(np.full(hvd.rank(), hvd.rank()), process_set=each)
            handles.append((each, total, last, rows))
        everywhere = hvd.allreduce_async(own, op=hvd.Max, name=f"everywhere {turn % 3}")
        order.shuffle(handles)
        for each, total, last, rows in handles:
            np.testing.assert_array_equal(hvd.synchronize(total), np.full(own.size, sum(each.ranks) + each.size()))
            np.testing.assert_array_equal(hvd.synchronize(last), np.full(own.size, each.ranks[-1] + 1))
            np.testing.assert_array_equal(hvd.synchronize(rows), np.repeat(each.ranks, each.ranks))
        np.testing.assert_array_equal(hvd.synchronize(everywhere), np.full(own.size, size))
    for each in sets:
        assert hvd.remove_process_set(each)


def test_sets_within_and_across_hosts(three_hosts: Hosts, layout: list[int]) -> None:
    run_on_hosts(sets_within_and_across_hosts, three_hosts, layout, args=(layout,))


def places(layout: list[int]) -> list[tuple[Any, ...]]:
    """What each rank should say of itself."""
    expected = []
    for host, ranks in enumerate(layout):
        for local in range(ranks):
            peers = [index for index, of_host in enumerate(layout) if of_host > local]
            place = (local, ranks, peers.index(host), len(peers), len(set(layout)) == 1)
            expected.append((len(expected), *place))
    return expected


def ask_where_it_is() -> tuple[Any, ...]:
    hvd.init()
    return hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()


def test_where_each_rank_is(three_hosts: Hosts, layout: list[int]) -> None:
    assert run_on_hosts(ask_where_it_is, three_hosts, layout) == places(layout)


def send_much(kind: str) -> None:
    hvd.init()
    own = np.full(SENT_MIB << 18, hvd.rank(), np.float32)
    for _ in range(SENT_TIMES):
        if kind == "allreduce":
            np.testing.assert_array_equal(hvd.allreduce(own, op=hvd.Max)[:: 1 << 10], hvd.size() - 1)
        elif kind == "reducescatter":
            np.testing.assert_array_equal(hvd.reducescatter(own, op=hvd.Max)[:: 1 << 10], hvd.size() - 1)
        elif kind == "adasum":
            np.testing.assert_array_equal(hvd.allreduce(np.ones_like(own), op=hvd.Adasum)[:: 1 << 10], 1)
        else:
            np.testing.assert_array_equal(hvd.allgather(own)[:: SENT_MIB << 18], np.arange(hvd.size()))


@pytest.mark.parametrize("kind", ["allreduce", "adasum", "reducescatter", "allgather"])
@pytest.mark.parametrize("layout", [[2, 2], [2, 1, 2]], ids=str)
def test_what_crosses_the_links(three_hosts: Hosts, layout: list[int], kind: str) -> None:
    """However many ranks a host has: a ring over H hosts sends 2 (H - 1) / H of an allreduce's bytes from each. In a
    reducescatter a host sends what other hosts' ranks get, and in an allgather the tensors of its ranks to each. With
    Adasum a rank sends its part of each shard to the shard's rank, and each host its shards of the result to each."""
    before = three_hosts.sent_bytes()
    run_on_hosts(send_much, three_hosts, layout, args=(kind,))
    sent = [after - start for start, after in zip(before, three_hosts.sent_bytes(), strict=True)]
    for of_host, ranks in zip_longest(sent, layout, fillvalue=0):
        tensors = {
            "allreduce": 2 * (len(layout) - 1) / len(layout),
            "adasum": ranks * (1 - ranks / sum(layout)) + ranks / sum(layout) * (len(layout) - 1),
            "reducescatter": 1 - ranks / sum(layout),
            "allgather": (len(layout) - 1) * ranks,
        }
        share = SENT_TIMES * (SENT_MIB << 20) * (tensors[kind] if ranks else 0)
        assert share <= of_host < 1.25 * share + (1 << 20), f"{sent} bytes were sent where a host's share is {share}"


def reduce_with_random_delays(seed: int) -> list[int]:
    """Checksums of all results; each round has the same inputs and other delays and orders."""
    hvd.init()
    timing = random.Random(1000 * seed + hvd.rank())
    inputs: list[Array] = [
        np.random.default_rng([hvd.rank(), tensor]).normal(size=(tensor % 6) ** 6 * 20 + tensor).astype(np.float32)
        for tensor in range(24)
    ]
    checksums = []
    for _ in range(3):
        order = list(range(24))
        timing.shuffle(order)
        handles: dict[int, Any] = {}
        for tensor in order:
            if timing.random() < 0.3:
                time.sleep(timing.random() * 0.003)
            if tensor % 4 == 3:
                handles[tensor] = hvd.reducescatter_async(inputs[tensor], name=f"tensor {tensor}")
            elif tensor % 4 == 2:
                pair = [inputs[tensor], inputs[tensor - 1]]
                handles[tensor] = hvd.grouped_allreduce_async(pair, op=hvd.Sum, name=f"tensor {tensor}")
            else:
                handles[tensor] = hvd.allreduce_async(inputs[tensor], name=f"tensor {tensor}")
        results = [handles[tensor].wait() for tensor in range(24)]
        arrays = [array for result in results for array in (result if isinstance(result, list) else [result])]
        checksums.append(zlib.crc32(b"".join(array.tobytes() for array in arrays)))
    return checksums


@pytest.mark.parametrize("layout", bits.LAYOUTS, ids=str)
def test_bits_as_they_were_recorded(three_hosts: Hosts, layout: list[int]) -> None:
    found = run_on_hosts(bits.checksums, three_hosts, layout, env=bits.ENVIRONMENT)
    assert not bits.difference(f"hosts {layout}", found)


@pytest.mark.parametrize("layout", [[2, 2], [2, 1]], ids=str)
def test_bits_do_not_depend_on_timing(three_hosts: Hosts, layout: list[int]) -> None:
    runs = [run_on_hosts(reduce_with_random_delays, three_hosts, layout, args=(seed,)) for seed in range(2)]
    for of_rank in zip(*runs, strict=True):
        assert len({checksum for run in of_rank for checksum in run}) == 1


def reduce_until_a_rank_is_lost(victim: int) -> tuple[str, float]:
    """What the survivors are told, and how many seconds after the last collective that worked."""
    hvd.init()
    last = time.monotonic()
    for turn in count():
        if turn == 6 and hvd.rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            hvd.allreduce(np.full(50_000, hvd.rank()), name=f"turn {turn % 10}")
            last = time.monotonic()
        except hvd.RankLostError as error:
            told = time.monotonic()
            for call in (lambda: hvd.allreduce(np.zeros(2)), hvd.barrier, lambda: hvd.broadcast(np.zeros(2), 0)):
                with pytest.raises(hvd.RankLostError, match=f"rank {victim}"):
                    call()
            return str(error), told - last
    raise AssertionError("not reached")


@pytest.mark.parametrize(("layout", "victim"), [([2, 2], 0), ([2, 2], 2), ([2, 2], 3), ([2, 1, 2], 2)], ids=str)
def test_survivors_on_all_hosts_are_told(three_hosts: Hosts, layout: list[int], victim: int) -> None:
    """Rank 0 leads all, rank 2 speaks for the other host, rank 3 follows there; then a host loses its only rank."""
    outcomes = run_on_hosts_to_their_ends(reduce_until_a_rank_is_lost, three_hosts, layout, args=(victim,))
    assert outcomes.pop(victim).ended == "died"
    for outcome in outcomes:
        assert outcome.ended == "returned", outcome.output
        message, seconds = outcome.result
        assert f"rank {victim}" in message
        assert seconds < KNOWN_WITHIN_SECONDS


def test_without_fault_tolerance_the_job_ends(three_hosts: Hosts) -> None:
    with pytest.raises(RanksFailedError, match="rank 3 died"):
        run_on_hosts(reduce_until_a_rank_is_lost, three_hosts, [2, 2], args=(3,))
