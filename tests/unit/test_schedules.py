"""The schedules between hosts, executed in memory: they must give the right result in any order that they allow."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from itertools import combinations, pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from horovodish import _native
from horovodish._native import GENERATIONS, exchanged_chunk, testing
from horovodish.predictions.steps import steps_and_bytes

sizes = st.tuples(st.integers(2, 9), st.integers(0, 60), st.integers(1, 20), st.integers(0, 2**32))


def execute(schedules: list[testing.Schedule], buffers: list[list[object]], seed: int, window: int = 4) -> int:
    """Runs all ranks' schedules in random interleaving, with at most `window` transfers under way each way.

    A send hands over what its range holds when the message *arrives*: the latest moment at which MPI may read it.
    What is stored is written then; what is reduced waits for its turn.
    Returns the elements that the busiest rank sent.
    """
    chooser = random.Random(seed)
    ranks = len(schedules)
    started, sent, posted, received = ([0] * ranks for _ in range(4))
    arrived: list[list[list[object]]] = [[] for _ in range(ranks)]
    wires: dict[tuple[int, int], deque[tuple[int, int]]] = {}
    completed: list[set[int]] = [set() for _ in range(ranks)]  # sends that were read and are not yet counted
    finished: list[list[bool]] = [[] for _ in range(ranks)]
    volume = [0] * ranks

    def moves(rank: int) -> list[tuple[str, int]]:
        sends, receives = schedules[rank]
        possible = []
        send = started[rank]
        if send < min(len(sends), sent[rank] + window) and received[rank] >= sends[send][3]:
            possible.append(("send", rank))
        post = posted[rank]
        if post < min(len(receives), received[rank] + window):
            _, _, _, after, then = receives[post]
            if then != "store" or sent[rank] >= after:
                possible.append(("post", rank))
        if len(arrived[rank]) < posted[rank] and wires.get((receives[len(arrived[rank])][0], rank)):
            possible.append(("arrive", rank))
        if received[rank] < len(arrived[rank]) and sent[rank] >= receives[received[rank]][3]:
            possible.append(("receive", rank))
        if sent[rank] in completed[rank]:
            possible.append(("sent", rank))
        return possible

    while True:
        possible = [move for rank in range(ranks) for move in moves(rank)]
        if not possible:
            break
        what, rank = chooser.choice(possible)
        sends, receives = schedules[rank]
        if what == "send":
            peer, begin, count, _ = sends[started[rank]]
            wires.setdefault((rank, peer), deque()).append((started[rank], begin))
            volume[rank] += count
            started[rank] += 1
        elif what == "post":
            posted[rank] += 1
        elif what == "sent":
            sent[rank] += 1
        elif what == "arrive":
            peer, begin, count, _, then = receives[len(arrived[rank])]
            index, source = wires[peer, rank].popleft()
            assert schedules[peer][0][index][2] == count, "both ends agree about a message's length"
            arrived[rank].append(buffers[peer][source : source + count])
            completed[peer].add(index)
            if then == "store":
                buffers[rank][begin : begin + count] = arrived[rank][-1]
        else:
            _, begin, count, _, then = receives[received[rank]]
            if then != "store":
                kept = buffers[rank][begin : begin + count]
                buffers[rank][begin : begin + count] = zip(arrived[rank][received[rank]], kept, strict=True)
            finished[rank].append(then == "reduce_finish")
            received[rank] += 1
    for rank, (sends, receives) in enumerate(schedules):
        assert (sent[rank], received[rank]) == (len(sends), len(receives)), f"rank {rank} is stuck"
    return max(volume)


def contributions(value: object) -> list[object]:
    return [*contributions(value[0]), *contributions(value[1])] if isinstance(value, tuple) else [value]


Allreduce = Callable[[int, int, int, int], "testing.Schedule"]


def elements_sent(allreduce: Allreduce, case: tuple[int, int, int, int]) -> int:
    """What the busiest rank sent, once the result is seen to be right."""
    ranks, count, segment, seed = case
    schedules = [allreduce(rank, ranks, count, segment) for rank in range(ranks)]
    buffers: list[list[object]] = [[f"{rank}:{i}" for i in range(count)] for rank in range(ranks)]
    volume = execute(schedules, buffers, seed)
    for i in range(count):
        assert sorted(contributions(buffers[0][i])) == sorted(f"{rank}:{i}" for rank in range(ranks))
        # The same tree of additions on every rank, so the same bits.
        assert all(buffer[i] == buffers[0][i] for buffer in buffers)
    return volume


@settings(max_examples=300)
@given(sizes)
def test_ring_allreduce(case: tuple[int, int, int, int]) -> None:
    ranks, count, _, _ = case
    volume = elements_sent(testing.ring_allreduce, case)
    assert volume <= 2 * (ranks - 1) * -(-count // ranks)


@settings(max_examples=300)
@given(sizes)
def test_two_step_allreduce(case: tuple[int, int, int, int]) -> None:
    ranks, count, _, _ = case
    volume = elements_sent(testing.two_step_allreduce, case)
    assert volume <= 2 * (ranks - 1) * -(-count // ranks)


@settings(max_examples=300)
@given(sizes)
def test_halving_allreduce(case: tuple[int, int, int, int]) -> None:
    ranks, count, _, _ = case
    volume = elements_sent(testing.halving_allreduce, case)
    halvers = 1 << (ranks.bit_length() - 1)
    own = 2 * sum(-(-count // 2**halving) for halving in range(1, halvers.bit_length()))
    assert volume <= own + (count if halvers < ranks else 0)


@pytest.mark.parametrize("ranks", [3, 4, 6, 8, 13, 16, 64, 100])
def test_the_fastest_allreduce_goes_from_few_steps_to_few_bytes(ranks: int) -> None:
    chosen = [_native.fastest_allreduce(ranks, 4 << power) for power in range(28)]
    in_order = [algorithm for algorithm in ("direct", "halving", "two_step", "ring") if algorithm in chosen]
    assert sorted(chosen, key=in_order.index) == chosen
    power_of_two = ranks & (ranks - 1) == 0
    assert (chosen[0], chosen[-1]) == ("direct", "halving" if power_of_two else "ring")


@pytest.mark.parametrize("hosts", [5, 6, 7, 17, 33])
def test_a_host_more_than_a_power_of_two_costs_no_second_transfer(hosts: int) -> None:
    """A chunk of 1 MiB, of hosts with 8 ranks: each exchanges its share."""
    _, times = steps_and_bytes(hosts, 128 << 10)
    assert times == 2 * (hosts - 1) / hosts


@pytest.mark.parametrize("ranks_per_host", [1, 2, 8])
def test_values_are_carried_only_where_the_plane_adds_in_the_same_order(ranks_per_host: int) -> None:
    """Two hosts always exchange everything."""
    carried = {}
    for hosts in range(1, 301):
        ranks = hosts * ranks_per_host
        numbers = list(range(ranks))
        layout = [numbers[first : first + ranks_per_host] for first in range(0, ranks, ranks_per_host)]
        carried[hosts] = testing.most_carried_bytes(layout)
        for length in range(1, carried[hosts] + 1) if hosts > 2 else ():
            assert _native.fastest_allreduce(hosts, length) == "direct", (hosts, length)
    assert carried[2] == 1024 // ranks_per_host
    assert min(carried[hosts] for hosts in range(2, 20)) >= 8


@settings(max_examples=200)
@given(st.integers(0, 60), st.integers(1, 20), st.integers(0, 2**32))
def test_pair_allreduce(count: int, segment: int, seed: int) -> None:
    schedules = [testing.pair_allreduce(rank, count, segment) for rank in range(2)]
    buffers: list[list[object]] = [[f"{rank}:{i}" for i in range(count)] for rank in range(2)]
    assert execute(schedules, buffers, seed) == count
    for buffer in buffers:
        assert [sorted(contributions(value)) for value in buffer] == [[f"0:{i}", f"1:{i}"] for i in range(count)]


@settings(max_examples=100)
@given(sizes, st.sampled_from([testing.ring_allreduce, testing.two_step_allreduce, testing.halving_allreduce]))
def test_each_shard_is_finished_exactly_once(case: tuple[int, int, int, int], allreduce: Allreduce) -> None:
    ranks, count, segment, _ = case
    finished = []
    for rank in range(ranks):
        for _, begin, length, _, then in allreduce(rank, ranks, count, segment)[1]:
            if then == "reduce_finish":
                finished += range(begin, begin + length)
    assert sorted(finished) == list(range(count))


@settings(max_examples=200)
@given(st.lists(st.integers(0, 12), min_size=2, max_size=7), st.integers(1, 5), st.integers(0, 2**32))
def test_ring_reduce_scatter(lengths: list[int], segment: int, seed: int) -> None:
    ranks = len(lengths)
    begins = [sum(lengths[:rank]) for rank in range(ranks + 1)]
    buffers: list[list[object]] = [[f"{rank}:{i}" for i in range(begins[-1])] for rank in range(ranks)]
    execute([testing.ring_reduce_scatter(rank, ranks, begins, segment) for rank in range(ranks)], buffers, seed)
    for owner in range(ranks):
        for i in range(begins[owner], begins[owner + 1]):
            assert sorted(contributions(buffers[owner][i])) == sorted(f"{rank}:{i}" for rank in range(ranks))


@settings(max_examples=200)
@given(st.lists(st.integers(0, 12), min_size=2, max_size=7), st.integers(1, 5), st.integers(0, 2**32))
def test_direct_allgather(lengths: list[int], segment: int, seed: int) -> None:
    ranks = len(lengths)
    begins = [sum(lengths[:rank]) for rank in range(ranks + 1)]
    expected: list[object] = [f"{rank}:{i}" for rank in range(ranks) for i in range(lengths[rank])]
    buffers: list[list[object]] = []
    for rank in range(ranks):
        own = range(begins[rank], begins[rank + 1])
        buffers.append([expected[i] if i in own else None for i in range(begins[-1])])
    execute([testing.direct_allgather(rank, ranks, begins, segment) for rank in range(ranks)], buffers, seed)
    assert all(buffer == expected for buffer in buffers)


@settings(max_examples=200)
@given(sizes, st.data())
def test_tree_broadcast(case: tuple[int, int, int, int], data: st.DataObject) -> None:
    ranks, count, segment, seed = case
    root = data.draw(st.integers(0, ranks - 1))
    buffers: list[list[object]] = [[i if rank == root else None for i in range(count)] for rank in range(ranks)]
    schedules = [testing.tree_broadcast(rank, ranks, root, count, segment) for rank in range(ranks)]
    volume = execute(schedules, buffers, seed)
    assert all(buffer == list(range(count)) for buffer in buffers)
    if count > 8 * segment:  # a chain: nobody sends more than the buffer
        assert volume == count


@given(st.integers(1, 1024), st.integers(1, 128), st.integers(2, 64), st.integers(0, 2048))
def test_a_chunk_between_hosts_is_whole_segments(wanted: int, segment: int, pieces: int, more: int) -> None:
    most = wanted + more
    chunk = exchanged_chunk(wanted, segment, pieces, most)
    assert 0 < chunk <= most
    if segment * pieces <= most:
        assert chunk % (segment * pieces) == 0
        assert chunk >= wanted or chunk + segment * pieces > most
    else:
        assert chunk == most  # as near to a segment for each piece as there is room


def test_two_hosts_of_two_ranks_send_two_segments_at_a_time() -> None:
    assert exchanged_chunk(256, 60, 2 * 2, 1024) == 2 * 60 * 4


SLOTS = 8
"""As many chunks have tags of their own."""


@given(st.lists(st.integers(1, 300), min_size=2, max_size=5), st.integers(0, 200))
@example([96, 32, 32], 0)
@example([200, 1, 1], 3)
def test_two_ranks_exchange_each_shard_under_a_tag_of_its_own(host_sizes: list[int], generation: int) -> None:
    first = [sum(host_sizes[:host]) for host in range(len(host_sizes) + 1)]
    hosts = [list(range(begin, end)) for begin, end in pairwise(first)]
    of_chunks = [testing.exchange_tags(hosts, chunk, generation) for chunk in range(2 * SLOTS)]
    assert of_chunks[:SLOTS] == of_chunks[SLOTS:], "a slot has tags of its own"
    for one, other in combinations(of_chunks[:SLOTS], 2):
        assert not set(one) & set(other)
    shards = range(len(of_chunks[0]))
    assert len(shards) == max(host_sizes) or len(shards) > min(host_sizes)  # no rank is idle without need
    for one, other in pairwise(hosts):
        owners = [(one[shard % len(one)], other[shard % len(other)]) for shard in shards]
        used = set(zip(owners, of_chunks[0], strict=True))
        assert len(used) == len(shards)
    assert max(of_chunks[-1]) < min(testing.exchange_tags(hosts, 0, generation + 1)) or generation + 1 >= GENERATIONS
    assert max(of_chunks[-1]) < 2**15
