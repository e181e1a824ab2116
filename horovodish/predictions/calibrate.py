"""The program of the ranks of `horovodish predict --calibrate CLUSTER.yaml`.

The ranks of each host reduce among themselves, then the first ranks of all hosts, then all ranks. It takes some
seconds.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import horovodish as hvd
from horovodish.collectives.process_sets import ProcessSet
from horovodish.predictions.steps import PRECISIONS, wire_bytes
from horovodish.runtime import basics

SMALL, LARGE = 1, 4 << 20  # elements of float32
SMALL_ROUNDS, LARGE_ROUNDS = 300, 15
OPERATIONS, SMALL_BYTES = 50, 8 << 10
TURNS = 5


def _median(elements: int, rounds: int, process_set: ProcessSet, compression: Any = None) -> float:
    """Seconds of an allreduce, of the rank that is slowest."""
    values = np.ones(elements, np.float32)
    times = []
    for number in range(rounds):
        hvd.barrier(process_set)
        begun = time.perf_counter()
        hvd.allreduce(values, op=hvd.Sum, name="calibration", process_set=process_set, compression=compression)
        if number:  # the first one connects
            times.append(time.perf_counter() - begun)
    return float(statistics.median(times))


def _operation_seconds() -> float:
    """Seconds of each of many small operations of all ranks, all at the same time."""
    values = [np.ones(SMALL_BYTES // 4, np.float32) for _ in range(OPERATIONS)]
    times = []
    for _ in range(SMALL_ROUNDS // 10):
        hvd.barrier()
        begun = time.perf_counter()
        handles = [hvd.allreduce_async(each, op=hvd.Sum, name=f"small {i}") for i, each in enumerate(values)]
        for handle in handles:
            handle.wait()
        times.append(time.perf_counter() - begun)
    return statistics.median(times) / OPERATIONS


def _set_of(ranks: list[int]) -> ProcessSet:
    return hvd.global_process_set if len(ranks) == hvd.size() else hvd.add_process_set(ranks)


def measured() -> dict[str, str]:
    """The lines of the file, on rank 0. Every rank must call it."""
    hosts = [list(ranks) for ranks in basics.running().topology.hosts]
    local = max(map(len, hosts))
    sets = [_set_of(ranks) for ranks in hosts if len(ranks) > 1]
    across = _set_of([ranks[0] for ranks in hosts]) if len(hosts) > 1 else None
    lines = {"ranks_per_host": str(local), "operation": f"{_operation_seconds() * 1e6:.1f} us"}
    length = 4.0 * LARGE
    within = 0.0
    for own in sets:
        if own.included():
            small, large = _median(SMALL, SMALL_ROUNDS, own), _median(LARGE, LARGE_ROUNDS, own)
            lines["wake"] = f"{small / 2 * 1e6:.1f} us"
            lines["memory"] = f"{length / large / 1e9:.3g} GB/s"
            within = large
    if across is not None and across.included():
        small, large = _median(SMALL, SMALL_ROUNDS, across), _median(LARGE, LARGE_ROUNDS, across)
        coded = _median(LARGE, LARGE_ROUNDS, across, hvd.Compression.int8)
        lines["latency"] = f"{small / 2 * 1e6:.1f} us"
        lines["bandwidth"] = f"{wire_bytes(len(hosts), length) / large * 8 / 1e9:.3g} Gbit/s"
        lines["efficiency"] = "1"
        wire = PRECISIONS[-1].between(4) * large
        lines["encode"] = f"{2 * length / max(coded - wire, 0.1 * coded) / 1e9:.3g} GB/s"
    if across is not None and sets:
        of_all, of_slowest = [], []  # in turns: a machine has slow and fast moments
        for _ in range(TURNS):
            of_slowest.append(max(within, _median(LARGE, LARGE_ROUNDS, across) if across.included() else 0.0))
            of_all.append(_median(LARGE, LARGE_ROUNDS, hvd.global_process_set))
        slowest = statistics.median(of_slowest)
        beyond = statistics.median(of_all) - slowest
        if beyond > 0.1 * slowest:  # less is noise
            lines["processing"] = f"{length / beyond / 1e9:.3g} GB/s"
    return lines


def main() -> None:
    """Rank 0 writes the file, whose name is the argument."""
    output = Path(sys.argv[1])
    hvd.init()
    lines = measured()
    if hvd.rank() == 0:
        text = "".join(f"{key}: {value}\n" for key, value in lines.items())
        print(text, end="")
        if "bandwidth" not in lines:
            print("One host has no link to measure: add `link:` to the file.")
        try:
            output.write_text(text)
        except OSError as problem:
            sys.exit(f"{output} cannot be written by rank 0: {problem.strerror}. What was measured is printed above.")


if __name__ == "__main__":
    main()
