"""The negotiation as a pure state machine: the tests play the network between the nodes of a tree of ranks."""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from horovodish._native import testing
from support.negotiation import Network, submits, told


def joins(node: testing.Negotiation) -> None:
    node.join()


def submits_at(seconds: float, name: str) -> Any:
    def submit(node: testing.Negotiation) -> None:
        node.set_now(seconds)
        node.submit(name, [3])

    return submit


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
    # 8 edges, 50 tensors: two bytes each way, and upwards who was last, when, and when the first one was.
    assert costs[1] == costs[2] == 50 * 8 * (2 * 2 + 2 + 2 * 8)


@settings(max_examples=200)
@given(trees, st.data())
def test_values_ride_where_every_rank_states_the_id(tree: tuple[int, int, int], data: st.DataObject) -> None:
    """In the order of the tree. A rank that has joined has none, and a statement in full carries none."""
    network = Network(*tree)
    steps = data.draw(st.integers(2, 4))
    joined = data.draw(st.sets(st.integers(1, 11), max_size=3)) & set(range(network.size))
    for step in range(steps):
        network.run([[submits("x", values=bytes([rank, step]))] for rank in range(network.size)])
    active = [rank for rank in range(network.size) if rank not in joined]
    network.run(
        [[joins] if rank in joined else [submits("x", values=bytes([rank, 9]))] for rank in range(network.size)]
    )
    order = network.subtree(0)
    expected = [b"", *(b"".join(bytes([rank, step]) for rank in order) for step in range(1, steps))]
    expected.append(b"".join(bytes([rank, 9]) for rank in order if rank in active))
    for decisions in network.decisions:
        assert [decision["values"] for decision in decisions] == expected


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
        assert all(part in text for part in ("shape", "(3,)", "(4,)"))
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
                    network.nodes[rank].submit(name, shape, family="tree")
                network.post(rank)
            elif not network.deliver_one() and not ready:
                return


@settings(max_examples=300)
@given(trees, st.integers(0, 9), st.data())
def test_what_is_left_of_a_family_that_failed_meets_nothing(
    tree: tuple[int, int, int], cache_capacity: int, data: st.DataObject
) -> None:
    """Each rank has operations of its own, and the ranks disagree about one; then all ranks have all of them."""
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
    """A rank calls outside of a function, and the others call the same inside: this rank does not call again."""
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
        assert all(decision["submitted"] for decision in decisions[1:])


@settings(max_examples=100)
@given(trees, st.booleans())
def test_a_join_may_complete_what_fails(tree: tuple[int, int, int], broadcasts: bool) -> None:
    """All ranks but the first disagree about both operations, or want them from the rank that has joined."""
    size, arity, seed = tree
    network = Network(max(size, 3), arity, seed)

    def submits_of_tree(name: str, rank: int) -> Any:
        shape, root = ([3], 0) if broadcasts else ([3 + rank], None)

        def submit(node: testing.Negotiation) -> None:
            if not network.decisions[rank]:  # the engine does not submit what belongs to a failed run
                node.submit(name, shape, broadcast_from=root, family="tree")

        return submit

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
    assert all(node.cached() == node.full_requests() == 3 for node in network.nodes)


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
    assert network.bytes_sent - before == 20 * 2 * (2 * 2 + 2 + 2 * 8)


@settings(max_examples=100)
@given(trees, st.data())
def test_shapes_that_alternate_go_by_id_and_disagree(tree: tuple[int, int, int], data: st.DataObject) -> None:
    network = Network(*tree)
    size = network.size
    for shape in ([3], [4]):
        network.run([[submits("x", shape)]] * size)
    shapes = [data.draw(st.sampled_from([[3], [4], [5]])) for _ in range(size)]
    network.run([[submits("x", shape), submits("y")] for shape in shapes])
    outcome = "execute" if shapes == shapes[:1] * size else "fail"
    for decisions in network.decisions:
        assert set(told(decisions[2:])) == {(outcome, "x"), ("execute", "y")}
    before = [node.full_requests() for node in network.nodes]
    for shape in ([3], [4], [3]):
        network.run([[submits("x", shape)]] * size)
    assert [node.full_requests() for node in network.nodes] == before
    assert all(told(decisions)[-3:] == [("execute", "x")] * 3 for decisions in network.decisions)


def test_a_name_with_ever_new_shapes_leaves_room_for_others() -> None:
    network = Network(size=3, arity=2, seed=5, cache_capacity=30)
    for step in range(100):
        network.run([[submits("x", [step])]] * 3)
    assert all(node.cached() == 16 for node in network.nodes)
    requests = []
    for _ in range(4):
        network.run([[submits("x", [1000])]] * 3)
        requests.append(network.nodes[1].full_requests())
    assert requests == [101, 102, 103, 103]  # one that comes again takes the place of one that does not


@settings(max_examples=200)
@given(trees, st.booleans())
def test_the_root_knows_who_was_last_and_by_how_much(tree: tuple[int, int, int], cached: bool) -> None:
    """In every order of the ranks' statements at the root."""
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


def test_notes_reach_the_root_and_those_to_all_have_one_place_among_the_decisions() -> None:
    root = testing.Negotiation(root=True, participants=[[0], [1, 2]], cache_capacity=16)
    middle = testing.Negotiation(root=False, participants=[[1], [2]], cache_capacity=16)
    leaf = testing.Negotiation(root=False, participants=[[2]], cache_capacity=16)
    nodes = [root, middle, leaf]
    leaf.note_to_root("from below")
    for name in ("a", "b"):
        for node in nodes:
            node.submit(name, [1])
    root.note_to_root("from the root")
    middle.from_child(1, leaf.take_for_parent())
    root.note_to_all("first")
    root.from_child(1, middle.take_for_parent())
    root.note_to_all("last")
    middle.from_parent(root.take_for_children())
    leaf.from_parent(middle.take_for_children())
    at_root, *below = ([(d["type"], d["name"] or d["text"]) for d in node.take_decisions()] for node in nodes)
    to_root = [("note", "from the root"), ("note", "from below")]
    assert [each for each in at_root if each in to_root] == to_root
    order = [("note", "first"), ("execute", "a"), ("execute", "b"), ("note", "last")]
    assert [each for each in at_root if each not in to_root] == order
    assert below == [order, order]


def test_a_tensor_that_leaves_the_cache_while_the_ranks_disagree_ends_once() -> None:
    """Rank 1 has stated x by its id, which the root forgets; the others disagree about x before rank 1 hears of it."""
    network = Network(size=3, arity=2, seed=0, cache_capacity=1)
    root, first, second = network.nodes
    for name in "xyy":
        network.run([[submits(name)]] * 3)
    submits("x", [4])(root)
    network.post(0)
    submits("x")(first)
    network.post(1)
    network.deliver(1, 0)
    for rank, node in enumerate(network.nodes):
        submits("y")(node)
        network.post(rank)
    network.deliver(1, 0)
    network.deliver(2, 0)  # y is decided and takes the place of x
    network.deliver(0, 2)
    submits("x")(second)
    network.post(2)
    network.deliver(2, 0)  # x fails
    network.drain()
    for rank in (0, 2):
        submits("x")(network.nodes[rank])
        network.post(rank)
    network.drain()
    assert told(network.decisions[1])[3:] == [("execute", "y"), ("fail", "x")]
    submits("x")(first)
    network.post(1)
    network.drain()
    for decisions in network.decisions:
        assert told(decisions)[3:] == [("execute", "y"), ("fail", "x"), ("execute", "x")]
        assert all(decision["submitted"] for decision in decisions if decision["type"] == "execute")


def test_a_tensor_that_leaves_the_cache_counts_for_a_rank_that_has_stated_it_and_joined() -> None:
    network = Network(size=3, arity=2, seed=0, cache_capacity=1)
    for name in "xyy":
        network.run([[submits(name)]] * 3)
    for call in (submits("x"), submits("y"), joins):
        call(network.nodes[1])
        network.post(1)
    for rank in (0, 2):
        submits("y")(network.nodes[rank])
        network.post(rank)
    for sender in (1, 1, 1, 2):  # y is decided and takes the place of x
        network.deliver(sender, 0)
    for rank in (0, 2):
        submits("x")(network.nodes[rank])
        network.post(rank)
    network.deliver(2, 0)
    network.drain()
    for decisions in network.decisions:
        assert told(decisions)[3:] == [("execute", "y"), ("execute", "x")]
        assert all(decision["joined"] == 0 and decision["submitted"] for decision in decisions)
