"""What a recovery may continue from, and what it must: a model of the rule in docs/elastic.md.

A commit is known by what its state held. No other commit of the state ever held the same, because each step mixes the
number of the world into the state. Commits of a later world are newer.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from simulation.programs import Wrong
from simulation.ranks import Rank
from simulation.world import World


class Commit(NamedTuple):
    """A commit. Of two, the greater one is the newer one.

    Attributes:
        world: in which it was made, or from which ranks have gone on from it last.
        step: how many steps of the state it counts.
    """

    world: int
    step: int


class Content(NamedTuple):
    """What a state holds.

    Attributes:
        step: how many steps it counts.
        trail: the steps, each with its world.
    """

    step: int
    trail: Hashable


class Promises:
    """The commits that there are, and who has them. A state is known by its number.

    Args:
        world: whose ranks commit.
        copies_are_free: whether each commit is copied at once.
        are_held: whether ranks go back to commits that are not copied.
    """

    def __init__(self, world: World, *, copies_are_free: bool, are_held: bool):
        self._world = world
        self._copies_are_free, self._are_held = copies_are_free, are_held
        self._contents: dict[int, dict[Content, Commit]] = {}
        self._of_ranks: dict[tuple[int, int], Commit] = {}  # by id and state: held
        self._of_hosts: dict[tuple[int, int], Commit] = {}  # by host and state: copied
        self._begun: dict[tuple[int, int], Content] = {}  # by world and state
        self._in: dict[tuple[int, int], int] = {}  # the world in which a rank was in a state last
        self.without_room: set[int] = set()  # hosts

    def will_commit(self, state: int, content: Content) -> None:
        """The rank that runs is about to commit."""
        contents = self._contents.setdefault(state, {})
        contents[content] = max(contents.get(content, Commit(0, 0)), Commit(self._world.acting().world, content.step))

    def has_committed(self, state: int, content: Content, *, copies: bool = False) -> None:
        """It has.

        Args:
            state: its number.
            content: as the script knows it.
            copies: whether the commit is copied whatever that costs.
        """
        self.will_commit(state, content)
        rank = self._world.acting()
        commit = Commit(rank.world, content.step)
        if self._are_held:
            self._keep(self._of_ranks, rank.id, state, commit)
        if (copies or self._copies_are_free) and rank.host not in self.without_room:
            self._keep(self._of_hosts, rank.host, state, commit)

    def writes(self) -> None:
        """An optimizer of the rank that runs takes a step, so the rank holds no commit any more."""
        self.dies(self._world.acting())

    def begins(self, state: int, content: Content, first: Content) -> None:
        """The rank that runs begins a function or block.

        Args:
            state: its number.
            content: with what.
            first: what the state holds before any commit.

        Raises:
            Wrong: with this it must not begin.
        """
        rank = self._world.acting()
        if self._in.get((rank.id, state)) == rank.world:
            return
        self._in[rank.id, state] = rank.world
        others = self._begun.setdefault((rank.world, state), content)
        if others != content:
            raise Wrong(f"rank {rank.id} begins with {content}, another one with {others}")
        contents = self._contents.setdefault(state, {})
        promised = self._newest(rank, state)
        found = contents.get(content)
        if found is None and (promised or content != first):
            raise Wrong(f"rank {rank.id} begins with {content}, which no rank has committed")
        if promised and found and found < promised:
            raise Wrong(f"rank {rank.id} begins with {found} of state {state}, though there is {promised}")
        commit = contents[content] = Commit(rank.world, content.step)
        if self._are_held:
            self._of_ranks[rank.id, state] = commit
        if self._of_hosts.get((rank.host, state)) == found is not None:
            self._of_hosts[rank.host, state] = commit

    def leaves(self, rank: Rank) -> None:
        """A rank leaves to the host what it holds, and ends."""
        for (who, state), commit in list(self._of_ranks.items()):
            if who == rank.id and rank.host not in self.without_room:
                self._keep(self._of_hosts, rank.host, state, commit)

    def dies(self, rank: Rank) -> None:
        """What a rank held is gone."""
        self._of_ranks = {key: commit for key, commit in self._of_ranks.items() if key[0] != rank.id}

    def forgets(self, host: int) -> None:
        """The memory of a host is gone."""
        self._of_hosts = {key: commit for key, commit in self._of_hosts.items() if key[0] != host}
        self.without_room.discard(host)

    def _newest(self, rank: Rank, state: int) -> Commit | None:
        """What ranks of this world and their hosts have."""
        members = [self._world.ranks[each] for each in rank.members]
        found = [self._of_ranks.get((each.id, state)) for each in members]
        found += [self._of_hosts.get((each.host, state)) for each in members]
        return max((each for each in found if each), default=None)

    @staticmethod
    def _keep(where: dict[tuple[int, int], Commit], who: int, state: int, commit: Commit) -> None:
        where[who, state] = max(where.get((who, state), commit), commit)
