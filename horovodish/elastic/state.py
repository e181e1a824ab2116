"""The state of a training run. The rules for the commit that a recovery continues from:

1. After a recovery all ranks have the same bits: the bits of one commit that the script made on one rank.
2. This is the newest commit that still exists: as a copy in a host's memory, or on a rank that has not written to any
   tensor of the state since. Copies are made as often as 1 % of the time allows.
3. On every rank, the state loses everything that the script did after this commit. The script does it again.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovodish.elastic import exchange, membership, snapshots
from horovodish.elastic.copies import Copies
from horovodish.elastic.memory import FREE_COPY_SECONDS, SHARE_OF_TIME, Position, Schedule
from horovodish.elastic.parts import copy_together
from horovodish.errors import HostsUpdatedInterrupt
from horovodish.gradients import windows
from horovodish.runtime import basics
from horovodish.runtime.process import part

__all__ = ["ObjectState", "State"]

UNSYNCED: Position = (-1, 0, 0)
"""The position of a state before its first sync: no other process continues from it."""
WARN_AFTER_SKIPPED = 1000
"""Warn after this many commits in a row within accumulation windows or rounds of `sync=`: a mistake of the script."""


@dataclass
class OfAll:
    """A rank's record of all its states.

    Attributes:
        in_block: the state of the block that runs.
        commits: how many it has made.
        made: how many states it has made.
    """

    in_block: State | None = None
    commits: int = 0
    made: int = 0


class State:
    """The state of a training run, for `elastic.run`. All ranks must make the same states in the same order.

    The state is its attributes, except attributes whose names begin with an underscore. An object with `state_dict()`
    and `load_state_dict()`, such as a sampler, stays the same object, also within lists, dicts and other objects.
    Everything else is a value: it is pickled, and a recovery replaces it with a copy.

    Args:
        attributes: the first attributes. Others can be set later.

    Example:
        >>> state = hvd.elastic.ObjectState(epoch=0, losses=[])
        >>> state.losses.append(0.5)
        >>> state.commit()
    """

    def __init__(self, **attributes: Any) -> None:
        self._reset_callbacks: list[Callable[[], object]] = []
        self._number = part(OfAll).made  # identifies the state to other processes
        part(OfAll).made += 1
        self._copies = Copies(None, self._number)  # until the first sync other processes must not take them
        self._position: Position = UNSYNCED  # of the last commit
        self._is_synced = False
        self._held: list[snapshots.Held] = []  # the newest first
        self._claimed: tuple[Position, dict[str, Any]] = UNSYNCED, {}
        self._is_interrupted = False  # by new hosts
        self._turn = 0  # of its last block: more than of each state that the script has come from
        self._skipped = 0  # commits in a row that were within a window
        self._holding = _Budget()
        self._together = Schedule()  # where each rank has a part; the same on all ranks
        for name, value in attributes.items():
            setattr(self, name, value)

    def commit(self) -> None:
        """Mark a moment that a recovery may go back to, then `check_host_updates()`. Not collective: nothing is sent.

        Call it on all ranks after each step, when the parameters have all steps that the state counts. Most commits
        copy nothing. Within a window of gradient accumulation, or a round of `sync=`, it does nothing, because the
        state already counts samples that have not changed the parameters of all ranks yet.

        Raises:
            RankLostError: a rank was lost, and the script has caught the error. Do not catch it.
            RuntimeError: within the block of another state.
            TypeError: a part of the state cannot be pickled; the message names it.
            HostsUpdatedInterrupt: as `check_host_updates()`.
        """
        self._check_commits()
        if self._commit(copies=membership.hosts_updated() and not self._has_parts()):
            self.check_host_updates()

    def save(self) -> None:
        """Commit and copy the state to memory of this host, however long that takes. Not collective.

        Raises:
            RankLostError: as `commit()`.
            TypeError: likewise.
            RuntimeError: likewise, or within a window of gradient accumulation or a round of `sync=`.
        """
        self._check_commits()
        if not self._commit(copies=True):
            raise RuntimeError(
                "save() was called within a window of gradient accumulation, or a round of sync=: the parameters do "
                "not have all steps that the state counts. Call it after the optimizer's step, or after "
                "optimizer.end_round()"
            )

    def restore(self) -> None:
        """Go back to the last `save()` or `commit()`, or to the state that `sync()` has received since. Not collective.

        Raises:
            RuntimeError: the last `commit()` was not copied. If the script calls `restore()` itself, use `save()`.
        """
        held = self._held_commit()
        if self._copies.has(self._position):
            self._load(self._position)
        elif held and held.position == self._position:
            self._put_held_back()
        elif self._position[2]:
            raise RuntimeError(
                f"commit {self._position[2]} was not copied, because copies would take more than {SHARE_OF_TIME:.0%} "
                "of the time. Where the script itself calls restore(), call save() in place of commit()"
            )

    def check_host_updates(self) -> None:
        """Raise if the job has found new hosts. Not collective; takes less than a microsecond.

        Raises:
            HostsUpdatedInterrupt: handled by `elastic.run`: the ranks start again, together with the new ranks, and
                repeat the work since the last commit.
        """
        if membership.hosts_updated():
            self._is_interrupted = True
            raise HostsUpdatedInterrupt("there are new hosts")

    @property
    def is_synced(self) -> bool:
        """Whether all ranks had the same state after the last `init()`."""
        return self._is_synced

    def sync(self) -> None:
        """Give every rank the newest commit of any rank. Collective; blocks.

        The first time, it is the commit that earlier processes have left in a host's memory, or else rank 0's state.

        Raises:
            TypeError: a part of the state cannot be pickled. If it happens on one rank only, the others lose that rank.
            See `horovodish.collectives` for the errors of every operation.
        """
        exchange.exchange([self])

    def on_reset(self) -> None:
        """The ranks have changed and have the state: call `reset()`, then the callbacks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def reset(self) -> None:
        """Called when the ranks have changed, for subclasses to override. Here it does nothing."""

    def register_reset_callbacks(self, callbacks: list[Callable[[], object]]) -> None:
        """Register functions to call whenever the ranks have changed, for example to adapt the learning rate.

        Args:
            callbacks: called without arguments, in this order, after `size()` and `rank()` have their new values and
                the state has gone back to the commit that the ranks continue from.
        """
        self._reset_callbacks.extend(callbacks)

    # What classes for frameworks add to

    def _keeps(self, value: object) -> bool:
        """Whether a value is an object that stays the same object when the state goes back."""
        return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")

    def _kept_of(self, value: Any) -> Any:
        """The content to save of such an object."""
        return value.state_dict()

    def _give_back(self, value: Any, kept: Any) -> None:
        """Give such an object what was kept of it."""
        value.load_state_dict(kept)

    def _reduced(self, value: object) -> Any:
        """How to pickle the arrays of a framework, as `__reduce__()` says it; `NotImplemented` for anything else."""
        return NotImplemented

    def _reference_to(self, value: object) -> snapshots.Reference | None:
        """A reference to a tensor whose later writes can be detected; None for anything else."""
        return None

    def _bytes_of(self, value: Any) -> np.ndarray:
        """The bytes of such a tensor, in one dimension."""
        raise TypeError(type(value).__name__)

    def _moment(self) -> Any:
        """Now, if there are writes that tokens do not tell."""

    def _is_unchanged(self, held: snapshots.Held) -> bool:
        """Whether no tensor was written to since a commit that is held."""
        return True

    def _finish(self) -> None:
        """Wait until the values of the state are computed. Raises as `basics.check_settled()`."""
        basics.check_settled()

    def _committed(self) -> None:
        """Note the values that belong to this rank alone, at a commit."""

    def _let_go(self) -> None:
        """The ranks have begun again, perhaps after the middle of a step: let go of what was under way."""

    def _has_open_window(self) -> bool:
        """Whether gradients were accumulated that have not had their effect yet."""
        return windows.any_open()

    def _has_parts(self) -> bool:
        """Whether other ranks have parts of the state, so that all ranks copy it together."""
        return False

    def _has_lost_parts(self) -> bool:
        """Whether lost ranks had parts of the state that are not copied yet."""
        return False

    def _gather_parts(self, roots: Sequence[int]) -> None:
        """Give these ranks the parts of all, until the next call. Collective; blocks."""

    def _still_held(self, held: list[snapshots.Held]) -> list[snapshots.Held]:
        """The earlier commits that are worth holding beside a new one."""
        return []

    def _claims(self) -> dict[str, Any]:
        """By attribute, what this rank knows and others may not at the same commit, such as which samples are done."""
        return {}

    def _settle(self, claims: list[dict[str, Any]]) -> None:
        """Take in what the ranks knew that had made the commit."""

    # The rest is the same for all

    @property
    def _live(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    @property
    def _saved(self) -> dict[str, Any]:
        """What a commit holds."""
        return {**self._live, "_turn": self._turn}

    def _objects(self, kind: type) -> list[Any]:
        """The objects of a class that stay the same, wherever they are in the state."""
        return [each for each in snapshots.objects_in(self, self._live) if isinstance(each, kind)]

    def _check_commits(self) -> None:
        if part(OfAll).in_block not in (None, self):
            raise RuntimeError(
                "a state was committed in the block of another one. A recovery would not take both back to the same "
                "step: put all values that change in a step into one state"
            )
        basics.check_no_loss()

    def _commit(self, *, copies: bool) -> bool:
        """Whether it counts."""
        if self._has_open_window():
            self._skipped += 1
            if self._skipped == WARN_AFTER_SKIPPED:
                warnings.warn(
                    f"{WARN_AFTER_SKIPPED} calls of commit() in a row were within a window of gradient accumulation, "
                    "or a round of sync=, where nothing can be committed. Call it after the optimizer's step, or after "
                    "optimizer.end_round()",
                    RuntimeWarning,
                    stacklevel=3,
                )
            return False
        self._skipped = 0
        start, worlds, last = self._position
        position = start, worlds, last + 1
        self._held = self._still_held(self._held)
        if self._has_parts():
            if copies or self._together.is_due(last + 1):
                self._copy(position, waits=True)
        elif copies or self._copies.memory.schedule.is_due(last + 1):
            self._copy(position, waits=copies)
        elif self._holding.allows():
            with self._holding.spent():
                self._hold(position)
        self._committed()
        self._position, self._claimed = position, (position, self._claims())
        part(OfAll).commits += 1
        return True

    def _copy(self, position: Position, *, waits: bool) -> None:
        """Copy the live state. Collective where each rank has a part of it."""
        self._finish()
        if self._has_parts():
            self._together = copy_together(self, position, self._together)
        else:
            self._write(position, waits=waits)

    def _write(self, position: Position, *, waits: bool) -> None:
        self._copies.write(position, lambda: snapshots.pickled(self, self._saved), waits=waits)

    def _hold(self, position: Position) -> None:
        """Remember where the live state lies."""
        self._held.insert(0, snapshots.Held(self, position, self._saved))

    def _held_commit(self) -> snapshots.Held | None:
        """The newest commit that can still be made out of the tensors that it has left where they were."""
        intact = (each for each in self._held if basics.came_to_its_end(each.launched) and self._is_unchanged(each))
        return next(intact, None)

    def _copy_held(self) -> None:
        """Copy the commit that is held, if any."""
        if held := self._held_commit():
            self._copies.write(held.position, held.copied, waits=True)

    def _enter_job(self) -> None:
        """From now on copies are for other processes, too."""
        if self._position[0] < 0:
            self._copies = Copies(membership.state_folder(), self._number)
            self._position, self._held = UNSYNCED, []

    def _renumber(self, old: Position | None, new: Position) -> None:
        """The ranks agree that a commit has another position; None: there was none."""
        self._position, self._together = new, Schedule()
        if old is not None:
            self._copies.renumber(old, new)
            for held in self._held:
                held.position = new if held.position == old else held.position

    def _put_held_back(self) -> None:
        """Go back to the commit that is held."""
        held = self._held_commit()
        assert held is not None
        self._become(held.given_back(self._saved))
        self._held = []
        self._hold(held.position)

    def _load(self, position: Position) -> None:
        """Go back to a commit that has a copy."""
        self._become(snapshots.given_back(self, self._saved, *self._copies.load(position)))
        self._held = []

    def _become(self, attributes: dict[str, Any]) -> None:
        for name in self._live.keys() - attributes:
            delattr(self, name)
        for name, value in attributes.items():
            setattr(self, name, value)


class ObjectState(State):
    """A state of Python objects, as Horovod names it.

    Args:
        bcast_object: not needed; taken because Horovod takes it.
        get_rank: likewise.
        attributes: the first attributes.
    """

    def __init__(self, bcast_object: object = None, get_rank: object = None, **attributes: Any) -> None:
        super().__init__(**attributes)


def assign(what: str, variables: Sequence[Any], values: Sequence[Any], remedy: str) -> None:
    """Give variables their saved values.

    Args:
        what: has the variables, for the message.
        variables: with a method `assign`.
        values: in the same order.
        remedy: what to do if the numbers of variables and values differ.

    Raises:
        ValueError: the numbers differ.
    """
    if len(variables) != len(values):
        raise ValueError(
            f"{what} has {len(variables)} variables where {len(values)} values are to be put back; {remedy}"
        )
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


class _Budget:
    """Lets something be done as long as it takes no more than its share of the time."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._saved = self._cost = 0.0

    def allows(self) -> bool:
        """Whether there is time for it once more."""
        now = time.monotonic()
        # At most twice the cost is saved up, so that no burst of holding follows a long pause.
        self._saved = min(self._saved + SHARE_OF_TIME * (now - self._since), 2 * self._cost)
        self._since = now
        return self._cost <= max(self._saved, FREE_COPY_SECONDS / 4)

    @contextlib.contextmanager
    def spent(self) -> Iterator[None]:
        """The block that does it."""
        began = time.thread_time()
        yield
        self._cost = time.thread_time() - began
        self._saved -= self._cost
