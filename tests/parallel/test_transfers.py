"""Sends and receives between two ranks, on every plane."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

import horovodish as hvd
from horovodish.collectives.array_adapter import ARRAYS
from horovodish.collectives.devices import ON_HOST
from horovodish.collectives.operation import Operation
from horovodish.collectives.submission import Handle, cancel, submit
from horovodish.collectives.transfers import ANY_RANK, receive, send
from support.hosts import Hosts, hosts, run_on_hosts
from support.model import FLOATS, INTEGERS, MOVED, PLANES, values
from support.on_ranks import on_ranks
from support.processes import wait_for_output
from support.ranks import run_ranks

LENGTHS = [0, 1, 3, 17, 1000, 1008, 1009, 4032, 4033, 16_383, 16_384, 100_003]
"""Some are at the limit up to which a message is sent in one piece with its frame."""
LARGE = 300_000
"""Elements of float64 that no channel holds."""


def exchange(mine: Handle[int], theirs: Handle[int], first: int) -> None:
    for handle in (mine, theirs) if hvd.rank() == first else (theirs, mine):
        handle.wait()


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, *MOVED])
@on_ranks(2, planes=PLANES)
def test_all_lengths_of_a_dtype(dtype: str) -> None:
    peer = 1 - hvd.rank()
    for length in LENGTHS:
        sent = values(dtype, length, hvd.rank())
        received = np.zeros_like(sent)
        handles = send(ARRAYS, sent, peer), receive(ARRAYS, received, peer)
        exchange(*handles, first=0)
        assert [handle.wait() for handle in handles] == [peer, peer]
        np.testing.assert_array_equal(received, values(dtype, length, peer))


@on_ranks(2, planes=PLANES)
def test_64_mib_each_way_and_to_one_side() -> None:
    length, peer = 8 << 20, 1 - hvd.rank()
    received = np.empty(length)
    outgoing = send(ARRAYS, np.arange(length, dtype=np.float64) + hvd.rank(), peer)
    assert receive(ARRAYS, received, peer).wait() == peer
    outgoing.wait()
    assert (received == np.arange(length) + peer).all()
    if hvd.rank() == 0:
        send(ARRAYS, received, 1, waits=True).wait()
    else:
        receive(ARRAYS, received, 0, waits=True).wait()
        assert (received == np.arange(length) + 1).all()


@on_ranks(2, planes=PLANES)
def test_a_small_send_needs_no_receive_and_a_large_one_does() -> None:
    if hvd.rank() == 0:
        send(ARRAYS, np.arange(10.0), 1).wait()
        large = send(ARRAYS, np.arange(LARGE, dtype=np.float64), 1)
        assert not large.settles_within(0.2)
        hvd.barrier()
        large.wait()
    else:
        hvd.barrier()
        for length in (10, LARGE):
            received = np.empty(length)
            receive(ARRAYS, received, 0).wait()
            np.testing.assert_array_equal(received, np.arange(length))


@on_ranks(2, planes=PLANES)
def test_tags_may_be_received_in_another_order() -> None:
    for length in (5, LARGE):
        if hvd.rank() == 0:
            sends = [send(ARRAYS, np.full(length, 10.0 * tag + turn), 1, tag) for turn in (0, 1) for tag in (1, 2, 3)]
            for handle in sends:
                handle.wait()
        else:
            received = np.empty(length)
            for tag in (3, 1, 2):
                for turn in (0, 1):
                    receive(ARRAYS, received, 0, tag).wait()
                    assert (received == 10.0 * tag + turn).all()
    hvd.barrier()


@on_ranks(3, 4, planes=PLANES)
def test_any_source() -> None:
    lengths = (3, LARGE)
    if hvd.rank() == 0:
        for length in lengths:
            received = np.empty(length)
            ranks = set()
            for _ in range(1, hvd.size()):
                rank = receive(ARRAYS, received, ANY_RANK, 7).wait()
                assert (received == rank).all()
                ranks.add(rank)
            assert ranks == set(range(1, hvd.size()))
            hvd.barrier()
    else:
        for length in lengths:
            send(ARRAYS, np.full(length, float(hvd.rank())), 0, 7).wait()
            hvd.barrier()


def random_program(seed: int) -> None:
    """Every rank makes the same program and does its part of it in an order of its own."""
    ranks, me = hvd.size(), hvd.rank()
    shared, own = random.Random(seed), random.Random(seed * 100 + me)
    for phase in range(6):
        messages = []
        for number in range(shared.randint(1, 25)):
            source, target = shared.sample(range(ranks), 2)
            length = shared.choice([*LENGTHS, LARGE])
            messages.append((source, target, shared.randint(0, 3), shared.choice(["float32", "int8"]), length, number))
        calls = []
        for source, target, tag, dtype, length, number in messages:
            value = values(dtype, length, number + 50 * phase)
            if source == me:
                calls.append((target, tag, value, None))
            if target == me:
                calls.append((source, tag, np.empty_like(value), value))
        # Of one pair and tag, each rank keeps the order.
        queues: dict[tuple[int, int, bool], list] = {}
        for call in calls:
            queues.setdefault((call[0], call[1], call[3] is None), []).append(call)
        handles = []
        collective = own.randint(0, len(calls))
        for index in range(len(calls) + 1):
            if index == collective:
                total = hvd.allreduce_async(np.full(70_000, float(me)), op=hvd.Sum, name=f"phase {phase}")
            if index == len(calls):
                break
            key = own.choice(sorted(queues))
            rank, tag, tensor, expected = queues[key].pop(0)
            if not queues[key]:
                del queues[key]
            act = send if expected is None else receive
            handles.append((act(ARRAYS, tensor, rank, tag), rank, tensor, expected))
        own.shuffle(handles)
        for handle, rank, tensor, expected in handles:
            assert handle.wait() == rank
            if expected is not None:
                np.testing.assert_array_equal(tensor, expected)
        assert (total.wait() == ranks * (ranks - 1) / 2).all()
    hvd.barrier()  # a rank that ends its part ends the process set


@pytest.mark.parametrize("seed", range(4))
@on_ranks(2, 3, 4, planes=PLANES)
def test_random_programs(seed: int) -> None:
    random_program(seed)


@pytest.fixture(scope="module")
def two_hosts() -> Hosts:
    with hosts(2) as made:
        yield made


def program_on_hosts() -> None:
    hvd.init()
    for seed in range(10, 14):
        random_program(seed)


def test_random_programs_on_two_hosts_of_two(two_hosts: Hosts) -> None:
    run_on_hosts(program_on_hosts, two_hosts, [2, 2])


@on_ranks(2, 3, planes=PLANES)
def test_a_waiting_receive_stops_no_collective_and_the_other_way_round() -> None:
    last = hvd.size() - 1
    received = np.empty(4)
    if hvd.rank() == 0:
        waiting = receive(ARRAYS, received, last)
    assert (hvd.allreduce(np.ones(200_000), op=hvd.Sum) == hvd.size()).all()
    reduced = hvd.allreduce_async(np.ones(3), op=hvd.Sum, name="late") if hvd.rank() == 0 else None
    if hvd.rank() == last:
        send(ARRAYS, np.arange(4.0), 0).wait()
    if hvd.rank() == 0:
        waiting.wait()
        assert received.tolist() == [0, 1, 2, 3]
        assert not reduced.poll()
        send(ARRAYS, received, last, 1).wait()
    if hvd.rank() == last:
        receive(ARRAYS, received, 0, 1).wait()
    if reduced is None:
        reduced = hvd.allreduce_async(np.ones(3), op=hvd.Sum, name="late")
    assert (reduced.wait() == hvd.size()).all()


@pytest.mark.parametrize("length", [6, LARGE])
@on_ranks(2, planes=PLANES)
def test_a_mismatch_is_an_error_on_both_sides(length: int) -> None:
    text = rf"rank 0 sends {length} elements of float64 as 'x', rank 1 receives 2 elements of int32 as 'y', with tag 5"
    if hvd.rank() == 0:
        refused = send(ARRAYS, np.zeros(length), 1, 5, name="x")
        behind = send(ARRAYS, np.arange(3.0), 1, 5)
        told = ""
        try:
            refused.wait()
        except hvd.MismatchError as error:
            told = str(error)
        if told:
            assert re.match(rf"send of 'x' to rank 1 with tag 5 failed on rank 0: {text}", told)
        else:  # it was on its way before the other side called
            assert length < LARGE
            assert wait_for_output(0, f"warning: a message from rank 0 was refused: {text}")
        behind.wait()
        hvd.barrier()
    else:
        target = np.full(2, 9, np.int32)
        with pytest.raises(hvd.MismatchError, match=rf"receive of 'y' from rank 0 with tag 5 failed on rank 1: {text}"):
            receive(ARRAYS, target, 0, 5, name="y").wait()
        assert target.tolist() == [9, 9]
        received = np.empty(3)
        receive(ARRAYS, received, 0, 5).wait()
        assert received.tolist() == [0, 1, 2]
        hvd.barrier()


@on_ranks(2, planes=PLANES)
def test_a_kept_message_that_does_not_fit() -> None:
    if hvd.rank() == 0:
        send(ARRAYS, np.zeros(5), 1, 1).wait()
        send(ARRAYS, np.zeros(1), 1, 2).wait()
        hvd.barrier()
    else:
        receive(ARRAYS, np.empty(1), 0, 2).wait()
        with pytest.raises(hvd.MismatchError, match=r"5 elements of float64, .* 5 elements of float32"):
            receive(ARRAYS, np.empty(5, np.float32), 0, 1).wait()
        hvd.barrier()


@on_ranks(2, planes=PLANES)
def test_calls_that_are_wrong_on_this_rank() -> None:
    for rank, why in ((hvd.rank(), "is this rank itself"), (7, "rank 7 is not in the process set")):
        for act in (send, receive):
            with pytest.raises(hvd.HorovodInternalError, match=why):
                act(ARRAYS, np.zeros(1), rank).wait()
    with pytest.raises(ValueError, match="tag=-1 must be"):
        send(ARRAYS, np.zeros(1), 1 - hvd.rank(), -1)
    with pytest.raises(hvd.UnsupportedTensorError, match="C-contiguous"):
        receive(ARRAYS, np.zeros((4, 4)).T, 1 - hvd.rank())
    on_device = Operation("send", "x", root_rank=1 - hvd.rank())
    members, placement = [(1, 1, 0, (1,))], ON_HOST._replace(device=0)
    with pytest.raises(hvd.HorovodInternalError, match="a send or a receive takes host memory only"):
        submit(on_device, members, None, bool, placement).wait()


@on_ranks(2, planes=PLANES)
def test_a_cancelled_receive_takes_no_message() -> None:
    if hvd.rank() == 0:
        first, second = np.zeros(2), np.zeros(2)
        timed_out = receive(ARRAYS, first, 1)
        assert not timed_out.settles_within(0.05)
        assert cancel(timed_out)
        with pytest.raises(hvd.HorovodInternalError, match=r"receive from rank 1 with tag 0 failed.*it was cancelled"):
            timed_out.wait()
        hvd.barrier()
        receive(ARRAYS, second, 1).wait()
        assert (first.tolist(), second.tolist()) == ([0, 0], [1, 1])
        assert not cancel(timed_out)
    else:
        hvd.barrier()
        send(ARRAYS, np.ones(2), 0).wait()
    reduced = hvd.allreduce_async(np.ones(1), op=hvd.Sum)
    assert not cancel(reduced)
    assert reduced.wait() == 2


@on_ranks(3, planes=PLANES)
def test_process_sets_keep_their_messages_apart() -> None:
    pair = hvd.add_process_set([0, 2])
    if hvd.rank() != 1:
        peer, received, of_all = 2 - hvd.rank(), np.empty(2), np.empty(1)
        send(ARRAYS, np.zeros(1), peer).wait()
        send(ARRAYS, np.ones(2), peer, process_set=pair).wait()
        receive(ARRAYS, received, peer, process_set=pair).wait()
        receive(ARRAYS, of_all, peer).wait()
        assert (received.tolist(), of_all.tolist()) == ([1, 1], [0])
        with pytest.raises(hvd.HorovodInternalError, match="rank 1 is not in the process set"):
            send(ARRAYS, received, 1, process_set=pair).wait()
    hvd.remove_process_set(pair)
    again = hvd.add_process_set([0, 2])
    if hvd.rank() != 1:
        send(ARRAYS, np.full(2, 5.0), 2 - hvd.rank(), process_set=again).wait()
        receive(ARRAYS, received, 2 - hvd.rank(), process_set=again).wait()
        assert received.tolist() == [5, 5]
    hvd.remove_process_set(again)


@on_ranks(2, planes=PLANES)
def test_ranks_that_join() -> None:
    """What was submitted before goes on, and so does what another rank submits."""
    received = np.empty(LARGE)
    if hvd.rank() == 0:
        incoming = receive(ARRAYS, received, 1)
    else:
        outgoing = send(ARRAYS, np.ones(LARGE), 0)
        hvd.join()
        outgoing.wait()
        return
    incoming.wait()
    assert (received == 1).all()
    assert hvd.allreduce(np.ones(1), op=hvd.Sum, name="alone") == 1
    hvd.join()


def end_of_a_sender(plane: str) -> list[float]:
    """The sender shuts down at once; what it has sent arrives."""
    hvd.init()
    received = np.zeros(5)
    if hvd.rank() == 1:
        send(ARRAYS, np.arange(5.0), 0, 3).wait()
        hvd.shutdown()
        print(f"has left {plane}", flush=True)
    else:
        wait_for_output(1, f"has left {plane}")
        receive(ARRAYS, received, 1, 3).wait()
        with pytest.raises(hvd.RankLostError, match="receive from rank 1 with tag 3 failed"):
            receive(ARRAYS, received, 1, 3).wait()
        with pytest.raises(hvd.RankLostError, match="send to rank 1 with tag 3 failed"):
            send(ARRAYS, received, 1, 3).wait()
    return received.tolist()


@pytest.mark.parametrize("plane", PLANES)
def test_what_a_rank_has_sent_before_it_ends(plane: str) -> None:
    results = run_ranks(end_of_a_sender, 2, args=(plane,), env={"HOROVODISH_PLANE": plane})
    assert results[0] == [0, 1, 2, 3, 4]


def end_while_a_receive_waits(plane: str) -> None:
    hvd.init()
    if hvd.rank() == 0:
        waiting = receive(ARRAYS, np.empty(1), 1)
        hvd.shutdown()
        with pytest.raises(hvd.EngineStoppedError, match=r"receive from rank 1 with tag 0 failed.*shutdown\(\)"):
            waiting.wait()
        print(f"has stopped {plane}", flush=True)
    else:
        wait_for_output(0, f"has stopped {plane}")


@pytest.mark.parametrize("plane", PLANES)
def test_shutdown_while_a_receive_waits(plane: str) -> None:
    run_ranks(end_while_a_receive_waits, 2, args=(plane,), env={"HOROVODISH_PLANE": plane})
