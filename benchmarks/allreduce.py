"""All-reduce calls, ours beside mpi4py and gloo:  horovodish run -np 2 python benchmarks/allreduce.py

Every rank sums float32 in place with three contenders in turns: horovodish.allreduce_ on a NumPy array, mpi4py's
Allreduce with MPI.IN_PLACE, and torch.distributed over gloo. Times are of single calls, on all ranks; GB/s is the size
of the tensor over the median; a ratio below 1 means that ours takes less time.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import peers
import torch
import torch.distributed
from mpi4py import MPI

import horovodish

SIZES = [4, 4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20]


def named(size: int) -> str:
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size // factor} {unit}"
    return f"{size} B"


def timed(call: Callable[[], object]) -> Callable[[], float]:
    def measure() -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    return measure


def contenders(size: int) -> dict[str, Callable[[], float]]:
    arrays = [np.zeros(size // 4, np.float32) for _ in range(3)]
    tensor = torch.from_numpy(arrays[2])
    return {
        "horovodish": timed(lambda: horovodish.allreduce_(arrays[0], op=horovodish.Sum, name=f"benchmark {size}")),
        "mpi4py": timed(lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, arrays[1])),
        "gloo": timed(lambda: torch.distributed.all_reduce(tensor)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="blocks of each contender and size")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of the tensors")
    options = parser.parse_args()
    peers.start()
    peers.say(f"{peers.command()}\n{peers.machine()}\n")
    peers.say(
        f"{'size':>8} {'contender':<11} {'min us':>10} {'p50 us':>10} {'p99 us':>10} {'GB/s':>7}  ours/peer (p50)"
    )
    for size in options.sizes:
        calls = max(4, min(200, (64 << 20) // size))
        seconds = peers.alternate(contenders(size), options.rounds, calls, warmup=5)
        ours = peers.percentile(seconds["horovodish"], 50)
        for name, values in seconds.items():
            median = peers.percentile(values, 50)
            figures = [min(values) * 1e6, median * 1e6, peers.percentile(values, 99) * 1e6]
            ratio = "" if name == "horovodish" else f"  {ours / median:.2f}"
            peers.say(
                f"{named(size):>8} {name:<11} "
                + " ".join(f"{figure:>10.1f}" for figure in figures)
                + f" {size / median / 1e9:>7.2f}{ratio}"
            )
    peers.stop()


if __name__ == "__main__":
    main()
