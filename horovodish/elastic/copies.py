"""The copies of a state that this rank sees: in memory that its host shares, and in memory of its own."""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

from horovodish.elastic.memory import Lengths, Memory, Position, Snapshot, checksum
from horovodish.runtime import basics
from horovodish.runtime.process import part

__all__ = ["Copies"]


class _OfRank(weakref.WeakSet["Copies"]):
    """The copies of all states of a rank."""


class Copies:
    """Writes copies, and finds them.

    Where the shared memory has no room, the rank keeps its copies in memory of its own, and says so once. Then new
    processes cannot take them, but this one can. From then on it does so for all states: new processes must not find an
    older copy of one state beside a newer copy of another.

    Args:
        folder: as for `Memory`.
        number: likewise.
    """

    def __init__(self, folder: Path | None, number: int) -> None:
        self._number = number
        self._shared: Memory | None = None
        self._private: Memory | None = None
        self._is_private = False
        if any(other._is_private for other in part(_OfRank)):
            self._keep_own()
        part(_OfRank).add(self)
        if folder is not None:
            try:
                self._shared = Memory(folder, number)
            except OSError as problem:
                self.go_private(problem)

    @property
    def memory(self) -> Memory:
        """Where the next copy goes."""
        if self._private is None and self._shared is None:
            self._private = Memory(None, self._number)
        memory = self._private or self._shared
        assert memory is not None
        return memory

    @property
    def newest(self) -> Position | None:
        """The newest commit that has a complete copy; None if no commit has one."""
        return max((memory.newest for memory in self._memories if memory.newest), default=None)

    def has(self, position: Position) -> bool:
        """Whether there is a copy of this commit."""
        return any(memory.has(position) for memory in self._memories)

    def memory_of(self, position: Position) -> Memory:
        """Where the copy of this commit is."""
        return next(memory for memory in self._memories if memory.has(position))

    def load(self, position: Position) -> tuple[bytes, list[bytearray]]:
        """As `Memory.load()`."""
        return self.memory_of(position).load(position)

    def write(self, position: Position, snapshot: Callable[[], Snapshot], *, waits: bool) -> None:
        """Copy a commit, unless another rank of this host has done so.

        Args:
            position: of the commit.
            snapshot: gives the pickled state.
            waits: if another rank copies now, wait for it, and copy the commit if that was another one.

        Raises:
            RankLostError: a rank was lost, and an operation has left a wrong result.
            Exception: what `snapshot` raises.
        """
        memory = self.memory
        with memory.claimed(waits=waits) as is_mine:
            if not is_mine or (memory.newest is not None and memory.newest >= position):
                return
            began = time.thread_time()
            made = snapshot()
            try:
                slot = memory.write(made)
            except OSError as problem:
                self.go_private(problem)
            else:
                basics.check_settled()
                memory.seal(
                    slot, position, memory.schedule.after(position[2], time.monotonic(), time.thread_time() - began)
                )
                return
        # There was no room. Again, now in private memory, and after the claim of the shared one has ended.
        self.write(position, lambda: made, waits=True)

    def room_for(self, lengths: Lengths) -> None:
        """See that there is room for a copy of these lengths."""
        try:
            self.memory.room(lengths)
        except OSError as problem:
            self.go_private(problem)
            self.memory.room(lengths)

    def digest(self, position: Position) -> bytes:
        """A checksum of the copy of this commit; empty without a copy."""
        return checksum(self.memory_of(position).content(position)) if self.has(position) else b""

    def forget(self, position: Position) -> None:
        """The copy of this commit does not count any more."""
        for memory in self._memories:
            memory.forget(position)

    def renumber(self, old: Position, new: Position) -> None:
        """Give the copy of a commit another position."""
        for memory in self._memories:
            with memory.claimed(waits=True):
                memory.renumber(old, new)

    def go_private(self, problem: OSError | None = None) -> None:
        """Keep copies in memory of this process from now on, of all states."""
        for copies in part(_OfRank):
            copies._keep_own()
        if problem is not None:
            who = f"rank {basics.rank()}" if basics.has_engine() else f"process {os.getpid()}"
            where = "its own memory, where new processes cannot take them"
            warnings.warn(f"{who} keeps copies of the state in {where}: {problem}", RuntimeWarning, stacklevel=2)

    def _keep_own(self) -> None:
        self._is_private = True
        if self._private is None:
            self._private = Memory(None, self._number)

    @property
    def _memories(self) -> list[Memory]:
        return [memory for memory in (self._private, self._shared) if memory is not None]
