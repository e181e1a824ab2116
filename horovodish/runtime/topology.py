"""Where a rank stands among the ranks and hosts of the world."""

from dataclasses import dataclass

__all__ = ["Topology"]


@dataclass(frozen=True)
class Topology:
    """Where this rank stands. `hosts`: the ranks of every host."""

    rank: int
    hosts: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        return sum(map(len, self.hosts))

    @property
    def host(self) -> int:
        return next(index for index, ranks in enumerate(self.hosts) if self.rank in ranks)

    @property
    def local_ranks(self) -> tuple[int, ...]:
        return self.hosts[self.host]

    @property
    def local_rank(self) -> int:
        return self.local_ranks.index(self.rank)

    @property
    def peers_across(self) -> list[int]:
        """The hosts that have a rank of this rank's local rank."""
        return [index for index, ranks in enumerate(self.hosts) if len(ranks) > self.local_rank]
