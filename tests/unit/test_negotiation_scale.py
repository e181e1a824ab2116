"""What the negotiation costs rank 0 in worlds of any size, over the tree that the engine uses."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from horovodish import _native
from horovodish._native import testing

NAMES = [f"a/rather/long/name/of/layer{i:02}.weight" for i in range(30)]
KNOWN_BYTES = 5
"""At most that many bytes say on an edge that a run of tensors whose ids are known is ready, or decided."""
SPAN_BYTES = 19
"""And that many, when a message upwards says so, who was last and when."""


def hosts_of(ranks: int, per_host: int) -> list[list[int]]:
    return [list(range(first, min(first + per_host, ranks))) for first in range(0, ranks, per_host)]


@dataclass
class Cost:
    """What rank 0 receives and sends in a step."""

    messages: int = 0
    bytes: int = 0


@dataclass
class World:
    """Ranks that look at their messages in turns, from the leaves to the root and back."""

    hosts: list[list[int]]
    cache_capacity: int = 1000
    nodes: list[testing.Negotiation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.places = [testing.tree_node(self.hosts, rank) for host in self.hosts for rank in host]
        for rank, (_, children) in enumerate(self.places):
            participants = [[rank], *(testing.subtree(self.hosts, child) for child in children)]
            self.nodes.append(testing.Negotiation(rank == 0, participants, self.cache_capacity))

    def step(self, orders: list[list[str]]) -> Cost:
        """Every rank submits its list of names; returns once all are decided everywhere."""
        for node, names in zip(self.nodes, orders, strict=True):
            for name in names:
                node.submit(name, [3])
        cost, decided = Cost(), [0] * len(self.nodes)
        while min(decided) < len(orders[0]):
            for rank in reversed(range(1, len(self.nodes))):
                self.tell_parent(rank, cost)
            for rank, node in enumerate(self.nodes):
                self.tell_children(rank, cost)
                decided[rank] += sum(decision["type"] == "execute" for decision in node.take_decisions())
        assert decided == [len(orders[0])] * len(self.nodes)
        return cost

    def tell_parent(self, rank: int, cost: Cost) -> None:
        parent = self.places[rank][0]
        assert parent is not None
        if message := self.nodes[rank].take_for_parent():
            self.nodes[parent].from_child(self.places[parent][1].index(rank) + 1, message)
            self.count(parent, message, cost)

    def tell_children(self, rank: int, cost: Cost) -> None:
        if message := self.nodes[rank].take_for_children():
            for child in self.places[rank][1]:
                self.nodes[child].from_parent(message)
                self.count(rank, message, cost)

    @staticmethod
    def count(rank: int, message: bytes, cost: Cost) -> None:
        if rank == 0:
            cost.messages += 1
            cost.bytes += len(message)


def costs(world: World, steps: int) -> list[Cost]:
    return [world.step([NAMES] * len(world.nodes)) for _ in range(steps)]


@pytest.mark.parametrize(("ranks", "per_host"), [(1, 1), (9, 9), (10, 10), (600, 600), (7, 3), (100, 1), (600, 8)])
def test_the_tree_holds_every_rank_once_and_no_rank_has_many_children(ranks: int, per_host: int) -> None:
    hosts = hosts_of(ranks, per_host)
    assert sorted(testing.subtree(hosts, 0)) == list(range(ranks))
    for rank in range(ranks):
        parent, children = testing.tree_node(hosts, rank)
        assert len(children) <= 2 * _native.TREE_ARITY
        assert all(testing.tree_node(hosts, child)[0] == rank for child in children)
        assert (parent is None) == (rank == 0)
        # Between hosts only their first ranks speak.
        if parent is not None and rank // per_host != parent // per_host:
            assert rank % per_host == parent % per_host == 0


@pytest.mark.parametrize("per_host", [8, 512])
def test_rank_0_does_not_work_more_for_512_ranks_than_for_64(per_host: int) -> None:
    steady = {}
    for ranks in (64, 512):
        first, *later = costs(World(hosts_of(ranks, min(per_host, ranks))), 3)
        steady[ranks] = later[0]
        assert later[0] == later[1]
        assert later[0].messages <= first.messages <= 2 * 2 * _native.TREE_ARITY
        assert later[0].bytes <= later[0].messages * KNOWN_BYTES + later[0].messages / 2 * SPAN_BYTES
    fewer_hosts = 1 if per_host == 8 else 0  # 64 ranks are 8 hosts, of which 7 are below the first
    assert steady[512].messages == steady[64].messages + 2 * fewer_hosts


def test_tensors_in_any_order_take_a_few_bytes_each() -> None:
    world = World(hosts_of(20, 4))
    costs(world, 1)
    orders = [random.Random(rank).sample(NAMES, len(NAMES)) for rank in range(20)]
    cost = world.step(orders)
    assert cost.bytes <= 3 * len(NAMES) * cost.messages


@pytest.mark.parametrize("capacity", [29, 15, 3, 1, 0])
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_cache_that_is_too_small_is_never_worse_than_none(capacity: int, shuffled: bool) -> None:
    """What it holds is negotiated by id in every step, the rest in full; nothing is replaced in turn."""
    in_full = costs(World(hosts_of(20, 4), 0), 1)[0].bytes
    world = World(hosts_of(20, 4), capacity)
    first = costs(world, 1)[0]
    order = random.Random(7)
    for _ in range(6):
        before = [node.full_requests() for node in world.nodes]
        cost = world.step([order.sample(NAMES, len(NAMES)) if shuffled else NAMES] * 20)
        in_this_step = [node.full_requests() - count for node, count in zip(world.nodes, before, strict=True)]
        assert in_this_step == [len(NAMES) - capacity] * 20
        assert cost.messages == first.messages
        missing = (len(NAMES) - capacity) / len(NAMES)
        assert cost.bytes <= in_full * missing + capacity * 3 * cost.messages


def test_a_cache_that_is_full_of_what_nobody_uses_takes_up_another_model() -> None:
    world = World(hosts_of(4, 4), 20)
    costs(world, 3)
    others = [name.replace("layer", "head") for name in NAMES[:20]]
    requests = []
    for _ in range(5):
        world.step([others] * 4)
        requests.append(world.nodes[0].full_requests())
    assert requests[4] - requests[3] == 0
