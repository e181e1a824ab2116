"""Where a rank keeps its committed state: memory of its host, which the process need not survive.

Two slots take turns, so that one of them is whole at any time. Under a launcher that can start ranks anew they are
files in memory, where the next process finds them; otherwise they are private.
"""

from __future__ import annotations

import itertools
import mmap
import os
import pickle
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

__all__ = ["NOWHERE", "Memory", "Parts", "Position", "Slot", "forget_older", "newest_in"]

Parts = Mapping[str, tuple[bytes, Sequence[pickle.PickleBuffer]]]
"""The pickled parts of a state, by name, with the buffers that were left out of each."""
Position = tuple[int, int, int]
"""How far a state is: the start of the job, the syncs since then, and the engine's operations since the last of them.
The state that is furthest has the greatest one."""
NOWHERE: Position = (-1, 0, 0)
"""Of a state before its first sync: no other process takes it."""

_ALIGNMENT = 64
_HEADER = 7  # words of 64 bits: the number of the seal, 0 until the slot is whole; position; bytes of index and buffers
_HEADER_BYTES = _HEADER * 8
_seals = itertools.count(1)


@dataclass(frozen=True)
class _Index:
    """What is in a slot besides bytes: the pickled parts, and where the buffers of each lie."""

    parts: dict[str, bytes]
    buffers: dict[str, list[tuple[int, int]]]


class Slot:
    """One copy of a state."""

    def __init__(self, path: Path | None = None, data: mmap.mmap | None = None) -> None:
        self._path = path
        self._data = data

    @classmethod
    def of_file(cls, path: Path) -> Slot | None:
        """The slot that a process has left; None where it is not whole."""
        try:
            with path.open("rb") as file:
                slot = cls(path, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError):
            return None
        return slot if slot.position is not None else None

    @property
    def _header(self) -> np.ndarray:
        return np.frombuffer(self._data, np.int64, _HEADER) if self._data else np.zeros(_HEADER, np.int64)

    @property
    def position(self) -> Position | None:
        """How far the state is; None if none is whole."""
        seal, start, syncs, operations, *_ = self._header.tolist()
        return (start, syncs, operations) if seal else None

    @property
    def name(self) -> str:
        """Of its file, which no other slot has on any host; empty if it has none."""
        return self._path.name if self._path else ""

    @property
    def order(self) -> tuple[int, ...]:
        """Greater for a state that is further, or that was written later; empty if none is whole."""
        return (*self.position, int(self._header[0])) if self.position else ()

    def write(self, position: Position, parts: Parts) -> None:
        """Copy a state here."""
        at = 0
        places: dict[str, list[tuple[int, int]]] = {}
        for name, (_, buffers) in parts.items():
            places[name] = []
            for buffer in buffers:
                length = buffer.raw().nbytes
                places[name].append((at, length))
                at += -(-length // _ALIGNMENT) * _ALIGNMENT
        index = pickle.dumps(_Index({name: data for name, (data, _) in parts.items()}, places), 5)
        room = self.room(len(index), at)
        room[: len(index)] = np.frombuffer(index, np.uint8)
        begin = len(room) - at
        for name, (_, buffers) in parts.items():
            for buffer, (offset, length) in zip(buffers, places[name], strict=True):
                if length:
                    room[begin + offset : begin + offset + length] = np.frombuffer(buffer.raw(), np.uint8)
        self.seal(position)

    def room(self, index_bytes: int, buffer_bytes: int) -> np.ndarray:
        """The bytes of a state that is about to be written. Until `seal()` the slot is not whole."""
        length = _HEADER_BYTES + _content_bytes(index_bytes, buffer_bytes)
        if self._data is None or not self._header.flags.writeable or len(self._data) < length:
            self._allocate(length)
        self._header[:] = (0, 0, 0, 0, 0, index_bytes, buffer_bytes)
        return self.content

    def take_over(self, other: Slot) -> None:
        """Become another slot of this host, which nobody writes to. Its file stays under the name of this one, too."""
        assert self._path is not None and other._path is not None
        if self._path != other._path:
            self._path.unlink(missing_ok=True)
            os.link(other._path, self._path)
        self._data = other._data

    def seal(self, position: Position) -> None:
        """What was written is whole."""
        header = self._header
        header[1:4] = position
        header[0] = next(_seals)

    @property
    def lengths(self) -> tuple[int, int]:
        """Bytes of the index and of the buffers."""
        *_, index_bytes, buffer_bytes = self._header.tolist()
        return index_bytes, buffer_bytes

    @property
    def content(self) -> np.ndarray:
        """All bytes of the state, for other ranks."""
        assert self._data is not None
        return np.frombuffer(self._data, np.uint8, _content_bytes(*self.lengths), _HEADER_BYTES)

    def load(self) -> dict[str, object]:
        """The parts by name. They have memory of their own."""
        index_bytes, buffer_bytes = self.lengths
        content = self.content
        index: _Index = pickle.loads(content[:index_bytes].data)
        buffers = content[len(content) - buffer_bytes :]
        return {
            name: pickle.loads(data, buffers=[bytearray(buffers[at : at + size]) for at, size in index.buffers[name]])
            for name, data in index.parts.items()
        }

    def _allocate(self, length: int) -> None:
        if self._path is None:
            self._data = mmap.mmap(-1, length)
            return
        self._data = None  # gives its memory back first
        self._path.unlink(missing_ok=True)  # other ranks may have taken it over
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, length)  # to write where there is no room would kill the process
            self._data = mmap.mmap(descriptor, length)
        except OSError as problem:
            what = (
                f"{problem.strerror}: a state of {length} bytes is kept twice by each rank. Give the folder more room"
            )
            raise OSError(problem.errno, what, str(self._path.parent)) from problem
        finally:
            os.close(descriptor)


class Memory:
    """The two slots of a rank.

    Args:
        folder: in memory, of the job on this host; None if no process would look there.
        start: how often the job had started processes before.
        number: of the state, among those that a process makes.
    """

    def __init__(self, folder: Path | None, start: int, number: int) -> None:
        names = [f"{start}-{number}-{uuid.uuid4().hex}.state" for _ in range(2)]
        self._slots = [Slot(folder / name if folder else None) for name in names]

    @property
    def newest(self) -> Slot | None:
        """The state that was written last; None if there is none."""
        return max((slot for slot in self._slots if slot.position), key=lambda slot: slot.order, default=None)

    @property
    def next(self) -> Slot:
        """Where to write next."""
        return min(self._slots, key=lambda slot: slot.order)


def forget_older(folder: Path | None, start: int, number: int) -> None:
    """Give back what processes of earlier starts have left on this host of a state.

    Args:
        folder: as for `Memory`.
        start: of the processes whose states are kept.
        number: as for `Memory`.
    """
    for path in folder.glob(f"*-{number}-*.state") if folder else ():
        if int(path.name.partition("-")[0]) < start:
            path.unlink(missing_ok=True)


def newest_in(folder: Path | None, number: int) -> Slot | None:
    """The furthest state of this number that the processes of this host have left there; None if there is none."""
    if folder is None:
        return None
    files = folder.glob(f"*-{number}-*.state")
    slots = [slot for file in files if (slot := Slot.of_file(file)) and slot.position != NOWHERE]
    return max(slots, key=lambda slot: slot.order, default=None)


def _content_bytes(index_bytes: int, buffer_bytes: int) -> int:
    return -(-(_HEADER_BYTES + index_bytes) // _ALIGNMENT) * _ALIGNMENT - _HEADER_BYTES + buffer_bytes
