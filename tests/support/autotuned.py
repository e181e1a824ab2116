"""Jobs with autotune on: what the ranks are warned of, and what the log says."""

from __future__ import annotations

import contextlib
import csv
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from support.ranks import run_ranks


@dataclass
class Job:
    """What is left of a job: the warnings about autotune by rank, the lines of the log, and what rank 0 returned."""

    warnings: list[list[str]]
    log: list[str]
    returned: list[str]

    def check_search(self, start: str | None = None) -> None:
        """Several thresholds were tried, among them the one that the settings had, and nobody was warned."""
        assert self.warnings == [[], []]
        tried = {row["fusion_threshold_mb"] for row in csv.DictReader(self.log)}
        assert len(tried) > 1 and (start is None or start in tried)

    def check_no_search(self) -> None:
        """Rank 0 was warned once that programs are not tuned, and nothing was tried."""
        assert [len(warned) for warned in self.warnings] == [1, 0]
        assert "--autotune) has no effect on programs that are traced" in self.warnings[0][0]
        assert not self.log


@contextlib.contextmanager
def autotune_warnings() -> Iterator[list[str]]:
    """A list that has the warnings about autotune at the end."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(warning.message) for warning in caught if "autotune" in str(warning.message)]


def run_with_autotune(
    train: Callable[[], tuple[list[str], list[str]]], folder: Path, env: Mapping[str, str] | None = None
) -> Job:
    """Two ranks whose every step is a sample; `train` gives its `autotune_warnings()` and something else."""
    log = folder / "autotune.csv"
    tuning = {
        "HOROVODISH_AUTOTUNE": "1",
        "HOROVODISH_AUTOTUNE_LOG": str(log),
        "HOROVODISH_AUTOTUNE_STEPS_PER_SAMPLE": "1",
    }
    results = run_ranks(train, 2, env={**tuning, **(env or {})})
    lines = log.read_text().splitlines() if log.exists() else []
    return Job([warned for warned, _ in results], lines, results[0][1])
