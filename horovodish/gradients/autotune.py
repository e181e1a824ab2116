"""Finds the fusion threshold and the chunk sizes that move most gradient bytes per second, while training goes on.

A *sample* is a number of steps with one tuning. The ranks average what they have measured, so that all of them take the
same decision at the same step. While the search goes on, the bits of a result depend on it; afterwards they do not.
"""

from __future__ import annotations

import csv
import statistics
import time
import warnings
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from horovodish.collectives.process_sets import ProcessSet, checked_id
from horovodish.collectives.submission import Handle, counted, gather_objects_async
from horovodish.errors import SettingError
from horovodish.launch.output_files import opener
from horovodish.runtime import basics
from horovodish.settings import Settings

__all__ = ["Tuner", "Tuning", "search", "tuner_of", "warn_of_no_effect"]

CHOICES: Mapping[str, Sequence[float]] = {
    "fusion_threshold_mb": (1, 2, 4, 8, 16, 32, 64, 128),
    "chunk_kb": (64, 128, 256, 512, 1024),
    "ring_segment_kb": (30, 60, 128, 256, 512, 1024, 2048),
}
"""The values to try for each setting, besides the value where the search starts."""

WORTH = 0.02
"""A tuning is better when it moves this much more: less is noise."""
_FINAL_SAMPLES = 3  # of each tuning; the median leaves out one disturbed sample
# The first step with new buckets negotiates them in full, and the next step observes the order that they fill in.
_UNUSUAL_STEPS = 3
_begun_logs: set[Path] = set()
_tuners: dict[tuple[str, int], Tuner] = {}
_warned_of_no_effect = False


@dataclass(frozen=True)
class Tuning:
    """One value of each setting that is tuned; see `horovodish.settings` for what they mean."""

    fusion_threshold_mb: float
    chunk_kb: float
    ring_segment_kb: float

    @classmethod
    def of(cls, knobs: Settings, *, on_gpu: bool = False) -> Tuning:
        """The tuning of the settings, for gradients on a GPU or in host memory."""
        return cls(knobs.bucket_mb(on_gpu=on_gpu), knobs.chunk_kb, knobs.ring_segment_kb)


def search(start: Tuning, choices: Mapping[str, Sequence[float]]) -> Generator[Tuning, float, Tuning]:
    """Climbs from `start`, one setting after the other, then measures the best against the start once more.

    Yields tunings to be measured, and is sent the bytes per second of each. Pure.

    Args:
        start: what there is without tuning.
        choices: by field of `Tuning`, what to try.

    Returns:
        The best tuning; `start` unless another one is better by `WORTH` in the last measurements as well.

    Example:
        >>> candidates = search(start, {"fusion_threshold_mb": (8, 16, 32)})
        >>> tuning = next(candidates)
        >>> tuning = candidates.send(measured(tuning))
    """
    best, best_speed = start, (yield start)
    for name, values in choices.items():
        ladder = sorted({*values, getattr(start, name)})
        origin = ladder.index(getattr(start, name))
        for direction in (ladder[origin + 1 :], ladder[:origin][::-1]):
            climbed = False
            for value in direction:
                candidate = replace(best, **{name: value})
                speed = yield candidate
                if speed <= best_speed * (1 + WORTH):
                    break
                best, best_speed, climbed = candidate, speed, True
            if climbed:
                break
    if best == start:
        return start
    speeds: dict[Tuning, list[float]] = {start: [], best: []}
    for _ in range(_FINAL_SAMPLES):
        for tuning, measured in speeds.items():
            measured.append((yield tuning))
    usual, tuned = (statistics.median(measured) for measured in speeds.values())
    return best if tuned > usual * (1 + WORTH) else start


class Tuner:
    """The search for one set of gradients. Every rank has one and reports each step to it.

    A sample counts only when every rank has seen all of it: a rank that has joined takes no decision, so none is taken.

    Args:
        name: of the gradients, the same on every rank.
        knobs: where the search starts, how many steps a sample has, and where rank 0 writes the log: a CSV file with
            a line for every sample. The first search of a process replaces it, the others append to it.
        process_set: the ranks that reduce these gradients.
        only: the fields of `Tuning` that can be chosen for these gradients; None: all.
        on_gpu: whether they are reduced on a GPU.

    Attributes:
        tuning: how the next step is to be reduced.

    Raises:
        SettingError: the log cannot be written.
    """

    def __init__(
        self,
        name: str,
        knobs: Settings,
        process_set: ProcessSet,
        only: Collection[str] | None = None,
        *,
        on_gpu: bool = False,
    ):
        self._name = name
        self._steps_per_sample = knobs.autotune_steps_per_sample
        self._warmup_samples = knobs.autotune_warmup_samples
        self._ranks = process_set.size()
        self._process_set_id = checked_id(process_set)
        self._log = _log(knobs.autotune_log) if process_set.rank() == 0 else None
        self._search: Generator[Tuning, float, Tuning] | None = search(
            Tuning.of(knobs, on_gpu=on_gpu), _choices_here(only)
        )
        self.tuning = next(self._search)
        self._last_step: float | None = None
        self._seconds: list[float] = []
        self._sample_bytes = 0
        self._samples = 0
        self._gathered: Handle[dict[int, Any]] | None = None  # what the ranks have measured in a sample that has ended

    def step_done(self, step_bytes: int) -> None:
        """Report a step, and call `decide` next. Collective at the end of a sample; does not block.

        Args:
            step_bytes: what was reduced in it. The ranks' steps are the same steps.
        """
        if self._search is None:
            return
        steps = counted(f"autotune.{self._name}", self._process_set_id) % (_UNUSUAL_STEPS + self._steps_per_sample)
        now = time.perf_counter()
        began, self._last_step = self._last_step, now
        if began is not None and not 0 < steps <= _UNUSUAL_STEPS:
            self._seconds.append(now - began)
        if steps:
            return
        # The median, because a step may have been held up by an evaluation or a checkpoint.
        own = statistics.median(self._seconds) if len(self._seconds) == self._steps_per_sample else None
        self._seconds.clear()
        self._sample_bytes = step_bytes
        self._gathered = gather_objects_async(own, f"autotune.{self._name}", self._process_set_id)

    def decide(self) -> bool:
        """Choose the next tuning if a sample has ended. Collective then; blocks.

        Where several tuners end a sample in one step, call `step_done` of all of them before `decide` of any, because
        ranks may meet the tuners in different orders.

        Returns:
            Whether `tuning` is another one from now on.
        """
        if self._gathered is None:
            return False
        before = self.tuning
        try:
            of_ranks = self._gathered.wait()
        except Exception:  # after Ctrl-C the next call goes on waiting
            self._gathered = None
            raise
        self._gathered = None
        if len(of_ranks) == self._ranks and None not in of_ranks.values():
            self._end_sample(statistics.fmean(of_ranks.values()))
        self._last_step = time.perf_counter()
        return self.tuning != before

    def _end_sample(self, seconds: float) -> None:
        assert self._search is not None
        speed = self._sample_bytes / seconds
        self._write("warm-up" if self._samples < self._warmup_samples else "sample", speed, seconds)
        self._samples += 1
        if self._samples <= self._warmup_samples:
            return
        try:
            self.tuning = self._search.send(speed)
        except StopIteration as found:
            self._search, self.tuning = None, found.value
            self._write("chosen", None, None)

    def _write(self, what: str, speed: float | None, seconds: float | None) -> None:
        if self._log is None:
            return
        figures = [None if value is None else f"{value:.6g}" for value in (speed, seconds)]
        try:
            with open(self._log, "a", newline="", opener=opener) as file:
                writer = csv.writer(file)
                if file.tell() == 0:
                    header = ["gradients", "what", *asdict(self.tuning), "bytes_per_second", "seconds_per_step"]
                    writer.writerow(header)
                writer.writerow([self._name, what, *asdict(self.tuning).values(), *figures])
        except OSError as error:
            warnings.warn(
                f"the autotune log {self._log} cannot be written any more ({error}); autotune continues without it",
                RuntimeWarning,
                stacklevel=2,
            )
            self._log = None


def tuner_of(name: str, process_set: ProcessSet, *, on_gpu: bool = False) -> Tuner | None:
    """The tuner of gradients whose buckets are made anew in every step; None unless autotune is on. Not collective.

    Args:
        name: of the gradients, the same on every rank.
        process_set: the ranks that reduce them.
        on_gpu: whether they are reduced on a GPU.
    """
    knobs = basics.running().settings
    if not knobs.autotune:
        return None
    key = name, checked_id(process_set)
    if key not in _tuners:
        # Operations that belong to no native plan have chunks and segments of the settings.
        _tuners[key] = Tuner(name, knobs, process_set, only=("fusion_threshold_mb",), on_gpu=on_gpu)
    return _tuners[key]


def _choices_here(only: Collection[str] | None) -> dict[str, Sequence[float]]:
    """The settings that matter where the ranks are: chunks within a host, segments between hosts of one rank each."""
    hosts = basics.running().engine_topology.hosts
    without = {"chunk_kb"} if all(len(ranks) == 1 for ranks in hosts) else {"ring_segment_kb"}
    return {name: values for name, values in CHOICES.items() if name not in without and (only is None or name in only)}


def _log(path: str) -> Path | None:
    if not path:
        return None
    log = Path(path).absolute()
    try:
        open(log, "a" if log in _begun_logs else "w", opener=opener).close()
    except OSError as error:
        raise SettingError(
            f"HOROVODISH_AUTOTUNE_LOG={path!r}: the log cannot be written ({error}); name a file in a folder that"
            " exists"
        ) from error
    _begun_logs.add(log)
    return log


def warn_of_no_effect(what: str) -> None:
    """Warn on rank 0, once after each `init()`, if autotune is on: it cannot tune this. Not collective.

    Args:
        what: is not tuned, in the plural, for the message.
    """
    global _warned_of_no_effect
    if _warned_of_no_effect or not basics.has_engine() or basics.rank() != 0:
        return
    if basics.running().settings.autotune:
        _warned_of_no_effect = True
        warnings.warn(
            f"HOROVODISH_AUTOTUNE=1 (--autotune) has no effect on {what}: their buckets are made once. Compare "
            "jobs with other values of --fusion-threshold-mb instead",
            RuntimeWarning,
            stacklevel=3,
        )


def _notice_log_without_autotune(_: object) -> None:
    global _warned_of_no_effect
    _warned_of_no_effect = False
    _tuners.clear()
    knobs = basics.running().settings
    if knobs.autotune_log and not knobs.autotune and basics.rank() == 0:
        warnings.warn(
            "HOROVODISH_AUTOTUNE_LOG is set, but has no effect without HOROVODISH_AUTOTUNE=1 (--autotune)",
            RuntimeWarning,
            stacklevel=3,
        )


basics.follow(started=_notice_log_without_autotune)
