"""Simulates worlds: random programs or elastic jobs with faults. For a seed that fails, prints a smaller one.

python tests/simulation/simulate.py --seeds 0:1000
python tests/simulation/simulate.py --jobs --seeds 42
python tests/simulation/simulate.py --jobs --seeds 0: --seconds 3600
python tests/simulation/simulate.py --replay tests/simulation/kept/NAME.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from simulation import jobs, programs, replays
from simulation.mpi import simulated_mpi

MOST_FAILURES = 5


def failure_of(kind: Any, made: Any, counts: Counter[str] | None = None) -> AssertionError | None:
    """What does not hold in a program or a job; None: all is well. Counts the faults that have happened."""
    try:
        world = kind.run(made)
    except AssertionError as problem:
        return problem
    if counts is not None:
        counts.update(world.happened)
    return None


def seeds_of(text: str) -> Iterable[int]:
    """The numbers that an argument names."""
    first, colon, end = text.partition(":")
    if colon and not end:
        return itertools.count(int(first))
    return range(int(first), int(end or int(first) + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seeds", default="0:1000", help="the first one and the one after the last; 0: has no last one"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no world after so long")
    parser.add_argument("--jobs", action="store_true", help="elastic jobs instead of programs")
    parser.add_argument("--replay", type=Path, help="run the world of this file instead")
    options = parser.parse_args()
    kind: Any = jobs if options.jobs else programs
    of_seed = jobs.job_of if options.jobs else programs.program_of
    worlds = ((seed, of_seed(seed)) for seed in seeds_of(options.seeds))
    if options.replay:
        kind, made = replays.read(options.replay)
        worlds = iter([(made.seed, made)])
    simulated_mpi()  # compiled before the clock starts
    began, counts, failed, done = time.perf_counter(), Counter[str](), 0, 0
    for seed, made in worlds:
        if time.perf_counter() - began > options.seconds:
            break
        done += 1
        if failure_of(kind, made, counts) is None:
            continue
        failed += 1
        small = programs.shrunk(made, lambda candidate: failure_of(kind, candidate) is not None, kind.smaller)
        problem = failure_of(kind, small)
        assert problem is not None
        print(f"seed {seed}: {problem}\n{small}", "To keep it as a file:", json.dumps(replays.plain(small)), sep="\n")
        print("The last events:", *problem.__notes__, sep="\n", flush=True)
        if failed == MOST_FAILURES:
            break
    seconds = time.perf_counter() - began
    print("Faults:", ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "none")
    print(f"{done} worlds, {failed} failed, {60 * done / seconds:.0f} worlds a minute")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
