"""Many steps of many tensors in random orders: does anything grow?

    horovodish run -np 3 python benchmarks/soak.py --steps 10000

Every step reduces 200 tensors whose order of submission differs by rank and step; now and then a process set comes and
goes, and the engine stops and starts again. At intervals the largest values of all ranks are printed: resident memory,
descriptors, threads, segments of shared memory, and Python objects. The exit status is 1 if one of them grew, from the
second third of the steps to the last, by more than what is allowed below.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

import horovodish as hvd

TENSORS = 200
REPORTS = 12
LARGEST_ELEMENTS = 20_000
SET_EVERY_STEPS = 100
RESTARTS = 6
ALLOWED_GROWTH = {"KiB": 512, "descriptors": 0, "threads": 0, "segments": 0, "objects": 500}


def usage() -> dict[str, int]:
    """What this process holds."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    mappings = Path("/proc/self/maps").read_text()
    return {
        "KiB": pages * os.sysconf("SC_PAGESIZE") // 1024,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "segments": mappings.count("/memfd:horovodish") + mappings.count("sm_segment"),
        "objects": len(gc.get_objects()),
    }


def largest_usage() -> dict[str, int]:
    """The largest value of each kind on any rank."""
    own = usage()
    most = hvd.allreduce(np.array(list(own.values())), op=hvd.Max, name="usage")
    return dict(zip(own, most.tolist(), strict=True))


def step(arrays: list[np.ndarray], order: random.Random) -> None:
    """Reduces all arrays, submitted in a random order; some in groups of two, some gathered instead."""
    shuffled = list(range(0, TENSORS, 2))
    order.shuffle(shuffled)
    pending = []
    for index in shuffled:
        pair = arrays[index : index + 2]
        if index % 10 == 0:
            pending.append((index, hvd.grouped_allreduce_async(pair, op=hvd.Sum, name=f"group {index}")))
            continue
        for offset, array in enumerate(pair):
            pending.append((index, hvd.allreduce_async(array, op=hvd.Sum, name=f"tensor {index + offset}")))
        if index % 20 == 4:
            pending.append((index, hvd.allgather_async(array[:5], name=f"rows {index}")))
    order.shuffle(pending)
    for _, handle in pending:
        handle.wait()


def use_a_process_set() -> None:
    """Adds one, reduces in it and removes it."""
    chosen = hvd.add_process_set([0, hvd.size() - 1] if hvd.size() > 1 else [0])
    if chosen.included():
        hvd.allreduce(np.ones(1000), process_set=chosen)
    hvd.barrier()
    hvd.remove_process_set(chosen)


def run(steps: int) -> list[dict[str, int]]:
    """The usage at each report."""
    order = random.Random(os.getpid())
    sizes = random.Random(0)
    arrays = [np.ones(sizes.randrange(1, LARGEST_ELEMENTS), np.float32) for _ in range(TENSORS)]
    seen = []
    began = time.monotonic()
    for number in range(1, steps + 1):
        step(arrays, order)
        if number % SET_EVERY_STEPS == 0:
            use_a_process_set()
        if number % max(1, steps // RESTARTS) == 0:
            hvd.barrier()
            hvd.shutdown()
            hvd.init()
        if number % max(1, steps // REPORTS) == 0:
            seen.append(largest_usage())
            if hvd.rank() == 0:
                values = ", ".join(f"{value} {name}" for name, value in seen[-1].items())
                print(f"step {number}, {time.monotonic() - began:.0f} s: {values}", flush=True)
    return seen


def growth(seen: list[dict[str, int]]) -> dict[str, float]:
    """How much the median of each value grew from the second third of the reports to the last, if that is too much."""
    third = len(seen) // 3
    middle, last = seen[third : 2 * third], seen[2 * third :]
    by = {name: median(one[name] for one in last) - median(one[name] for one in middle) for name in ALLOWED_GROWTH}
    return {name: grown for name, grown in by.items() if grown > ALLOWED_GROWTH[name]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    options = parser.parse_args()
    hvd.init()
    grown = growth(run(options.steps))
    if hvd.rank() == 0:
        print(f"grown: {grown}" if grown else "nothing has grown", flush=True)
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
