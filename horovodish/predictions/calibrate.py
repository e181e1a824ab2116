"""The program of the ranks of `horovodish predict --calibrate CLUSTER.yaml`.

The ranks of each host reduce among themselves, then the first ranks of all hosts, then all ranks. It takes some
seconds.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import numpy as np

import horovodish as hvd
from horovodish._native import CODECS, DTYPES
from horovodish.collectives.operation import Codec, text_of
from horovodish.collectives.process_sets import ProcessSet, checked_id
from horovodish.errors import from_native
from horovodish.predictions.steps import wire_bytes
from horovodish.runtime import basics

SMALL, BUCKET = 1, 1 << 20  # elements of float32
SMALL_ROUNDS, LARGE_ROUNDS = 300, 8
OPERATIONS, SMALL_BYTES = 50, 8 << 10
BUCKETS = 8
INT8 = Codec(CODECS["int8"], 0.0, error_feedback=True, start=0)
TURNS = 5


def _median(count: int, elements: int, rounds: int, process_set: ProcessSet, codec: Codec | None = None) -> float:
    """Seconds until buckets have been averaged that this rank submits all at once, as an optimizer does."""
    values = np.ones((count, elements), np.float32)
    name = f"calibration of {count} x {elements} {text_of(codec)}"
    shape: tuple[int, ...] = (elements,)
    members = [(f"{name}, {number}", DTYPES["float32"], shape, number) for number in range(count)]
    codecs = [text_of(codec)] * count
    identity = checked_id(process_set)
    plan = basics.engine().plan(name, hvd.Average, 1.0, 1.0, members, [-1] * count, identity, codecs=codecs)
    times = []
    for turn in range(rounds):
        hvd.barrier(process_set)
        begun = time.perf_counter()
        for number, bucket in enumerate(values):
            plan.submit(number, bucket.ctypes.data, bucket.ctypes.data)
        plan.keep(values)  # if Ctrl-C ends the wait
        while not plan.wait(1.0):
            pass
        if error := plan.error():
            raise from_native(*error)
        plan.reset()
        if turn:  # the first one connects
            times.append(time.perf_counter() - begun)
    return float(statistics.median(times))


def _large(process_set: ProcessSet, codec: Codec | None = None) -> float:
    return _median(BUCKETS, BUCKET, LARGE_ROUNDS, process_set, codec)


def _small(process_set: ProcessSet) -> float:
    return _median(1, SMALL, SMALL_ROUNDS, process_set)


def _set_of(ranks: list[int]) -> ProcessSet:
    return hvd.global_process_set if len(ranks) == hvd.size() else hvd.add_process_set(ranks)


def measured() -> dict[str, str]:
    """The lines of the file, on rank 0. Every rank must call it."""
    everyone = hvd.global_process_set
    hosts = [list(ranks) for ranks in basics.running().topology.hosts]
    local = max(map(len, hosts))
    sets = [_set_of(ranks) for ranks in hosts if len(ranks) > 1]
    across = _set_of([ranks[0] for ranks in hosts]) if len(hosts) > 1 else None
    operation = _median(OPERATIONS, SMALL_BYTES // 4, SMALL_ROUNDS // 10, everyone) / OPERATIONS
    lines = {"ranks_per_host": str(local), "operation": f"{operation * 1e6:.1f} us"}
    bucket = 4.0 * BUCKET
    length = BUCKETS * bucket
    within = beyond = 0.0
    for own in sets:
        if own.included():
            within = _large(own)
            lines["wake"] = f"{_small(own) / 2 * 1e6:.1f} us"
            lines["memory"] = f"{length / within / 1e9:.3g} GB/s"
    if across is not None and across.included():
        lines["latency"] = f"{_small(across) / 2 * 1e6:.1f} us"
        sent = BUCKETS * wire_bytes(len(hosts), bucket)
        lines["bandwidth"] = f"{sent / _large(across) * 8 / 1e9:.3g} Gbit/s"
        lines["efficiency"] = "1"
    if across is not None and sets:
        of_all, of_slowest = [], []  # in turns: a machine has slow and fast moments
        for _ in range(TURNS):
            of_slowest.append(max(within, _large(across) if across.included() else 0.0))
            of_all.append(_large(everyone))
        slowest = statistics.median(of_slowest)
        beyond = statistics.median(of_all) - slowest
        if beyond > 0.1 * slowest:  # less is noise
            lines["processing"] = f"{length / beyond / 1e9:.3g} GB/s"
        else:
            beyond = 0.0
    if across is not None:
        coded = _large(everyone, INT8)
        lines["encode"] = f"{2 * length / local / max(coded - beyond, 0.1 * coded) / 1e9:.3g} GB/s"
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
