"""The negotiation as a pure state machine: the tests play the network between the nodes of a tree of ranks."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from horovodish._native import testing

Decision = dict[str, Any]

LATER_SECONDS = 5000.0
"""When messages arrive; statements are made before."""


class Network:
    """A tree of ranks whose messages arrive in order on each edge, and after any delay."""

    def __init__(self, size: int, arity: int, seed: int, cache_capacity: int = 100) -> None:
        self.size = size
        self.random = random.Random(seed)
        self.children = [
            [c for c in range(rank * arity + 1, rank * arity + arity + 1) if c < size] for rank in range(size)
        ]
        self.nodes = [
            testing.Negotiation(rank == 0, [[rank], *map(self.subtree, self.children[rank])], cache_capacity)
            for rank in range(size)
        ]
        self.edges: dict[tuple[int, int], deque[bytes]] = {}
        for rank, below in enumerate(self.children):
            for child in below:
                self.edges[rank, child] = deque()
                self.edges[child, rank] = deque()
        self.decisions: list[list[Decision]] = [[] for _ in range(size)]
        self.bytes_sent = 0

    def subtree(self, rank: int) -> list[int]:
        return [rank, *(below for child in self.children[rank] for below in self.subtree(child))]

    def parent(self, rank: int) -> int | None:
        return next((above for above, below in enumerate(self.children) if rank in below), None)

    def post(self, rank: int) -> None:
        """Puts what a node wants to say on its edges and keeps what it has decided."""
        node, parent = self.nodes[rank], self.parent(rank)
        up, down = node.take_for_parent(), node.take_for_children()
        if parent is not None:
            self.send(rank, parent, up)
        for child in self.children[rank]:
            self.send(rank, child, down)
        self.decisions[rank] += node.take_decisions()

    def send(self, sender: int, receiver: int, message: bytes) -> None:
        if message:
            self.edges[sender, receiver].append(message)
            self.bytes_sent += len(message)

    def deliver_one(self) -> bool:
        busy = [edge for edge, messages in self.edges.items() if messages]
        if not busy:
            return False
        sender, receiver = edge = self.random.choice(busy)
        message = self.edges[edge].popleft()
        self.nodes[receiver].set_now(LATER_SECONDS)
        if sender == self.parent(receiver):
            self.nodes[receiver].from_parent(message)
        else:
            self.nodes[receiver].from_child(self.children[receiver].index(sender) + 1, message)
        self.post(receiver)
        return True

    def run(self, programs: list[list[Any]]) -> None:
        """Runs one list of statements per rank: `call(node)` each, interleaved with the deliveries at random."""
        left = [deque(program) for program in programs]
        while True:
            ready = [rank for rank in range(self.size) if left[rank]]
            if ready and (self.random.random() < 0.5 or not any(self.edges.values())):
                rank = self.random.choice(ready)
                left[rank].popleft()(self.nodes[rank])
                self.post(rank)
            elif not self.deliver_one() and not ready:
                return

    def drain(self) -> None:
        while self.deliver_one():
            pass


def submits(name: str, shape: list[int] | None = None, absent: list[int] | None = None, members: int = 1) -> Any:
    return lambda node: node.submit(name, shape or [3], absent or [], members)


def joins(node: testing.Negotiation) -> None:
    node.join()


def submits_at(seconds: float, name: str) -> Any:
    def submit(node: testing.Negotiation) -> None:
        node.set_now(seconds)
        node.submit(name, [3])

    return submit


def flushes(node: testing.Negotiation) -> None:
    node.flush()


def told(decisions: list[Decision]) -> list[tuple[str, str]]:
    return [(decision["type"], decision["name"]) for decision in decisions]


trees = st.tuples(st.integers(1, 12), st.integers(1, 4), st.integers(0, 2**32))


@settings(max_examples=300)
@given(trees, st.integers(1, 8), st.integers(1, 4), st.integers(0, 9))
def test_every_rank_executes_everything_once_in_one_order(
    tree: tuple[int, int, int], names: int, steps: int, cache_capacity: int
) -> None:
    """Also with a cache that is too small, or none: then everything is negotiated in full, and nothing is lost."""
    size, arity, seed = tree
    network = Network(size, arity, seed, cache_capacity)
    expected = sorted(str(name) for name in range(names))
    for step in range(steps):
        programs = []
        for _ in range(size):
            order = expected.copy()
            network.random.shuffle(order)
            programs.append([submits(name) for name in order])
        network.run(programs)
        order = [name for _, name in told(network.decisions[0])][step * names :]
        assert sorted(order) == expected
        assert all(told(decisions) == told(network.decisions[0]) for decisions in network.decisions)
    assert all(decision["joined"] == 0 and decision["submitted"] for decision in network.decisions[-1])
    assert all(node.cached() == min(names, cache_capacity) for node in network.nodes)


def test_the_second_time_a_tensor_takes_a_few_bytes() -> None:
    network = Network(size=9, arity=3, seed=1)
    names = [f"a/rather/long/name/of/layer{i}.weight" for i in range(50)]
    costs = []
    for _ in range(3):
        before = network.bytes_sent
        network.run([[submits(name) for name in names]] * 9)
        costs.append(network.bytes_sent - before)
    assert costs[0] > 9 * 50 * 60
    # 8 edges, 50 tensors: two bytes each way and a time upwards, above a subtree also who was last, and by how much.
    assert costs[1] == costs[2] == 50 * (8 * (2 * 2 + 9) + 2 * (1 + 8))


@settings(max_examples=200)
@given(trees, st.data())
def test_every_rank_hears_of_a_mismatch_and_goes_on(tree: tuple[int, int, int], data: st.DataObject) -> None:
    size, arity, seed = tree
    network = Network(max(size, 2), arity, seed)
    size = network.size
    deviant = data.draw(st.integers(0, size - 1))
    cached = data.draw(st.booleans())
    if cached:
        network.run([[submits("x")]] * size)
    network.decisions = [[] for _ in range(size)]
    network.run([[submits("x", [4] if rank == deviant else [3]), submits("y")] for rank in range(size)])
    for decisions in network.decisions:
        assert sorted(told(decisions)) == [("execute", "y"), ("fail", "x")]
        text = next(decision["text"] for decision in decisions if decision["type"] == "fail")
        assert all(part in text for part in ("'x'", "shape", "(3,)", "(4,)"))
        assert f"rank {deviant} has (4,)" in text
    network.decisions = [[] for _ in range(size)]
    network.run([[submits("x")]] * size)
    assert all(told(decisions) == [("execute", "x")] for decisions in network.decisions)


class Attempts:
    """Runs a family of operations until it does not fail, on ranks that go on at once when they hear that it failed."""

    def __init__(
        self, network: Network, attempts: list[list[dict[str, list[int]]]], alone: frozenset[int] = frozenset()
    ) -> None:
        """`attempts`: for each one the shapes by name, of every rank. `alone`: ranks for which "d" is of no family."""
        self.network = network
        self.alone = alone
        self.left = [
            deque(
                (attempt, name, shape) for attempt, ranks in enumerate(attempts) for name, shape in ranks[rank].items()
            )
            for rank in range(network.size)
        ]

    def failures(self, rank: int) -> int:
        return sum(decision["families"] == ["tree"] for decision in self.network.decisions[rank])

    def may_go_on(self, rank: int) -> bool:
        return bool(self.left[rank]) and self.left[rank][0][0] <= self.failures(rank)

    def run(self) -> None:
        network = self.network
        while True:
            ready = list(filter(self.may_go_on, range(network.size)))
            if ready and (network.random.random() < 0.5 or not any(network.edges.values())):
                rank = network.random.choice(ready)
                attempt, name, shape = self.left[rank].popleft()
                if name == "d" and rank in self.alone:
                    network.nodes[rank].submit(name, shape)
                elif attempt == self.failures(rank):  # the engine does not submit what belongs to a failed run
                    network.nodes[rank].submit(name, shape, family="tree", attempt=attempt)
                network.post(rank)
            elif not network.deliver_one() and not ready:
                return


@settings(max_examples=300)
@given(trees, st.integers(0, 9), st.data())
def test_what_is_left_of_a_family_that_failed_meets_nothing(
    tree: tuple[int, int, int], cache_capacity: int, data: st.DataObject
) -> None:
    """Every rank has other operations, one of which they disagree about; then all have all of them."""
    size, arity, seed = tree
    network = Network(max(size, 2), arity, seed, cache_capacity)
    names = ["a", "b", "c", "d"]
    whole = [{name: [3] for name in names}] * network.size
    if data.draw(st.booleans()):
        Attempts(network, [whole]).run()  # so that their ids are known
        network.decisions = [[] for _ in range(network.size)]
    deviant = data.draw(st.integers(0, network.size - 1))
    parts = []
    for rank in range(network.size):
        chosen = data.draw(st.sets(st.sampled_from(names))) | {"b"}
        shape_of_b = [4] if rank == deviant else [3]
        order = data.draw(st.permutations(sorted(chosen)))
        parts.append({name: shape_of_b if name == "b" else [3] for name in order})
    attempts = Attempts(network, [parts, whole])
    attempts.run()
    assert not any(attempts.left)
    for decisions in network.decisions:
        assert told(decisions) == told(network.decisions[0])
        failed = next(place for place, decision in enumerate(decisions) if decision["type"] == "fail")
        assert decisions[failed]["name"] == "b"
        again = decisions[failed + 1 :]
        assert sorted(told(again)) == [("execute", name) for name in names]
        assert all(decision["submitted"] for decision in decisions[:failed] + again)


@settings(max_examples=200)
@given(trees, st.data())
def test_what_is_of_no_family_on_some_ranks_stays(tree: tuple[int, int, int], data: st.DataObject) -> None:
    """As where a rank calls outside of the function in which others call the same: it does not do it again."""
    size, arity, seed = tree
    network = Network(max(size, 3), arity, seed)
    deviant = data.draw(st.integers(0, network.size - 1))
    alone = frozenset(data.draw(st.sets(st.integers(0, network.size - 1)))) - {deviant}
    first = [{"b": [4]} if rank == deviant else {"d": [3], "b": [3]} for rank in range(network.size)]
    second = [{"b": [3]} if rank in alone else {"b": [3], "d": [3]} for rank in range(network.size)]
    Attempts(network, [first, second], alone).run()
    for decisions in network.decisions:
        assert told(decisions)[0] == ("fail", "b")
        assert sorted(told(decisions)[1:]) == [("execute", "b"), ("execute", "d")]
        assert all(decision["submitted"] for decision in decisions)


@settings(max_examples=100)
@given(trees, st.booleans())
def test_a_join_may_complete_what_fails(tree: tuple[int, int, int], broadcasts: bool) -> None:
    """All ranks but the first disagree about both operations, or want them from the rank that has joined."""
    size, arity, seed = tree
    network = Network(max(size, 3), arity, seed)

    def submits_of_tree(name: str, rank: int) -> Any:
        shape, root = ([3], 0) if broadcasts else ([3 + rank], None)
        return lambda node: node.submit(name, shape, broadcast_from=root, family="tree")

    network.run([[joins]] + [[submits_of_tree(name, rank) for name in "ab"] for rank in range(1, network.size)])
    for decisions in network.decisions:
        assert [decision["type"] for decision in decisions] == ["fail"]
        assert decisions[0]["families"] == ["tree"]


@settings(max_examples=100)
@given(trees)
def test_a_shape_that_changes_everywhere_is_no_mismatch(tree: tuple[int, int, int]) -> None:
    size, arity, seed = tree
    network = Network(size, arity, seed)
    for shape in ([3], [4], [4], [3]):
        network.run([[submits("x", shape), submits("y")]] * size)
    assert all(sorted(told(d)) == [("execute", "x")] * 4 + [("execute", "y")] * 4 for d in network.decisions)
    assert all(node.cached() == 2 for node in network.nodes)


@settings(max_examples=100)
@given(st.integers(1, 9), st.integers(1, 3), st.integers(0, 2**32), st.data())
def test_absent_means_absent_on_every_rank(size: int, arity: int, seed: int, data: st.DataObject) -> None:
    network = Network(size, arity, seed)
    absent = [data.draw(st.sets(st.integers(0, 10))) for _ in range(size)]
    expected = sorted(set.intersection(*absent))
    for _ in range(2):  # in full, then by id
        network.run([[submits("bucket", absent=sorted(absent[rank]), members=11)] for rank in range(size)])
    for decisions in network.decisions:
        assert [decision["absent"] for decision in decisions] == [expected, expected]


@settings(max_examples=200)
@given(st.integers(2, 9), st.integers(1, 3), st.integers(0, 2**32), st.data())
def test_joined_ranks_count_as_having_submitted(size: int, arity: int, seed: int, data: st.DataObject) -> None:
    """Rank r submits its first `lengths[r]` of the names and joins; the others go on without it."""
    network = Network(size, arity, seed)
    lengths = [data.draw(st.integers(0, 4)) for _ in range(size)]
    if data.draw(st.booleans()):  # with ids for all names
        network.run([[submits(str(i)) for i in range(4)]] * size)
        network.decisions = [[] for _ in range(size)]
    for step in range(5):  # a rank that trains waits for each step
        network.run(
            [
                [submits(str(step))] if step < lengths[rank] else [joins] if step == lengths[rank] else []
                for rank in range(size)
            ]
        )
    steps = max(lengths)
    for rank, decisions in enumerate(network.decisions):
        assert told(decisions) == [("execute", str(i)) for i in range(steps)] + [("join_done", "")]
        for i, decision in enumerate(decisions[:-1]):
            assert decision["joined"] == sum(length <= i for length in lengths)
            assert decision["submitted"] == (lengths[rank] > i)
        assert lengths[decisions[-1]["rank"]] == steps
    network.decisions = [[] for _ in range(size)]
    network.run([[submits("afterwards")]] * size)
    assert all(told(d) == [("execute", "afterwards")] and d[0]["joined"] == 0 for d in network.decisions)


@settings(max_examples=100)
@given(st.integers(2, 9), st.integers(1, 3), st.integers(0, 2**32), st.data())
def test_after_a_lost_rank_nothing_is_decided(size: int, arity: int, seed: int, data: st.DataObject) -> None:
    network = Network(size, arity, seed)
    victim = data.draw(st.integers(1, size - 1))
    witness = network.parent(victim)
    assert witness is not None
    network.run([[submits("before")]] * size)
    network.run([[] if rank == victim else [submits("pending")] for rank in range(size)])
    network.nodes[witness].lost(failed=True, finished=0, text=f"rank {victim} has died")
    network.post(witness)
    network.drain()
    network.run([[] if rank == victim else [submits("later")] for rank in range(size)])
    for rank, decisions in enumerate(network.decisions):
        if rank != victim:
            assert told(decisions) == [("execute", "before"), ("lost", "")]
            assert all(f"rank {victim}" in decision["text"] for decision in decisions[1:])


def test_of_several_lost_ranks_the_one_that_had_finished_least_counts() -> None:
    network = Network(size=4, arity=2, seed=1)
    for failed, finished in ((False, 7), (False, 8), (False, 5), (True, 6)):
        network.nodes[0].lost(failed, finished, f"{finished} finished")
        network.post(0)
    network.drain()
    for decisions in network.decisions:
        assert [(decision["number"], decision["text"]) for decision in decisions] == [
            (7, "7 finished"),
            (5, "5 finished"),
            (5, "6 finished"),
        ]


def test_ranks_that_wait_for_each_other_are_noticed() -> None:
    network = Network(size=5, arity=2, seed=3)
    network.run([[submits("a" if rank < 2 else "b"), flushes] for rank in range(5)])
    assert [told(decisions) for decisions in network.decisions] == [[("stuck", "")], [], [], [], []]
    text = network.decisions[0][0]["text"]
    assert "'a' was submitted by" in text
    assert "'b' was submitted by" in text
    # It was a warning: when the rest arrives, all goes on.
    network.decisions = [[] for _ in range(5)]
    network.run([[submits("b" if rank < 2 else "a")] for rank in range(5)])
    assert all(sorted(told(decisions)) == [("execute", "a"), ("execute", "b")] for decisions in network.decisions)


@settings(max_examples=100)
@given(trees)
def test_waiting_for_the_same_tensor_is_not_stuck(tree: tuple[int, int, int]) -> None:
    size, arity, seed = tree
    network = Network(size, arity, seed)
    for _ in range(3):
        network.run([[submits("x"), flushes]] * size)
    assert all(told(decisions) == [("execute", "x")] * 3 for decisions in network.decisions)


def test_what_is_used_stays_in_a_cache_that_is_too_small() -> None:
    """40 tensors and room for 30: 30 of them keep their ids instead of all being replaced in turn."""
    network = Network(size=3, arity=2, seed=5, cache_capacity=30)
    costs = []
    for _ in range(4):
        before = network.bytes_sent
        network.run([[submits(f"a/rather/long/name/of/layer{i}.weight") for i in range(40)]] * 3)
        costs.append(network.bytes_sent - before)
    assert costs[1] == costs[2] == costs[3] < costs[0] * 0.4
    # Another model takes over: what nobody uses any more leaves.
    for _ in range(20):
        network.run([[submits(f"b/rather/long/name/of/layer{i}.weight") for i in range(20)]] * 3)
    before = network.bytes_sent
    network.run([[submits(f"b/rather/long/name/of/layer{i}.weight") for i in range(20)]] * 3)
    assert network.bytes_sent - before < 20 * 3 * (4 + 8)


@settings(max_examples=200)
@given(trees, st.booleans())
def test_the_root_knows_who_was_last_and_by_how_much(tree: tuple[int, int, int], cached: bool) -> None:
    """Whatever the order in which the statements of the ranks reach the root."""
    size, arity, seed = tree
    network = Network(size, arity, seed)
    if cached:
        network.run([[submits("x")]] * size)
    before = network.nodes[0].lateness()
    times = network.random.sample(range(1000), size)
    network.run([[submits_at(time, "x")] for time in map(float, times)])
    last, late = times.index(max(times)), max(times) - min(times)
    counted, total, longest = before.get(last, (0, 0.0, 0.0))
    assert network.nodes[0].lateness() == {**before, last: (counted + 1, total + late, max(longest, late))}
    assert all(not node.lateness() for node in network.nodes[1:])


def test_a_clock_that_is_ahead_makes_nobody_late_in_the_future() -> None:
    root = testing.Negotiation(True, [[0], [1, 2]], 10)
    below = testing.Negotiation(False, [[1], [2]], 10)
    leaf = testing.Negotiation(False, [[2]], 10)
    for node, time in ((below, 5000.0), (leaf, 5002.0), (root, 10.5)):
        node.set_now(time)
        node.submit("x", [3])
    below.set_now(5002.5)
    below.from_child(1, leaf.take_for_parent())
    root.set_now(12.0)
    root.from_child(1, below.take_for_parent())
    assert root.lateness() == {2: (1, 2.0, 2.0)}


def test_a_turn_has_its_place_among_the_decisions_of_all_ranks() -> None:
    """Of another process set, asked for by a rank below: the order in which GPUs launch."""
    root = testing.Negotiation(root=True, participants=[[0], [1]], cache_capacity=16)
    below = testing.Negotiation(root=False, participants=[[1]], cache_capacity=16)
    for name in ("a", "b"):
        below.submit(name, [1])
        below.ask_turn(5, 40 + len(name))
        root.submit(name, [1])
    root.ask_turn(6, 7)
    root.from_child(1, below.take_for_parent())
    below.from_parent(root.take_for_children())
    orders = [[(d["type"], d["name"], d["rank"], d["number"]) for d in n.take_decisions()] for n in (root, below)]
    assert orders[0] == orders[1]
    assert [kind for kind, *_ in orders[0]].count("execute") == 2
    assert [(rank, number) for kind, _, rank, number in orders[0] if kind == "turn"] == [(6, 7), (5, 41), (5, 41)]
