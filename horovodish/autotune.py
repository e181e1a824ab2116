"""Finds the fusion threshold and the chunk sizes that move most gradient bytes per second, while training goes on.

A *sample* is a number of steps with one tuning. The ranks average what they have measured, so that all of them take the
same decision at the same step. While the search goes on, the bits of a result depend on it; afterwards they do not.
"""

from __future__ import annotations

import csv
import statistics
import time
import warnings
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from horovodish import basics, settings
from horovodish.errors import SettingError
from horovodish.process_sets import ProcessSet, checked_id
from horovodish.settings import Settings
from horovodish.submission import counted, gather_objects, generated_name

__all__ = ["Tuner", "Tuning", "search"]

CHOICES: Mapping[str, Sequence[float]] = {
    "fusion_threshold_mb": (1, 2, 4, 8, 16, 32, 64, 128),
    "chunk_kb": (64, 128, 256, 512, 1024),
    "ring_segment_kb": (30, 60, 128, 256, 512, 1024, 2048),
}
"""What is tried of each setting, besides where the search starts."""

WORTH = 0.02
"""A tuning is better when it moves this much more: less is noise."""
_FINAL_SAMPLES = 3
# The first step with new buckets negotiates them in full, and the one after it watches in which order they fill.
_UNUSUAL_STEPS = 3
_begun_logs: set[Path] = set()


@dataclass(frozen=True)
class Tuning:
    """One value of each setting that is tuned; see `horovodish.settings` for what they mean."""

    fusion_threshold_mb: float
    chunk_kb: float
    ring_segment_kb: float

    @classmethod
    def of(cls, knobs: Settings) -> Tuning:
        """What the settings say."""
        return cls(*(getattr(knobs, field.name) for field in fields(cls)))


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

    Attributes:
        tuning: how the next step is to be reduced.

    Raises:
        SettingError: the log cannot be written.
    """

    def __init__(self, name: str, knobs: Settings, process_set: ProcessSet):
        self._name = name
        self._steps_per_sample = knobs.autotune_steps_per_sample
        self._warmup_samples = knobs.autotune_warmup_samples
        self._ranks = process_set.size()
        self._process_set_id = checked_id(process_set)
        self._log = _log(knobs.autotune_log) if process_set.rank() == 0 else None
        self._search: Generator[Tuning, float, Tuning] | None = search(Tuning.of(knobs), _choices_here())
        self.tuning = next(self._search)
        self._last_step: float | None = None
        self._seconds: list[float] = []
        self._samples = 0

    def step_done(self, step_bytes: int) -> bool:
        """Report a step. Collective at the end of a sample; the ranks' steps are the same steps.

        Args:
            step_bytes: what was reduced in it.

        Returns:
            Whether `tuning` is another one from now on.
        """
        if self._search is None:
            return False
        steps = counted(f"autotune.{self._name}", self._process_set_id) % (_UNUSUAL_STEPS + self._steps_per_sample)
        now = time.perf_counter()
        began, self._last_step = self._last_step, now
        if began is not None and not 0 < steps <= _UNUSUAL_STEPS:
            self._seconds.append(now - began)
        if steps:
            return False
        before = self.tuning
        self._end_sample(step_bytes)
        self._seconds.clear()
        self._last_step = time.perf_counter()
        return self.tuning != before

    def _end_sample(self, step_bytes: int) -> None:
        assert self._search is not None
        # The median, because a step may have been held up by an evaluation or a checkpoint.
        own = statistics.median(self._seconds) if len(self._seconds) == self._steps_per_sample else None
        of_ranks = gather_objects(own, generated_name("autotune", self._process_set_id), self._process_set_id)
        if len(of_ranks) < self._ranks or None in of_ranks.values():
            return
        seconds = statistics.fmean(of_ranks.values())
        speed = step_bytes / seconds
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
        with self._log.open("a", newline="") as file:
            writer = csv.writer(file)
            if file.tell() == 0:
                header = ["gradients", "what", *asdict(self.tuning), "bytes_per_second", "seconds_per_step"]
                writer.writerow(header)
            figures = [None if value is None else f"{value:.6g}" for value in (speed, seconds)]
            writer.writerow([self._name, what, *asdict(self.tuning).values(), *figures])


def _choices_here() -> dict[str, Sequence[float]]:
    """The settings that matter where the ranks are: chunks within a host, segments between hosts of one rank each."""
    hosts = basics.running().engine_place.hosts
    without = {"chunk_kb"} if all(len(ranks) == 1 for ranks in hosts) else {"ring_segment_kb"}
    return {name: values for name, values in CHOICES.items() if name not in without}


def _log(path: str) -> Path | None:
    if not path:
        return None
    log = Path(path).absolute()
    try:
        log.open("a" if log in _begun_logs else "w").close()
    except OSError as error:
        raise SettingError(
            f"HOROVODISH_AUTOTUNE_LOG={path!r}: the log cannot be written ({error}); name a file in a folder that"
            " exists"
        ) from error
    _begun_logs.add(log)
    return log


def _notice_log_without_autotune(_: object) -> None:
    knobs = settings.load(warn=lambda _: None)
    if knobs.autotune_log and not knobs.autotune and basics.rank() == 0:
        warnings.warn(
            "HOROVODISH_AUTOTUNE_LOG is set, but has no effect without HOROVODISH_AUTOTUNE=1 (--autotune)",
            RuntimeWarning,
            stacklevel=3,
        )


basics.follow(lambda _: None, _notice_log_without_autotune, lambda: None)
