"""What recording a timeline costs:  horovodish run -np 2 python benchmarks/timeline_cost.py

The same work in short blocks with the timeline on and off, in turns, in one run. A round is a block of each; a block
counts with the median of its units. The ratio is the median over all rounds and ranks of on / off, so that slow moments
of the machine count little; beside it are the quartiles. 1.02 means that recording makes the work take 2 % longer.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import peers

import horovodish
from horovodish import _native
from horovodish.runtime import basics

TENSORS = 200


def allreduce_of(size: int) -> Callable[[], object]:
    array = np.zeros(size // 4, np.float32)
    return lambda: horovodish.allreduce_(array, op=horovodish.Sum, name=f"benchmark {size}")


def bucket_of(tensors: int, length: int) -> Callable[[], object]:
    """What a wrapped optimizer does in a step with one bucket."""
    arrays = [np.zeros(length, np.float32) for _ in range(tensors)]
    members = [(f"gradient {i}", _native.DTYPES["float32"], (length,), 0) for i in range(tensors)]
    plan = basics.engine().plan("benchmark", horovodish.Sum, 1.0, 1.0, members, [-1])

    def step() -> None:
        for index, array in enumerate(arrays):
            plan.submit(index, array.ctypes.data, array.ctypes.data)
        while not plan.wait(1.0):
            pass
        plan.reset()

    return step


def block(work: Callable[[], object], units: int) -> float:
    """The median of the seconds that a unit takes, after a few that do not count."""
    horovodish.barrier()
    for _ in range(units // 4):
        work()
    seconds = []
    for _ in range(units):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def rounds_of(work: Callable[[], object], units: int, rounds: int, path: Path) -> list[tuple[float, float]]:
    """The seconds of a unit without and with the timeline, by round and rank."""
    measured = []
    for number in range(rounds + 1):
        pair = {}
        for on in (False, True) if number % 2 == 0 else (True, False):
            if on:
                horovodish.start_timeline(path)
            pair[on] = block(work, units)
            if on:
                horovodish.stop_timeline()
        measured.append((pair[False], pair[True]))
    return [pair for ranks in horovodish.allgather_object(measured[1:]) for pair in ranks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--suffix", choices=[".json", ".records"], default=".json", help="records cost less")
    options = parser.parse_args()
    horovodish.init()
    works = {
        "allreduce of 4 KiB": (allreduce_of(4 << 10), 400),
        "allreduce of 8 MiB": (allreduce_of(8 << 20), 60),
        f"bucket of {TENSORS} x 4 KiB": (bucket_of(TENSORS, 1024), 20),
    }
    peers.say(f"{peers.setup()}\n")
    peers.say(f"{'work':<22} {'off us':>9} {'on us':>9}  on/off (quartiles)")
    with tempfile.TemporaryDirectory() as folder:
        for name, (work, units) in works.items():
            pairs = rounds_of(work, units, options.rounds, Path(folder, f"trace{options.suffix}"))
            off, on = (statistics.median(seconds) * 1e6 for seconds in zip(*pairs, strict=True))
            low, middle, high = statistics.quantiles([with_it / without for without, with_it in pairs], n=4)
            peers.say(f"{name:<22} {off:>9.1f} {on:>9.1f}  {middle:.3f} ({low:.3f} to {high:.3f})")
    horovodish.shutdown()


if __name__ == "__main__":
    main()
