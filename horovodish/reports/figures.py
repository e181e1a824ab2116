"""Where the time of a run went: figures from the records of its ranks.

An operation *waits* from its submission on a rank until the last rank has submitted it, and *communicates* from then
until it is settled. An operation costs the script the time that the script waits for its end: for late ranks, or for
communication, which is *exposed* then. Other communication is *hidden* behind the script's own work, which is
everything else in a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovodish._native import DTYPES
from horovodish.collectives.arrays import ITEM_BYTES
from horovodish.gradients.late_steps import NEXT_STEP
from horovodish.reports.records import NothingRecordedError, RankRecords, RecordsError, Track

__all__ = ["Figures", "Spans", "TensorFigures", "figures_of", "workload_of"]

MOST_STEPS = 200
"""The last ones say what a rank does in a step."""
_PARTS = ("durations", "late", "exposed", "hidden", "operations", "bytes")
_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


@dataclass
class TensorFigures:
    """Figures of the operations of one name and kind, over all ranks. Times are seconds.

    Attributes:
        count: how many the rank with most has done.
        wait: from a rank's submission to the last rank's submission, on average.
        communication: from there to the end, on average.
        queue: of that, until the ranks have agreed that the operation can start.
        late: by rank, how long the first rank has waited for it in all.
        slowest_phase: the part of the work that takes longest; empty where none was recorded.
    """

    track: Track
    count: int
    wait: float
    communication: float
    queue: float
    late: dict[int, float]
    slowest_phase: str

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return (self.track.bytes or 0) / self.communication if self.communication > 0 else 0.0


@dataclass
class Figures:
    """The figures of one world, from its `init()` to its end.

    Attributes:
        records: of the ranks, in their order.
        missing: ranks of the world without records.
        steps: the numbers of the steps that all these ranks have begun and ended.
        begins: when each rank began each step; nanoseconds, by rank and step. Likewise, in seconds:
        durations, late, exposed, hidden: how long the step was; of it, how long the script waited for late ranks, and
            for communication; and how long communication went on while it did not wait.
        tensors: sorted by communication, longest first.
        operations, bytes: how many operations of how many bytes the rank submitted in the step.
        lags: by late rank and step, how long the script of another rank waited for it, at most.
        caused: by waiting rank and late rank, how many seconds the one's script waited for the other in steady steps.
        last_submissions: for each rank, when the last rank had submitted each of its operations.
        waits: when the script of each rank waited for operations.
        late_seconds, times_last: by rank, how long the first rank has waited for it, and for how many operations.
    """

    records: list[RankRecords]
    missing: list[int]
    steps: _Ints
    begins: _Ints
    durations: _Floats
    late: _Floats
    exposed: _Floats
    hidden: _Floats
    operations: _Floats
    bytes: _Floats
    lags: _Floats
    caused: _Floats
    tensors: list[TensorFigures]
    late_seconds: _Floats
    times_last: _Ints
    last_submissions: list[_Ints]
    waits: list[Spans]

    @property
    def steady(self) -> slice:
        """The steps that count for averages."""
        return _steady(self.steps.size)

    @property
    def hosts(self) -> list[list[int]]:
        """The ranks of each host."""
        return [list(ranks) for ranks in self.records[0].about.get("hosts", [])]

    def host_of(self, rank: int) -> str:
        """The name of a rank's host."""
        return next((str(each.about.get("host", "")) for each in self.records if each.rank == rank), "")

    def share(self, part: _Floats) -> float:
        """Which share of the ranks' steps a part of them takes."""
        total = float(self.durations[:, self.steady].sum())
        return float(part[:, self.steady].sum()) / total if total > 0 else 0.0

    @property
    def step_seconds(self) -> float:
        """The median of a step; 0 without steps."""
        kept = self.durations[:, self.steady]
        return float(np.median(kept.max(axis=0))) if kept.size else 0.0

    def median(self, part: _Floats) -> float:
        """The part of the median step, as the mean of the ranks."""
        kept = part[:, self.steady]
        return float(np.median(kept.mean(axis=0))) if kept.size else 0.0

    def phase_seconds(self) -> dict[str, float]:
        """How long the work of each kind took, as the mean of the ranks."""
        sums: dict[str, float] = {}
        for each in self.records:
            for (_, phase), seconds in each.phase_seconds.items():
                sums[phase] = sums.get(phase, 0.0) + seconds / len(self.records)
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _steady(steps: int) -> slice:
    """The first steps compile, allocate and connect."""
    return slice(2 if steps > 5 else 0, None)


def figures_of(records: Sequence[RankRecords]) -> Figures:
    """The figures of one world.

    Args:
        records: of its ranks, one for each.

    Raises:
        RecordsError: they are not of one world.
        NothingRecordedError: no operation is in them.
    """
    records = sorted(records, key=lambda each: each.rank)
    first = records[0]
    for one, other in itertools.pairwise(records):
        if one.rank == other.rank:
            raise RecordsError(f"{one.path} and {other.path} are both of rank {one.rank}: name the files of one run")
        if one.about["begun"] != other.about["begun"]:
            raise RecordsError(f"{one.path} and {other.path} are of different runs: name the files of one run")
    if not any(each.track.size for each in records):
        raise NothingRecordedError(f"{first.path} has no operation: the ranks have reduced nothing")
    world = [rank for ranks in first.about.get("hosts", []) for rank in ranks]
    names = _Names(records)
    lasts, late_ranks, tensors, late, times_last = _over_ranks(records, names)
    numbers = _whole_steps(records[0])
    for each in records[1:]:
        numbers = np.intersect1d(numbers, _whole_steps(each))
    shape = (len(records), numbers.size)
    parts = {key: np.zeros(shape) for key in (*_PARTS, "lags")}
    caused = np.zeros((len(records), len(records)))
    begins, waits = np.zeros(shape, np.int64), [_script_waits(each) for each in records]
    for index, each in enumerate(records):
        begins[index], found, by_late_rank = _steps_of(
            each, lasts[index], late_ranks[index], waits[index], numbers, len(records)
        )
        for key, values in found.items():
            parts[key][index] = values
        parts["lags"] = np.maximum(parts["lags"], by_late_rank)
        caused[index] = by_late_rank[:, _steady(numbers.size)].sum(axis=1)
    return Figures(
        records=list(records),
        missing=sorted(set(world) - {each.rank for each in records}),
        steps=numbers,
        begins=begins,
        tensors=sorted(tensors, key=lambda each: -each.communication * each.count),
        late_seconds=late,
        times_last=times_last,
        last_submissions=lasts,
        waits=waits,
        caused=caused,
        **parts,
    )


def workload_of(figures: Figures) -> dict[str, Any] | None:
    """The work of a rank in a step, for `horovodish predict`; None without steps, gradients or own work.

    Times are of the rank's own work, without its waits. A tensor that is reduced in most steps is a bucket.
    """
    if not figures.steps.size:
        return None
    kept = range(max(figures.steady.start, figures.steps.size - MOST_STEPS), figures.steps.size)
    buckets: dict[str, tuple[list[float], Track]] = {}
    work = []
    for index, records in enumerate(figures.records):
        begins = figures.begins[index]
        own = figures.durations[index] - figures.late[index] - figures.exposed[index]
        work.append(own[kept.start :])
        inside = slice(*np.searchsorted(records.submitted, [begins[kept.start], records.end]))
        submitted, tracks = records.submitted[inside], records.track[inside]
        step = np.searchsorted(begins, submitted, side="right") - 1
        after = (submitted - begins[step] - figures.waits[index].within(begins[step], submitted)) / 1e9
        for number in np.unique(tracks):
            track = records.tracks[int(number)]
            chosen = tracks == number
            is_known = track.bytes and track.dtype in DTYPES
            if track.kind == "allreduce" and is_known and chosen.sum() >= len(kept) / 2:
                buckets.setdefault(track.name, ([], track))[0].append(float(np.median(after[chosen])))
    means = np.array([float(np.median(each)) for each in work])
    if not buckets or means.mean() <= 0:
        return None
    ready = sorted(
        (max(0.0, float(np.median(times))), track.bytes, ITEM_BYTES[DTYPES[track.dtype]], track.tensors)
        for times, track in buckets.values()
    )
    spread = float(np.median([each.std() for each in work])) / float(means.mean())
    ranks = len(figures.records) + len(figures.missing)
    return {"work": float(means.mean()), "buckets": ready, "spread": spread, "ranks": ranks}


def _whole_steps(records: RankRecords) -> _Ints:
    """The numbers of those that end where the next one begins. A rank that has joined leaves numbers out."""
    whole: _Ints = records.step_numbers[:-1][np.diff(records.step_numbers) == 1]
    return whole


class _Names:
    """Numbers the tracks of all ranks alike: a rank numbers its own tracks in the order that it sees them."""

    def __init__(self, records: Sequence[RankRecords]) -> None:
        self.numbers: dict[tuple[str, str], int] = {}
        self.tracks: list[Track] = []
        self.of: list[_Ints] = []
        for each in records:
            table = np.zeros(max(each.tracks, default=0) + 1, np.int64)
            for number, track in each.tracks.items():
                key = (track.name, track.kind)
                if key not in self.numbers:
                    self.numbers[key] = len(self.tracks)
                    self.tracks.append(track)
                table[number] = self.numbers[key]
            self.of.append(table)


@dataclass
class _Places:
    """Identifies each operation on every rank: by its tensor, its step, and its number within tensor and step.

    Steps have the same numbers on all ranks, also where one has begun to record later or has dropped records. `order`
    sorts by these three.
    """

    tensor: _Ints
    step: _Ints
    place: _Ints
    order: _Ints


def _places(records: RankRecords, numbers: _Ints) -> _Places:
    tensor = numbers[records.track]
    index = np.searchsorted(records.step_begins, records.submitted, side="right")
    step = np.concatenate((np.zeros(1, np.int64), records.step_numbers))[index]
    # Operations are in the order of their steps already. Small numbers sort by radix.
    small = tensor.astype(np.uint16) if tensor.max(initial=0) < 1 << 16 else tensor
    order = np.argsort(small, kind="stable")
    changes = (np.diff(tensor[order]) != 0) | (np.diff(step[order]) != 0)
    starts = np.concatenate((np.zeros(min(1, order.size), np.int64), np.flatnonzero(changes) + 1))
    place = np.empty(order.size, np.int64)
    place[order] = np.arange(order.size) - np.repeat(starts, np.diff(np.append(starts, order.size)))
    return _Places(tensor, step, place, order)


def _keys(places: Sequence[_Places]) -> list[_Ints]:
    """One number for each operation, the same on every rank."""
    widths = [
        max(int(getattr(each, part).max(initial=0)) for each in places).bit_length()
        for part in ("tensor", "step", "place")
    ]
    if sum(widths) > 63:
        raise RecordsError("the records have too many operations for one report; record a part of the run")
    _, step, place = widths
    return [each.tensor << (step + place) | each.step << place | each.place for each in places]


def _over_ranks(
    records: Sequence[RankRecords], names: _Names
) -> tuple[list[_Ints], list[_Ints], list[TensorFigures], _Floats, _Ints]:
    """Figures from the comparison of ranks.

    Returns:
        For each rank, when the last rank had submitted each of its operations, and the index of that rank, or -1 where
        that rank is not to blame; the tensors; and by rank, how long
        others have waited for it, and for how many operations.
    """
    places = [_places(each, names.of[index]) for index, each in enumerate(records)]
    keys, orders = _keys(places), [each.order for each in places]
    del places
    everything = keys[0] if all(np.array_equal(keys[0], each) for each in keys[1:]) else None
    union = keys[0][orders[0]] if everything is not None else np.unique(np.concatenate(keys))
    first = np.full(union.size, np.iinfo(np.int64).max)
    last = np.full(union.size, np.iinfo(np.int64).min)
    last_rank = np.zeros(union.size, np.int16)
    where = []
    for index, each in enumerate(records):
        at = np.empty(each.track.size, np.int64)
        found = np.arange(union.size) if everything is not None else np.searchsorted(union, keys[index][orders[index]])
        at[orders[index]] = found
        where.append(at)
        later = each.submitted > last[at]
        last_rank[at[later]] = index
        last[at[later]] = each.submitted[later]
        first[at] = np.minimum(first[at], each.submitted)
    del keys, orders
    behind = (last - first) / 1e9
    union_tensor = np.zeros(union.size, np.int64)
    for index, (each, at) in enumerate(zip(records, where, strict=True)):
        union_tensor[at] = names.of[index][each.track]
    # The first rank submits the operation that ends the others' wait when enough ranks have a gradient.
    blames_none = np.array([track.name.endswith(NEXT_STEP) for track in names.tracks])
    behind[blames_none[union_tensor]] = 0.0
    late = np.bincount(last_rank, behind, len(records)).astype(np.float64)
    times_last = np.bincount(last_rank[behind > 0], minlength=len(records)).astype(np.int64)
    size = len(names.tracks)
    sums = {key: np.zeros(size) for key in ("wait", "communication", "queue")}
    counts = np.zeros((len(records), size), np.int64)
    phases: dict[int, dict[str, float]] = {}
    lasts, late_ranks = [], []
    for index, (each, at) in enumerate(zip(records, where, strict=True)):
        own = names.of[index][each.track]
        # A joined rank, or one whose clock is off, cannot make an operation end before it begins.
        begin = np.where(blames_none[own], each.settled, np.clip(last[at], each.submitted, each.settled))
        lasts.append(begin)
        late_ranks.append(np.where(blames_none[own], -1, last_rank[at]))
        counts[index] = np.bincount(own, minlength=size)
        sums["wait"] += np.bincount(own, begin - each.submitted, size)
        sums["communication"] += np.bincount(own, each.settled - begin, size)
        sums["queue"] += np.bincount(own, np.maximum(each.decided - begin, 0), size)
        for (track, phase), seconds in each.phase_seconds.items():
            if track < names.of[index].size:
                by_phase = phases.setdefault(int(names.of[index][track]), {})
                by_phase[phase] = by_phase.get(phase, 0.0) + seconds
    by_tensor = np.bincount(union_tensor * len(records) + last_rank, behind, size * len(records)).reshape(size, -1)
    total = np.maximum(counts.sum(axis=0), 1)
    tensors = [
        TensorFigures(
            track=track,
            count=int(counts[:, number].max()),
            wait=float(sums["wait"][number] / total[number] / 1e9),
            communication=float(sums["communication"][number] / total[number] / 1e9),
            queue=float(sums["queue"][number] / total[number] / 1e9),
            late={each.rank: float(late) for each, late in zip(records, by_tensor[number], strict=True) if late},
            slowest_phase=max(phases.get(number, {"": 0.0}).items(), key=lambda item: item[1])[0],
        )
        for number, track in enumerate(names.tracks)
    ]
    return lasts, late_ranks, tensors, late, times_last


class Spans:
    """A union of spans of time. It can tell how much of them lies before a moment."""

    def __init__(self, begins: _Ints, ends: _Ints) -> None:
        order = np.argsort(begins, kind="stable")
        begins, ends = begins[order], np.maximum.accumulate(ends[order])
        begins = np.maximum(begins, np.concatenate((begins[:1], ends[:-1])))
        kept = ends > begins
        self.begins, self.ends = begins[kept], ends[kept]
        self._sum = np.concatenate((np.zeros(1, np.int64), np.cumsum(self.ends - self.begins)))

    def before(self, times: _Ints) -> _Ints:
        """How many nanoseconds of the union lie before each time."""
        index = np.searchsorted(self.begins, times, side="right")
        beyond = np.maximum(self.ends[index - 1] - times, 0) if self.ends.size else np.zeros(times.size, np.int64)
        return np.where(index > 0, self._sum[index] - beyond, 0)

    def within(self, begins: _Ints, ends: _Ints) -> _Ints:
        """How many lie in each of some spans."""
        return self.before(ends) - self.before(begins)


def _steps_of(
    records: RankRecords, last: _Ints, late_ranks: _Ints, waits: Spans, numbers: _Ints, ranks: int
) -> tuple[_Ints, dict[str, _Floats], _Floats]:
    """When a rank began the steps of these numbers, their parts, and the seconds of waiting by late rank and step."""
    index = np.searchsorted(records.step_numbers, numbers)
    begins, ends = records.step_begins[index], records.step_begins[index + 1]
    late, communication = Spans(records.submitted, last), Spans(last, records.settled)

    def in_steps(times: _Ints, values: NDArray[Any]) -> _Floats:
        step = np.searchsorted(begins, times, side="right") - 1
        inside = (step >= 0) & (times < ends[np.maximum(step, 0)]) if numbers.size else np.zeros(step.size, np.bool_)
        return np.bincount(step[inside], values[inside], numbers.size).astype(np.float64)

    late_waits = in_steps(waits.begins, late.within(waits.begins, waits.ends)) / 1e9
    hidden_from = in_steps(waits.begins, communication.within(waits.begins, waits.ends)) / 1e9
    lengths = np.array([records.tracks[number].bytes or 0 for number in sorted(records.tracks)], np.float64)
    place = np.searchsorted(np.array(sorted(records.tracks)), records.track)
    # Operations overlap, so each late rank gets its share of the time that the script waited for any rank.
    waited = waits.within(records.submitted, last)
    step = np.searchsorted(begins, records.submitted, side="right") - 1
    inside = np.flatnonzero((step >= 0) & (records.submitted < ends[step])) if numbers.size else np.zeros(0, np.int64)
    cell = step[inside] * (ranks + 1) + late_ranks[inside] + 1
    sums = np.bincount(cell, waited[inside].astype(np.float64), numbers.size * (ranks + 1))
    shares = sums.astype(np.float64).reshape(-1, ranks + 1).T
    shares *= late_waits / np.maximum(shares.sum(axis=0), 1.0)
    parts = {
        "durations": (ends - begins) / 1e9,
        "late": late_waits,
        "exposed": np.maximum(in_steps(waits.begins, waits.ends - waits.begins) / 1e9 - late_waits, 0.0),
        "hidden": np.maximum(communication.within(begins, ends) / 1e9 - hidden_from, 0.0),
        "operations": in_steps(records.submitted, np.ones(records.track.size)),
        "bytes": in_steps(records.submitted, lengths[place]),
    }
    return begins, parts, shares[1:]


def _script_waits(records: RankRecords) -> Spans:
    """When the script waits for operations. A compiled program does so from the last submission of a step on."""
    chosen = np.flatnonzero(records.in_program)
    if not chosen.size or not records.step_begins.size:
        return Spans(records.wait_begins, records.wait_ends)
    step = np.searchsorted(records.step_begins, records.submitted[chosen], side="right")
    starts = np.flatnonzero(np.concatenate(([True], np.diff(step) != 0)))
    begins = np.maximum.reduceat(records.submitted[chosen], starts)
    ends = np.maximum.reduceat(records.settled[chosen], starts)
    return Spans(np.concatenate((records.wait_begins, begins)), np.concatenate((records.wait_ends, ends)))
