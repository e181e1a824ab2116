"""A tree of negotiations without an engine: the tests play the network between the ranks."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

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
        if busy:
            self.deliver(*self.random.choice(busy))
        return bool(busy)

    def deliver(self, sender: int, receiver: int) -> None:
        """The oldest message of an edge."""
        message = self.edges[sender, receiver].popleft()
        self.nodes[receiver].set_now(LATER_SECONDS)
        if sender == self.parent(receiver):
            self.nodes[receiver].from_parent(message)
        else:
            self.nodes[receiver].from_child(self.children[receiver].index(sender) + 1, message)
        self.post(receiver)

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


def submits(
    name: str, shape: list[int] | None = None, absent: list[int] | None = None, members: int = 1, values: bytes = b""
) -> Any:
    return lambda node: node.submit(name, shape or [3], absent or [], members, values=values)


def told(decisions: list[Decision]) -> list[tuple[str, str]]:
    return [(decision["type"], decision["name"]) for decision in decisions]
