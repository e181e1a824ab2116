"""How all ranks come to the same commit: they compare what each has, and send what some lack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from horovodish.collectives.functions import barrier, broadcast, broadcast_
from horovodish.collectives.objects import allgather_object
from horovodish.elastic import membership
from horovodish.elastic.copies import Copies
from horovodish.elastic.memory import Position
from horovodish.elastic.snapshots import Held
from horovodish.errors import MismatchError
from horovodish.runtime import basics

__all__ = ["Outcome", "exchange"]

MOST_EXCHANGES = 1 << 20
"""A world has fewer exchanges than this."""
CHUNK_BYTES = 64 << 20
"""How much travels at once. It is small, so that a rank that has the copy already needs little memory."""


class _State(Protocol):
    """The part of a `State` that an exchange needs. `State.sync()` calls `exchange`, so no import may lead back."""

    _number: int
    _copies: Copies
    _claimed: tuple[Position, dict[str, Any]]
    _is_synced: bool
    _is_interrupted: bool

    def _enter_job(self) -> None: ...
    def _has_parts(self) -> bool: ...
    def _held_commit(self) -> Held | None: ...
    def _copy(self, position: Position, *, waits: bool) -> None: ...
    def _copy_held(self) -> None: ...
    def _renumber(self, old: Position | None, new: Position) -> None: ...
    def _put_held_back(self) -> None: ...
    def _load(self, position: Position) -> None: ...
    def _settle(self, claims: list[dict[str, Any]]) -> None: ...


@dataclass
class Outcome:
    """The outcome of an exchange, the same on all ranks.

    Attributes:
        commit: the number of the commit that all ranks have now, of the last state that has one; 0: they begin.
        repeated: how many commits after it some rank had made, or was about to make.
        is_interrupted: whether the ranks have left the last world because of new hosts.
        notes: what each rank has said, by rank.
    """

    commit: int = 0
    repeated: int = 0
    is_interrupted: bool = False
    notes: list[Any] = field(default_factory=list)


class _Offer(NamedTuple):
    """A rank's offer of a state.

    Attributes:
        position: of the newest commit that it has; None if it has none.
        digest: of that commit, where it is held; empty where there is a copy.
        place: of the memory that it shares.
        made: of the last commit that it has made.
        claims: what it knew when it made that commit.
    """

    position: Position | None
    digest: bytes
    place: int
    made: Position
    claims: dict[str, Any]


class _Told(NamedTuple):
    """A rank's message to all others.

    Attributes:
        start: how often the job had started processes before this one.
        worlds: how many worlds these have formed, besides the first one.
        offers: by the number of the state.
        is_interrupted: whether it has left the last world because of new hosts.
        note: what the caller adds.
    """

    start: int
    worlds: int
    offers: dict[int, _Offer]
    is_interrupted: bool
    note: Any


def exchange(states: Sequence[_State], note: Any = None, *, in_recovery: bool = False) -> Outcome:
    """Give every rank the newest commit of each state. Collective; blocks.

    Args:
        states: of this rank.
        note: what the other ranks are to know; can be pickled.
        in_recovery: ranks may bring different states. One that not all bring waits for its next block, where all do.

    Raises:
        MismatchError: the ranks bring different states.
        See `State.sync()`.
    """
    if len(states) > 1:
        for state in states:  # states may have a model in common: what one takes in, another one's held commit loses
            state._copy_held()
    offers = {state._number: _offer_of(state) for state in states}
    is_interrupted = any(state._is_interrupted for state in states)
    told: list[_Told] = allgather_object(
        _Told(membership.start(), membership.worlds(), offers, is_interrupted, note), "elastic.exchange"
    )
    if len(told) < basics.size():
        raise MismatchError(
            f"{basics.size() - len(told)} of {basics.size()} ranks have called join(), and the others begin a block of "
            "hvd.elastic. Remedy: call join() on all ranks before the end of a block"
        )
    outcome = Outcome(is_interrupted=any(each.is_interrupted for each in told), notes=[each.note for each in told])
    world = max((each.start, each.worlds) for each in told)
    if not in_recovery and any(each.offers.keys() != offers.keys() for each in told):
        numbers = [", ".join(str(number + 1) for number in each.offers) for each in told]
        by_rank = "; ".join(f"rank {rank}: {states}" for rank, states in enumerate(numbers))
        raise MismatchError(
            f"the ranks are at different states, numbered in the order that each rank has made them: {by_rank}. Make "
            "the same states in the same order on all ranks, and have all ranks go through the same blocks"
        )
    # In the order of rank 0: the same on all ranks, so that no rank takes part with one state in what is another's.
    of_first = [*told[0].offers]
    of_others = sorted(offers.keys() - told[0].offers.keys())  # they take no part
    order = {number: place for place, number in enumerate([*of_first, *of_others])}
    for state in sorted(states, key=lambda each: order[each._number]):
        of_all = [each.offers.get(state._number) for each in told]
        theirs = [offer for offer in of_all if offer is not None]
        state._is_synced = False
        if len(theirs) == len(told):
            commit, repeated = _agree(state, theirs, world)
            outcome.commit = commit or outcome.commit
            outcome.repeated = 0 if outcome.is_interrupted else repeated
        state._is_interrupted = False
    return outcome


def _offer_of(state: _State) -> _Offer:
    if not state._is_synced:
        state._enter_job()
    held, copied = state._held_commit(), state._copies.newest
    number, claims = state._claimed
    place = state._copies.memory.place
    if held and (copied is None or held.position > copied):
        return _Offer(held.position, held.digest(), place, number, claims)
    return _Offer(copied, b"", place, number, claims)


def _agree(state: _State, offers: list[_Offer], world: tuple[int, int]) -> tuple[int, int]:
    """Give every rank the newest commit of a state. Returns its number, and how many commits are repeated."""
    start, worlds = world
    rank = basics.rank()
    newest = max((offer.position for offer in offers if offer.position), default=None)
    have_it = [offer for offer in offers if newest and offer.position == newest]
    digests = {offer.digest for offer in have_it}
    # Later than all exchanges of earlier worlds, so that a commit known only to lost ranks never counts as newer. A
    # lost rank may have come further in an exchange than the others, and its host keeps the copy that the rank wrote.
    earlier = newest[1] if newest and newest[0] == start else 0
    new = (start, max(earlier, worlds * MOST_EXCHANGES) + 1, newest[2] if newest else 0)
    if len(have_it) == len(offers) and len(digests) == 1 and all(digests):
        state._renumber(newest, new)
        state._put_held_back()
    else:
        # A copy is preferred to what a rank holds, because it need not be made.
        order = [(newest is None or offer.position != newest, bool(offer.digest)) for offer in offers]
        root = order.index(min(order))
        if newest is None and (rank == root or state._has_parts()):
            state._copy(new, waits=True)
        elif rank == root and offers[rank].digest:
            state._copy_held()
        state._renumber(newest, new)
        _distribute(state, offers, root, new)
        state._load(new)
        barrier()  # before a rank of this host copies other commits over this one
    if newest:
        state._settle([offer.claims for offer in offers if offer.made == newest])
    state._is_synced = True
    made = max(offer.made for offer in offers)
    return new[2], max(made[2] - new[2], 0) + 1 if newest and made[0] >= 0 else 0


def _distribute(state: _State, offers: list[_Offer], root: int, position: Position) -> None:
    """See that every rank can load the copy that the root has."""
    rank, copies = basics.rank(), state._copies
    lengths = np.zeros(2, np.int64)
    if rank == root:
        lengths[:] = copies.memory_of(position).lengths(position)
    index_bytes, buffer_bytes = broadcast(lengths, root, "elastic.lengths").tolist()
    # Each host may have its own copy. The copies are equal unless ranks differ in values that they do not reduce.
    are_apart = len({offer.place for offer in offers}) > 1
    digest = copies.digest(position) if are_apart or not copies.has(position) else b"the same"
    digests: list[bytes] = allgather_object(digest, "elastic.digests")
    waiting = [r for r, of_rank in enumerate(digests) if of_rank != digests[root]]
    if not waiting:
        return
    needs_it = rank in waiting
    if needs_it:
        copies.forget(position)
    # One rank of each memory receives, and the ranks that share it read there.
    receives = needs_it and rank == min(r for r in waiting if offers[r].place == offers[rank].place)
    if receives:
        copies.room_for((index_bytes, buffer_bytes))
    places: list[int | None] = allgather_object(copies.memory.place if receives else None, "elastic.places")
    if needs_it and copies.memory.place not in places:  # the rank that was to receive has found no room
        copies.go_private()
        copies.room_for((index_bytes, buffer_bytes))
        receives = True
    source = copies.memory_of(position).content(position) if rank == root else None
    slot, target = copies.memory.room((index_bytes, buffer_bytes)) if receives else (0, None)
    length = len(source) if source is not None else len(target) if target is not None else 0
    length = int(broadcast(np.array(length), root, "elastic.length"))
    for at in range(0, length, CHUNK_BYTES):
        end = min(at + CHUNK_BYTES, length)
        if source is not None:
            broadcast(source[at:end], root, "elastic.state")
        elif target is not None:
            broadcast_(target[at:end], root, "elastic.state")
        else:
            broadcast(np.empty(end - at, np.uint8), root, "elastic.state")
    if receives:
        copies.memory.seal(slot, position)
    barrier()  # the ranks of a host read what one of them has received
