"""What the process sets of ranks do with a negotiation, and what every rank must see of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from horovodish._native import testing
from support.negotiation import Decision, Network

FAMILY = "tree"


@dataclass(frozen=True)
class Step:
    """A submission, or a join where the name is empty. `run` counts the runs of the family."""

    name: str = ""
    shape: int = 3
    refuses: bool = False
    family: bool = False
    run: int = 0


@dataclass
class Rank:
    script: list[Step]
    undecided: dict[str, Step] = field(default_factory=dict)
    joined: bool = False
    failed_runs: set[int] = field(default_factory=set)
    ended: int = 0
    lost: bool = False

    def may_go_on(self) -> bool:
        if self.lost or self.joined or not self.script:
            return False
        step = self.script[0]
        return step.name not in self.undecided and not any(
            step.family and other.family and other.run < step.run for other in self.undecided.values()
        )

    def submit_next(self, node: testing.Negotiation) -> None:
        step = self.script.pop(0)
        if not step.name:
            self.joined = True
            node.join()
        elif step.family and step.run in self.failed_runs:  # the engine does not submit what belongs to a failed run
            self.ended += 1
        else:
            self.undecided[step.name] = step
            family = FAMILY if step.family else ""
            node.submit(step.name, [step.shape], family=family, refusal="no" if step.refuses else "")

    def hear(self, decision: Decision) -> None:
        kind, name = decision["type"], decision["name"]
        if kind == "execute" and decision["submitted"]:
            self.end([name])
        elif kind == "execute":
            assert self.joined, f"executes '{name}', which it has neither submitted nor joined"
        elif kind == "fail":
            names = [name] if name in self.undecided else []
            if decision["families"]:
                family = [other for other, step in self.undecided.items() if step.family]
                self.failed_runs.update(self.undecided[other].run for other in family)
                names += [other for other in family if other != name]
            self.end(names)
        elif kind == "join_done":
            assert self.joined
            self.joined = False
        else:
            assert kind == "lost"
            self.lost, self.joined = True, False
            self.end(list(self.undecided))

    def end(self, names: list[str]) -> None:
        for name in names:
            del self.undecided[name]
            self.ended += 1


class Ranks:
    """Ranks that go through their scripts over a network, in any order of submissions and deliveries."""

    def __init__(self, network: Network, scripts: list[list[Step]]) -> None:
        self.network = network
        self.ranks = [Rank(list(script)) for script in scripts]
        self.heard = [0] * network.size
        self.gone: int | None = None

    def act(self) -> bool:
        """One action, drawn at random; false when there is none."""
        network = self.network
        ready = [i for i, rank in enumerate(self.ranks) if i != self.gone and rank.may_go_on()]
        busy = [edge for edge, messages in network.edges.items() if messages and edge[1] != self.gone]
        if not ready and not busy:
            return False
        if ready and (not busy or network.random.random() < 0.5):
            rank = network.random.choice(ready)
            self.ranks[rank].submit_next(network.nodes[rank])
            network.post(rank)
        else:
            network.deliver(*network.random.choice(busy))
        self.hear_all()
        return True

    def hear_all(self) -> None:
        for rank, decisions in enumerate(self.network.decisions):
            for decision in decisions[self.heard[rank] :]:
                self.ranks[rank].hear(decision)
            self.heard[rank] = len(decisions)

    def run(self) -> None:
        while self.act():
            pass

    def lose(self, victim: int) -> None:
        """A rank dies. What it has said arrives; then its neighbours notice."""
        network, self.gone = self.network, victim
        neighbours = [edge for edge in network.edges if edge[0] == victim]
        for sender, receiver in neighbours:
            while network.edges[sender, receiver]:
                network.deliver(sender, receiver)
            if receiver == network.parent(victim):
                network.nodes[receiver].lost(failed=True, finished=0, text="it died")
            else:
                network.nodes[receiver].parent_lost("it died")
            network.post(receiver)
        self.hear_all()

    def check_order(self) -> None:
        """All ranks have seen the same decisions, up to a loss; who contributes does not count as joined."""
        orders = [
            [(d["type"], d["name"], d["text"], d["joined"]) for d in decisions if d["type"] != "lost"]
            for decisions in self.network.decisions
        ]
        longest = max(orders, key=len)
        assert all(order == longest[: len(order)] for order in orders)
        for place in range(min(map(len, orders))):
            if longest[place][0] == "execute":
                submitted = sum(decisions[place]["submitted"] for decisions in self.network.decisions)
                assert submitted + longest[place][3] == self.network.size

    def check_end(self) -> None:
        """Nothing is under way, everything has ended once, and no node remembers what is over."""
        self.check_order()
        for i, (rank, node) in enumerate(zip(self.ranks, self.network.nodes, strict=True)):
            if i != self.gone:
                assert not rank.undecided
                assert not rank.joined
                assert not node.anything_pending()
                assert node.unacknowledged() == 0
