"""Simulates worlds: random programs or elastic jobs with faults. For a seed that fails, prints a smaller one.

python tests/simulation/simulate.py --seeds 0:1000
python tests/simulation/simulate.py --jobs --seeds 42
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from simulation import jobs, programs

MOST_FAILURES = 5


def failure_of(kind: Any, made: Any) -> AssertionError | None:
    """What does not hold in a program or a job; None: all is well."""
    try:
        kind.run(made)
    except AssertionError as problem:
        return problem
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:1000", help="the first one and the one after the last, as in 0:1000")
    parser.add_argument("--jobs", action="store_true", help="elastic jobs instead of programs")
    options = parser.parse_args()
    first, _, end = options.seeds.partition(":")
    kind: Any = jobs if options.jobs else programs
    of_seed = jobs.job_of if options.jobs else programs.program_of
    seeds = range(int(first), int(end or int(first) + 1))
    began, failed, done = time.perf_counter(), 0, 0
    for seed in seeds:
        made = of_seed(seed)
        done += 1
        if failure_of(kind, made) is None:
            continue
        failed += 1
        small = programs.shrunk(made, lambda candidate: failure_of(kind, candidate) is not None, kind.smaller)
        problem = failure_of(kind, small)
        assert problem is not None
        print(f"seed {seed}: {problem}\n{small}\nThe last events:", *problem.__notes__, sep="\n", flush=True)
        if failed == MOST_FAILURES:
            break
    seconds = time.perf_counter() - began
    print(f"{done} worlds, {failed} failed, {60 * done / seconds:.0f} worlds a minute")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
