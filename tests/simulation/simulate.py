"""Simulates worlds: random programs with faults, one for each seed. Prints a smaller program for a seed that fails.

python tests/simulation/simulate.py --seeds 0:1000
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from simulation.programs import Program, program_of, run, shrunk

MOST_FAILURES = 5


def failure_of(program: Program) -> AssertionError | None:
    """What does not hold in a program; None: all is well."""
    try:
        run(program)
    except AssertionError as problem:
        return problem
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:1000", help="the first one and the one after the last, as in 0:1000")
    first, _, end = parser.parse_args().seeds.partition(":")
    seeds = range(int(first), int(end or int(first) + 1))
    began, failed, done = time.perf_counter(), 0, 0
    for seed in seeds:
        program = program_of(seed)
        done += 1
        if failure_of(program) is None:
            continue
        failed += 1
        small = shrunk(program, lambda candidate: failure_of(candidate) is not None)
        problem = failure_of(small)
        assert problem is not None
        print(f"seed {seed}: {problem}\n{small}\nThe last events:", *problem.__notes__, sep="\n", flush=True)
        if failed == MOST_FAILURES:
            break
    seconds = time.perf_counter() - began
    print(f"{done} worlds, {failed} failed, {60 * done / seconds:.0f} worlds a minute")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
