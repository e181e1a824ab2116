"""Reading what `start_timeline("x.records")` wrote: the operations, steps, marks and waits of one rank, as arrays."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

__all__ = ["PHASES", "NothingRecordedError", "RankRecords", "RecordsError", "Track", "read", "trace_events"]

PHASES = ("pack", "reduce", "exchange", "unpack", "connect", "nccl", "encode", "decode", "wait")
STEPS_TRACK, WAITS_TRACK = 2, 3

_Ints = NDArray[np.int64]
_HEAD_BYTES = 16
_KINDS = {b"objects\n", b"records\n"}
_SUBMITTED, _DECIDED, _PHASE, _SETTLED, _FAILED = range(1, 6)
_PAGE_RECORDS = 1 << 18
_MOST_TRACKS = 1 << 16  # the engine has fewer
_NEVER = np.iinfo(np.int64).max
_RECORD = np.dtype([("at", "<i8"), ("length", "<f4"), ("bits", "<u4")])  # struct TimelineRecord of the engine


class RecordsError(ValueError):
    """A file has no records that can be read. The message names the file and the remedy."""


class NothingRecordedError(RecordsError):
    """A rank was killed before it wrote anything, or has reduced nothing."""


@dataclass(frozen=True)
class Track:
    """The common properties of the operations of one name.

    Attributes:
        name: of the tensor or bucket.
        kind: "allreduce" and the like; empty where its description is lost.
        bytes: of the tensors; None where ranks give different numbers of rows.
        dtype: of the first tensor.
        tensors: how many there are.
        on_host: whether they lie in the memory of the host, and not of a GPU.
    """

    name: str
    kind: str = ""
    bytes: int | None = None
    dtype: str = ""
    tensors: int = 1
    on_host: bool = True


@dataclass
class RankRecords:
    """Records of one rank, from one start of its engine. Times are nanoseconds since `init()` on rank 0.

    Attributes:
        path: of the file.
        about: the rank, its host, the world and its settings.
        tracks: by number.
        track, submitted, decided, settled: one entry for each operation, in the order of submission. What has not
            happened when the records end has the time of their end.
        failed, in_program: likewise; whether it ended in an error, and whether a framework's program submitted it.
        phase_seconds: by track and phase.
        step_numbers, step_begins: of wrapped optimizers.
        wait_begins, wait_ends: of threads of the script, in the order of their ends.
        marks: what the script marked and what failed, with its time.
        dropped: how many records the rank had no time to write.
        end: when the records end.
        is_cut: whether the rank was killed, or wrote nothing more for another reason.
    """

    path: Path
    about: dict[str, Any]
    tracks: dict[int, Track]
    track: NDArray[np.int32]
    submitted: _Ints
    decided: _Ints
    settled: _Ints
    failed: NDArray[np.bool_]
    in_program: NDArray[np.bool_]
    phase_seconds: dict[tuple[int, str], float]
    step_numbers: _Ints
    step_begins: _Ints
    wait_begins: _Ints
    wait_ends: _Ints
    marks: list[tuple[int, str]]
    dropped: int
    end: int
    is_cut: bool

    @property
    def begin(self) -> int:
        """When the first operation was submitted; 0 without one."""
        return int(self.submitted[0]) if self.submitted.size else 0

    @property
    def rank(self) -> int:
        """The rank in the world."""
        return int(self.about["rank"])


def read(path: Path) -> RankRecords:
    """The records of a file, up to where it was cut off.

    Raises:
        RecordsError: it has none.
        OSError: it cannot be read.
    """
    objects, operations, waits = _Objects(path), _Operations(), [np.empty(0, _RECORD)]
    with open(path, "rb") as file:
        pages, size = [], 0
        for kind, content in _blocks(path, file):
            if kind == b"objects\n":
                objects.take(content)
                continue
            page = np.frombuffer(content[: len(content) // _RECORD.itemsize * _RECORD.itemsize], _RECORD)
            pages.append(page)
            size += page.size
            if size > _PAGE_RECORDS:
                waits.append(operations.take(np.concatenate(pages)))
                pages, size = [], 0
        if pages:
            waits.append(operations.take(np.concatenate(pages)))
    return _of(path, objects.about(), objects, operations, np.concatenate(waits))


@dataclass
class _Objects:
    path: Path
    tracks: dict[int, Track] = field(default_factory=dict)
    steps: list[tuple[int, int]] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)
    first: dict[str, Any] | None = None
    dropped: int = 0
    ended: int | None = None

    def take(self, text: bytes) -> None:
        for line in text.split(b"\n")[:-1]:
            try:
                self._take(json.loads(line.decode(errors="replace")))
            except (ValueError, KeyError, TypeError, AttributeError) as problem:
                raise RecordsError(f"{self.path} is damaged: {line[:60]!r} is not an object of a timeline") from problem

    def _take(self, it: dict[str, Any]) -> None:
        if self.first is None:
            self.first = it
        elif "track" in it:
            number = it.pop("track")
            about = {key: it[key] for key in ("name", "kind", "bytes", "dtype", "tensors", "on_host") if key in it}
            self.tracks[number] = Track(**about)
        elif "step" in it:
            self.steps.append((int(it["step"].removeprefix("step ")), int(it["at"])))
        elif "mark" in it:
            self.marks.append((int(it["at"]), str(it["mark"])))
        elif "dropped" in it:
            self.dropped = int(it["dropped"])
        else:
            self.ended = int(it["ended"])

    def about(self) -> dict[str, Any]:
        about = self.first or {}
        if not isinstance(about.get("rank"), int) or not isinstance(about.get("begun"), int):
            raise NothingRecordedError(f"{self.path} is empty: the rank was killed before it wrote anything")
        return about


def _blocks(path: Path, file: BinaryIO) -> Iterator[tuple[bytes, bytes]]:
    size = os.fstat(file.fileno()).st_size
    while head := file.read(_HEAD_BYTES):
        at = file.tell() - len(head)
        if not any(kind.startswith(head[:8]) for kind in _KINDS):
            remedy = 'Record with hvd.start_timeline("x.records") or horovodish run --report'
            raise RecordsError(f"{path} is {f'damaged at byte {at}' if at else f'not a file of records. {remedy}'}")
        if len(head) == _HEAD_BYTES:
            yield head[:8], file.read(min(int.from_bytes(head[8:], "little"), size))


class _Operations:
    """Puts the records of each operation together. It takes them in pages, since a file may be larger than memory."""

    def __init__(self) -> None:
        self.size = 0
        self.end = 0
        self.columns: dict[str, NDArray[Any]] = {
            "track": np.empty(0, np.int32),
            **{key: np.empty(0, np.int64) for key in ("submitted", "decided", "settled")},
            **{key: np.empty(0, np.bool_) for key in ("failed", "in_program")},
        }
        self.latest = np.full(0, -1)  # operation on each track
        self.phases = np.zeros((0, 16))  # seconds by track and phase

    def take(self, records: NDArray[Any]) -> NDArray[Any]:
        """Returns the records of waits."""
        what, track = (records["bits"] & 15).astype(np.uint8), (records["bits"] >> np.uint32(8)).astype(np.int64)
        kept = (track > WAITS_TRACK) & (track < _MOST_TRACKS) & (what > 0)
        waits: NDArray[Any] = records[track == WAITS_TRACK]
        self.end = max(self.end, int(records["at"].max(initial=0)))
        most = int(track[kept].max(initial=0)) + 1
        if most > self.latest.size:
            self.latest = np.concatenate((self.latest, np.full(most - self.latest.size, -1)))
            self.phases = np.concatenate((self.phases, np.zeros((most - len(self.phases), 16))))
        # A track's records are in order, and at most one operation of it is under way. Small numbers sort by radix.
        order = np.flatnonzero(kept)
        if not order.size:
            return waits
        order = order[np.argsort(track[order].astype(np.uint16), kind="stable")]
        records, what, track = records[order], what[order], track[order]
        begins = what == _SUBMITTED
        operation = self.size - 1 + np.cumsum(begins)
        starts = np.flatnonzero(np.diff(track, prepend=-1))
        before = np.repeat(operation[starts] - begins[starts], np.diff(np.append(starts, track.size)))
        operation = np.where(operation == before, self.latest[track], operation)  # -1: its submission was dropped
        self._grow(int(begins.sum()))
        at = records["at"]
        for key, values in (
            ("track", track),
            ("submitted", at),
            ("decided", np.full(at.size, _NEVER)),
            ("settled", np.full(at.size, _NEVER)),
            ("failed", np.zeros(at.size, np.bool_)),
            ("in_program", records["length"] > 0),
        ):
            self.columns[key][operation[begins]] = values[begins]
        for key, happened in (("decided", what == _DECIDED), ("settled", (what == _SETTLED) | (what == _FAILED))):
            happened &= operation >= 0
            self.columns[key][operation[happened]] = at[happened]
        self.columns["failed"][operation[(what == _FAILED) & (operation >= 0)]] = True
        works = what == _PHASE
        phase = (records["bits"][works] >> np.uint32(4)) & np.uint32(15)
        sums = np.bincount(track[works] * 16 + phase, records["length"][works], self.phases.size)
        self.phases += sums.reshape(self.phases.shape) / 1e9
        ends = np.append(starts[1:], track.size) - 1
        self.latest[track[ends]] = operation[ends]
        return waits

    def _grow(self, more: int) -> None:
        self.size += more
        for key, column in self.columns.items():
            if column.size < self.size:
                self.columns[key] = np.concatenate((column, np.empty(max(self.size, 1024), column.dtype)))

    def ended(self, end: int) -> dict[str, NDArray[Any]]:
        """The columns, by the time of submission. What has not happened gets the time of the end."""
        columns = {key: column[: self.size] for key, column in self.columns.items()}
        columns["settled"] = np.minimum(columns["settled"], max(end, 0))
        columns["decided"] = np.minimum(columns["decided"], columns["settled"])
        order = np.argsort(columns["submitted"], kind="stable")
        return {key: column[order] for key, column in columns.items()}


def _of(
    path: Path, about: dict[str, Any], objects: _Objects, operations: _Operations, waits: NDArray[Any]
) -> RankRecords:
    end = max(operations.end, objects.ended or 0, *(at for _, at in objects.steps[-1:]), 0)
    columns = operations.ended(end)
    steps = np.array(objects.steps, np.int64).reshape(-1, 2)
    return RankRecords(
        path=path,
        about=about,
        tracks={
            int(each): objects.tracks.get(int(each), Track(f"track {each}")) for each in np.unique(columns["track"])
        },
        **columns,
        phase_seconds={
            (int(track), PHASES[phase]): float(operations.phases[track, phase])
            for track, phase in np.argwhere(operations.phases)
        },
        step_numbers=steps[:, 0],
        step_begins=steps[:, 1],
        wait_begins=waits["at"] - waits["length"].astype(np.int64),
        wait_ends=waits["at"].astype(np.int64),
        marks=objects.marks,
        dropped=objects.dropped,
        end=end,
        is_cut=objects.ended is None,
    )


def trace_events(records: RankRecords, begin: int, end: int) -> Iterator[dict[str, Any]]:
    """The records between two times, as events of Chrome's trace format."""
    process = {"pid": records.rank}
    name = f"rank {records.rank} on {records.about.get('host', '')}"
    yield {"ph": "M", **process, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", **process, "tid": STEPS_TRACK, "name": "thread_name", "args": {"name": "steps"}}
    ends = np.append(records.step_begins[1:], records.end)
    for number, at, last in zip(records.step_numbers, records.step_begins, ends, strict=True):
        if at < end and last > begin:
            yield _slice(process, STEPS_TRACK, f"step {number}", at, last)
    for time, mark in records.marks:
        if begin <= time < end:
            yield {"ph": "i", "s": "p", **process, "tid": STEPS_TRACK, "name": mark, "ts": time / 1e3}
    chosen = np.flatnonzero((records.submitted < end) & (records.settled > begin))
    for number in np.unique(records.track[chosen]):
        name = records.tracks[int(number)].name
        yield {"ph": "M", **process, "tid": int(number), "name": "thread_name", "args": {"name": name}}
    for each in chosen:
        number = int(records.track[each])
        submitted, settled = int(records.submitted[each]), int(records.settled[each])
        track = records.tracks[number]
        yield _slice(process, number, track.kind, submitted, settled, {"bytes": track.bytes})
        yield _slice(process, number, "negotiate", submitted, int(records.decided[each]))
    waits = (records.wait_begins < end) & (records.wait_ends > begin)
    for at, last in zip(records.wait_begins[waits], records.wait_ends[waits], strict=True):
        yield _slice(process, WAITS_TRACK, "wait", at, last)


def _slice(process: dict[str, int], track: int, name: str, begin: int, end: int, args: Any = None) -> dict[str, Any]:
    times = {"ts": int(begin) / 1e3, "dur": (int(end) - int(begin)) / 1e3}
    return {"ph": "X", **process, "tid": track, "name": name, **times, "args": args or {}}
