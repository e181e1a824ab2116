"""What a training run needs to go on: kept in memory, sent to ranks that lack it, put back."""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from horovodish import basics
from horovodish.collectives import barrier, broadcast, broadcast_
from horovodish.elastic import membership
from horovodish.elastic.memory import NOWHERE, Memory, Position, Slot, forget_older, newest_in
from horovodish.errors import HostsUpdatedInterrupt
from horovodish.objects import allgather_object

__all__ = ["ObjectState", "State"]

_numbers = itertools.count()


class State:
    """What a training run needs to go on, for `elastic.run`. All ranks make the same ones in the same order.

    Its attributes are the state, but for those whose names begin with an underscore. Of an object that has
    `state_dict()` and `load_state_dict()`, such as a sampler, these are used. Everything else is pickled.

    Args:
        attributes: the first attributes. Others can be set later.

    Example:
        >>> state = hvd.elastic.ObjectState(epoch=0, losses=[])
        >>> state.losses.append(0.5)
        >>> state.commit()
    """

    def __init__(self, **attributes: Any) -> None:
        self._reset_callbacks: list[Callable[[], object]] = []
        self._number = next(_numbers)  # by which new processes know it
        self._memory: Memory | None = None
        self._synced: Position | None = None  # what sync() has reached; None before the first one
        self._cut_off: Position | None = None  # how far the live state was when the ranks lost touch
        self._is_interrupted = False  # by new hosts, perhaps at another commit than other ranks
        for name, value in attributes.items():
            setattr(self, name, value)

    def commit(self) -> None:
        """Copy the state to memory of this host, then `check_host_updates()`. Not collective: no message is sent.

        `restore()` goes back to it. So does a job whose ranks were killed all at once, on all hosts but one or on all
        of them: ranks that live on need no commit.

        Raises:
            TypeError: a part of the state cannot be pickled; the message names it.
            HostsUpdatedInterrupt: as `check_host_updates()`.
        """
        self.save()
        self.check_host_updates()

    def save(self) -> None:
        """Copy the state to memory of this host. Not collective.

        Raises:
            TypeError: a part of the state cannot be pickled; the message names it.
        """
        self._kept.next.write(self._position, {name: self._pickled(name) for name in self._names})

    def restore(self) -> None:
        """Go back to the last `commit()`, or to what `sync()` has received since. Without either, do nothing."""
        if slot := self._kept.newest:
            self._load(slot)

    def check_host_updates(self) -> None:
        """Raise if the job has found new hosts. Not collective; takes less than a microsecond.

        Raises:
            HostsUpdatedInterrupt: for `elastic.run`, with which the ranks start again, together with the new ones.
        """
        if membership.hosts_updated():
            self._is_interrupted = True
            raise HostsUpdatedInterrupt("there are new hosts")

    @property
    def is_synced(self) -> bool:
        """Whether all ranks had the same state after the last `init()`."""
        return self._synced is not None and self._cut_off is None

    def sync(self) -> None:
        """Give every rank the state of the one that is furthest. Collective; blocks.

        The first time, that is what earlier processes have left in memory of a host, or else the state of rank 0. When
        all ranks are equally far, nothing is sent.

        Raises:
            TypeError: a part of the state cannot be pickled; on the furthest rank alone, the others lose it.
            See `horovodish.collectives` for what every operation can raise.
        """
        left = newest_in(membership.state_folder(), self._number) if self._synced is None else None
        lives = self._synced is not None
        own = left.position if left else self._position if lives else None
        claims = self._claims() if lives else {}
        told: list[_Told] = allgather_object(
            _Told(own, lives, self._is_interrupted, membership.start(), claims, left.name if left else ""),
            "elastic.positions",
        )
        # What a rank has left is its last commit, and a live state that is equally far may have changed since.
        root = max(range(len(told)), key=lambda rank: (told[rank].position or (), told[rank].lives, -rank))
        furthest = told[root].position
        are_interrupted = any(each.is_interrupted for each in told)
        is_as_far = [each.lives and each.position == furthest for each in told]
        if left and all(each.left == left.name for each in told):
            self._kept.next.take_over(left)  # one host: all ranks see the file
            self._load(left)
            barrier()  # before a rank forgets it
        elif are_interrupted or not all(is_as_far):
            if basics.rank() == root:
                self._send(root, left)
            else:
                self._receive(root, furthest, loads=are_interrupted or not is_as_far[basics.rank()])
        if not are_interrupted:
            self._settle([each.claims for each, as_far in zip(told, is_as_far, strict=True) if as_far])
        starts = [each.start for each in told]
        if self._synced is None and basics.local_rank() == 0:
            forget_older(membership.state_folder(), min(starts), self._number)
        self._synced = (max(starts), furthest[1] + 1 if furthest else 1, basics.completed())
        self._cut_off, self._is_interrupted = None, False

    def on_reset(self) -> None:
        """The ranks have changed: call the callbacks, then `reset()`."""
        for callback in self._reset_callbacks:
            callback()
        self.reset()

    def reset(self) -> None:
        """What a class of states has to do when the ranks have changed: here nothing."""

    def register_reset_callbacks(self, callbacks: list[Callable[[], object]]) -> None:
        """Have functions called whenever the ranks have changed, such as one that adapts the learning rate.

        Args:
            callbacks: called without arguments, in this order, when `size()` and `rank()` are those of the new ranks.
        """
        self._reset_callbacks.extend(callbacks)

    def cut_off(self) -> None:
        """Note how far the state is; `elastic.run` does it when a collective has failed, before the next `init()`."""
        self._cut_off = self._position
        if not self._is_intact():
            newest = self._kept.newest
            self._cut_off = (newest and newest.position) or NOWHERE
            self.restore()

    # What classes for frameworks add to

    def _captured(self, value: Any) -> Any:
        """What to pickle of the value of an attribute."""
        return value.state_dict() if _has_state(value) else value

    def _put_back(self, name: str, captured: Any) -> None:
        """Give an attribute what was captured of it."""
        value: Any = getattr(self, name, None)
        if _has_state(value):
            value.load_state_dict(captured)
        else:
            setattr(self, name, captured)

    def _reduced(self, value: object) -> Any:
        """How to pickle the arrays of a framework, as `__reduce__()` says it; `NotImplemented` for anything else."""
        return NotImplemented

    def _is_intact(self) -> bool:
        """Whether a collective that has failed has left live values. If not, the state goes back to its last commit."""
        return True

    def _claims(self) -> dict[str, Any]:
        """By attribute, what this rank knows that the furthest one may lack, such as the samples that are done."""
        return {}

    def _settle(self, claims: list[dict[str, Any]]) -> None:
        """Take in what the ranks that are furthest know; `claims` is empty where none has gone on."""

    # The rest is the same for all

    @property
    def _names(self) -> list[str]:
        return [name for name in vars(self) if not name.startswith("_")]

    @property
    def _kept(self) -> Memory:
        if self._memory is None:
            self._memory = Memory(membership.state_folder(), membership.start(), self._number)
        return self._memory

    @property
    def _position(self) -> Position:
        if self._cut_off or self._synced is None:
            return self._cut_off or NOWHERE
        start, syncs, before = self._synced
        return start, syncs, basics.completed() - before

    def _pickled(self, name: str) -> tuple[bytes, list[pickle.PickleBuffer]]:
        file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        try:
            _Pickler(file, buffers, self._reduced).dump(self._captured(getattr(self, name)))
        except Exception as problem:
            raise TypeError(
                f"state.{name} cannot be kept: {problem}. Leave it out of the state, or name it _{name}"
            ) from problem
        return file.getvalue(), buffers

    def _send(self, root: int, left: Slot | None) -> None:
        if left:
            self._load(left)
            slot = self._kept.next
            slot.room(*left.lengths)[:] = left.content
            slot.seal(left.position or self._position)
        else:
            self.save()
        kept = self._kept.newest
        assert kept is not None
        broadcast(np.array(kept.lengths), root, "elastic.lengths")
        broadcast_(kept.content, root, "elastic.state")

    def _receive(self, root: int, position: Position | None, *, loads: bool) -> None:
        lengths = broadcast(np.zeros(2, np.int64), root, "elastic.lengths").tolist()
        slot = self._kept.next
        broadcast_(slot.room(*lengths), root, "elastic.state")
        slot.seal(position or self._position)
        if loads:
            self._load(slot)

    def _load(self, slot: Slot) -> None:
        for name, captured in slot.load().items():
            self._put_back(name, captured)


class ObjectState(State):
    """A state of Python objects, as Horovod names it.

    Args:
        bcast_object: not needed; taken because Horovod takes it.
        get_rank: likewise.
        attributes: the first attributes.
    """

    def __init__(self, bcast_object: object = None, get_rank: object = None, **attributes: Any) -> None:
        super().__init__(**attributes)


class _Told(NamedTuple):
    """What a rank tells the others in `sync()`.

    Attributes:
        position: how far its state is; None if it has none.
        lives: whether that is the state of this process, and not one that an earlier process has left.
        is_interrupted: whether ranks that are equally far may have different states.
        start: how often the job had started processes before this one.
        claims: as `State._claims()` gives them.
        left: the name of what an earlier process has left, which is unique among all hosts; empty if there is nothing.
    """

    position: Position | None
    lives: bool
    is_interrupted: bool
    start: int
    claims: dict[str, Any]
    left: str


class _Pickler(pickle.Pickler):
    """Leaves the bytes of arrays where they are."""

    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer], reduced: Callable[[object], Any]) -> None:
        super().__init__(file, 5, buffer_callback=buffers.append)
        self._reduced = reduced

    def reducer_override(self, value: object) -> Any:
        return self._reduced(value)


def _has_state(value: object) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
