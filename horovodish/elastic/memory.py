"""Where copies of a state are kept: memory of a host that its ranks share, and that outlives them.

A state has two slots that take turns, so one of them is whole at any time. One rank of a host writes a copy; the others
find it there. Under a launcher that can start ranks anew the slots are files in memory:

    NUMBER.index    the header of both slots, and when the last copy was made
    NUMBER.0, .1    the bytes of a slot

Without such a launcher they are private memory of the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import pickle
import secrets
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

__all__ = ["FREE_COPY_SECONDS", "Lengths", "Memory", "Position", "Schedule", "Snapshot", "checksum"]

Snapshot = tuple[bytes, Sequence[pickle.PickleBuffer]]
"""A pickled state, and the buffers that were left out of it."""
Position = tuple[int, int, int]
"""Which commit a copy holds: how often the job had started processes, a number that grows with each world and each
exchange since, and the number of the commit. The newest one is the greatest."""
Lengths = tuple[int, int]
"""Bytes of a copy's index and of its buffers."""

SHARE_OF_TIME = 0.01
"""Copies take at most this share of the time."""
FREE_COPY_SECONDS = 200e-6
"""A copy that takes no longer than this is made at every commit."""
LONGEST_PERIOD = 1 << 20
"""In commits, so that one measurement that was far off does not end the copies."""

_ALIGNMENT = 64
_CHECKSUM_WIDTH = 509  # words in a row; a prime, so that words a power of two apart are in different columns
_CHECKSUM_BLOCK = 128  # rows, of 509 KiB
# Words of 64 bits of the index: for each slot whether it is whole, the position and the lengths; then the schedule.
_SLOT_WORDS = 6
_SCHEDULE_AT = 2 * _SLOT_WORDS
_ID_AT = _SCHEDULE_AT + 3
_INDEX_BYTES = (_ID_AT + 1) * 8


@dataclass(frozen=True)
class Schedule:
    """When copies are made.

    A copy is made at every commit whose number is a multiple of the period. Periods are powers of two, so that hosts
    with other periods copy at the same commits, and the others wait for them once.

    Attributes:
        period: in commits; 0 before the first copy.
        commit: the number of the commit that was copied last.
        copied_at: when that was, by the clock `time.monotonic()` of this host.
    """

    period: int = 0
    commit: int = 0
    copied_at: float = 0.0

    def is_due(self, commit: int) -> bool:
        """Return whether the commit of this number is to be copied."""
        return self.period == 0 or commit % self.period == 0

    def after(self, commit: int, now: float, took: float) -> Schedule:
        """Return the schedule after a copy.

        Args:
            commit: the number of the commit that was copied.
            now: by the clock `time.monotonic()`.
            took: seconds of the processor that the copy took.
        """
        apart, period = max(now - self.copied_at, 1e-9), 1
        if self.period and took > FREE_COPY_SECONDS:
            commits = max(commit - self.commit, 1)
            wanted = took / SHARE_OF_TIME * commits / apart
            while period < min(wanted, LONGEST_PERIOD):
                period *= 2
        return Schedule(period, commit, now)


class Memory:
    """The two slots of a state.

    Args:
        folder: in memory, of the job on this host; None if no other process would look there.
        number: of the state, among those that a process makes.

    Attributes:
        place: a number of this memory; ranks that share it have the same one.

    Raises:
        OSError: the folder has no room, or it holds a file of another user.
    """

    def __init__(self, folder: Path | None, number: int) -> None:
        self._base = folder / str(number) if folder else None
        self._data: list[mmap.mmap | None] = [None, None]
        self._descriptor: int | None = None
        if self._base:
            self._descriptor = _opened(self._path("index"), os.O_RDWR | os.O_CREAT)
            try:
                _reserve(self._descriptor, _INDEX_BYTES, self._path("index"))
                self._index_data = mmap.mmap(self._descriptor, _INDEX_BYTES)
            except OSError:
                self.close()
                raise
        else:
            self._index_data = mmap.mmap(-1, _INDEX_BYTES)
        self._index = np.frombuffer(self._index_data, np.int64)
        with self.claimed(waits=True):
            if not self._index[_ID_AT]:
                self._index[_ID_AT] = secrets.randbits(62) + 1
        self.place = int(self._index[_ID_AT])

    def close(self) -> None:
        """Give the descriptor back."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # then modules may be gone, and the system closes files
            self.close()

    @property
    def newest(self) -> Position | None:
        """The newest commit that has a complete copy; None if no commit has one."""
        return max((found for found in map(self._position, (0, 1)) if found), default=None)

    def has(self, position: Position) -> bool:
        """Whether there is a whole copy of this commit."""
        return position in (self._position(0), self._position(1))

    @property
    def schedule(self) -> Schedule:
        """When copies are made."""
        period, commit, copied_at = self._index[_SCHEDULE_AT:_ID_AT].tolist()
        return Schedule(period, commit, copied_at * 1e-9)

    @contextlib.contextmanager
    def claimed(self, *, waits: bool) -> Iterator[bool]:
        """A context that keeps other ranks of this host from writing; gives False if another one writes now.

        Args:
            waits: wait for the other one instead.
        """
        if self._descriptor is None:
            yield True
            return
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def write(self, snapshot: Snapshot) -> int:
        """Copy a state to the slot whose turn it is. Until `seal()` its copy is not whole. Returns the slot.

        Raises:
            OSError: there is no room.
        """
        data, buffers = snapshot
        sizes = [buffer.raw().nbytes for buffer in buffers]
        index = pickle.dumps((data, sizes), 5)
        slot, room = self.room((len(index), sum(map(_aligned, sizes))))
        room[: len(index)] = np.frombuffer(index, np.uint8)
        at = _aligned(len(index))
        for buffer, size in zip(buffers, sizes, strict=True):
            if size:
                room[at : at + size] = np.frombuffer(buffer.raw(), np.uint8)
            at += _aligned(size)
        return slot

    def room(self, lengths: Lengths) -> tuple[int, np.ndarray]:
        """The slot whose turn it is, and its bytes, for a copy of these lengths. It is not whole until `seal()`.

        Raises:
            OSError: there is no room.
        """
        slot = min((0, 1), key=lambda each: self._position(each) or (-1, 0, 0))
        length = _content_bytes(lengths)
        self._header(slot)[0] = 0
        data = self._data[slot]
        if data is None or len(data) < length:
            self._data[slot] = None  # gives its memory back first
            data = self._data[slot] = self._allocated(slot, length)
        self._header(slot)[4:] = lengths
        return slot, np.frombuffer(data, np.uint8, length)

    def seal(self, slot: int, position: Position, schedule: Schedule | None = None) -> None:
        """Mark a slot as complete: it holds this commit."""
        if schedule:
            self._index[_SCHEDULE_AT:_ID_AT] = schedule.period, schedule.commit, round(schedule.copied_at * 1e9)
        header = self._header(slot)
        header[1:4] = position
        header[0] = 1  # last, so that a slot does not count if this process is killed before

    def renumber(self, old: Position, new: Position) -> None:
        """Give the copy of a commit another position."""
        for slot in (0, 1):
            if self._position(slot) == old:
                self._header(slot)[1:4] = new

    def lengths(self, position: Position) -> Lengths:
        """Bytes of the copy of a commit."""
        _, _, _, _, index_bytes, buffer_bytes = self._header(self._slot_of(position)).tolist()
        return index_bytes, buffer_bytes

    def content(self, position: Position) -> np.ndarray:
        """All bytes of the copy of a commit, for other ranks; not writeable.

        Raises:
            OSError: the file is gone, or belongs to another user.
        """
        slot, length = self._slot_of(position), _content_bytes(self.lengths(position))
        data = self._data[slot]
        if self._base and (data is None or len(data) < length):
            descriptor = _opened(self._path(slot), os.O_RDONLY)
            try:
                data = mmap.mmap(descriptor, length, access=mmap.ACCESS_READ)
            finally:
                os.close(descriptor)
        assert data is not None
        content = np.frombuffer(data, np.uint8, length)
        content.flags.writeable = False
        return content

    def load(self, position: Position) -> tuple[bytes, list[bytearray]]:
        """The pickled state of the copy of a commit, with buffers of its own."""
        index_bytes, _ = self.lengths(position)
        content = self.content(position)
        data, sizes = pickle.loads(content[:index_bytes].tobytes())
        buffers, at = [], _aligned(index_bytes)
        for size in sizes:
            buffers.append(bytearray(content[at : at + size]))
            at += _aligned(size)
        return data, buffers

    def forget(self, position: Position) -> None:
        """The copy of this commit does not count any more."""
        for slot in (0, 1):
            if self._position(slot) == position:
                self._header(slot)[0] = 0

    def _header(self, slot: int) -> np.ndarray:
        return self._index[slot * _SLOT_WORDS : (slot + 1) * _SLOT_WORDS]

    def _position(self, slot: int) -> Position | None:
        is_whole, start, worlds, commit, *_ = self._header(slot).tolist()
        return (start, worlds, commit) if is_whole else None

    def _slot_of(self, position: Position) -> int:
        return next(slot for slot in (0, 1) if self._position(slot) == position)

    def _path(self, end: int | str) -> Path:
        assert self._base is not None
        return self._base.with_name(f"{self._base.name}.{end}")

    def _allocated(self, slot: int, length: int) -> mmap.mmap:
        if self._base is None:
            return mmap.mmap(-1, max(length, 1))
        descriptor = _opened(self._path(slot), os.O_RDWR | os.O_CREAT)
        try:
            _reserve(descriptor, length, self._path(slot))
            return mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)


def _opened(path: Path, flags: int) -> int:
    """A file of this user alone.

    Raises:
        OSError: it cannot be opened, or somebody else owns it or may write to it.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        os.close(descriptor)
        raise PermissionError(
            f"{path} belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}, and this job's files "
            "must belong to its own user: remove it, and find out who has made it"
        )
    return descriptor


def _reserve(descriptor: int, length: int, path: Path) -> None:
    try:
        # To write where there is no room would kill the process.
        os.posix_fallocate(descriptor, 0, max(length, 1))
    except OSError as problem:
        what = (
            f"{problem.strerror}: a host keeps two copies of a state, of {length} bytes each. Give the folder more room"
        )
        raise OSError(problem.errno, what, str(path.parent)) from problem


def _content_bytes(lengths: Lengths) -> int:
    index_bytes, buffer_bytes = lengths
    return _aligned(index_bytes) + buffer_bytes


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def checksum(data: np.ndarray) -> bytes:
    """A checksum of bytes that sees where each word is: weighted sums of the columns and rows of a table of words.

    Each row and each column has an odd number as its weight, so that words that change places change the sums.
    """
    words = len(data) // 8
    table = data[: words // _CHECKSUM_WIDTH * _CHECKSUM_WIDTH * 8].view(np.uint64).reshape(-1, _CHECKSUM_WIDTH)
    rest = data[table.nbytes :].tobytes()
    weights = _weights(max(len(table), _CHECKSUM_WIDTH))
    of_columns, of_rows = np.zeros(_CHECKSUM_WIDTH, np.uint64), np.zeros(len(table), np.uint64)
    shifted = np.empty((_CHECKSUM_BLOCK, _CHECKSUM_WIDTH), np.uint64)
    for start in range(0, len(table), _CHECKSUM_BLOCK):  # of rows that stay in the cache for both sums
        block = table[start : start + _CHECKSUM_BLOCK]
        end = start + len(block)
        of_columns += np.einsum("i,ij->j", weights[start:end], block)
        # Two signs that change in a column cancel, because an odd number times 2^63 is 2^63. Rows sum the upper halves.
        upper = np.right_shift(block, 32, out=shifted[: len(block)])
        np.einsum("ij,j->i", upper, weights[:_CHECKSUM_WIDTH], out=of_rows[start:end])
    sums = [of_columns.tobytes(), of_rows.tobytes()]
    return hashlib.blake2b(b"".join([str(len(data)).encode(), rest, *sums]), digest_size=16).digest()


def _weights(count: int) -> np.ndarray:
    """Odd numbers of 64 bits that look random, the same in every process."""
    numbers: np.ndarray = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    numbers ^= numbers >> np.uint64(32)
    numbers *= np.uint64(0xC2B2AE3D27D4EB4F)
    numbers |= np.uint64(1)
    return numbers
