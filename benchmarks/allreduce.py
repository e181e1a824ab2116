"""All-reduce calls, ours beside mpi4py and gloo:  horovodish run -np 2 python benchmarks/allreduce.py

Every rank sums in place with all contenders in turns: horovodish.allreduce_ on a NumPy array, mpi4py's Allreduce with
MPI.IN_PLACE (float32 only: MPI has no bfloat16), and torch.distributed over gloo. `memcpy` is the limit to reach: all
ranks copy the same bytes from one private array to another at once. Times are of single calls, on all ranks; GB/s is
the size of the tensor over the median; a ratio below 1 means that ours takes less time. Takes a minute with 2 ranks,
and two with 4 ranks on 2 cores.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import peers
import torch
import torch.distributed
from machine import write_csv
from mpi4py import MPI
from plots import panels, save

import horovodish

SIZES = [4, 64, 1 << 10, 4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20, 256 << 20]
DTYPES: dict[str, tuple[Any, torch.dtype]] = {
    "float32": (np.float32, torch.float32),
    "bfloat16": (ml_dtypes.bfloat16, torch.bfloat16),
}
OURS = "horovodish"
COMPARED_ELEMENTS = 16 << 20
BLOCK_SECONDS = 0.04


@dataclass(frozen=True)
class Figures:
    """How long the calls of one contender took."""

    ranks: int
    hosts: int
    dtype: str
    bytes: int
    contender: str
    calls: int
    min_us: float
    p50_us: float
    p99_us: float
    gb_per_s: float
    ours_over_this: float

    def __str__(self) -> str:
        ratio = "" if self.contender == OURS else f"{self.ours_over_this:>7.2f}"
        return (
            f"{self.dtype:<8} {named(self.bytes):>8} {self.contender:<10} {self.calls:>6} "
            f"{self.min_us:>10.1f} {self.p50_us:>10.1f} {self.p99_us:>10.1f} {self.gb_per_s:>7.2f} {ratio}"
        )


HEADER = (
    f"{'dtype':<8} {'size':>8} {'contender':<10} {'calls':>6} "
    f"{'min us':>10} {'p50 us':>10} {'p99 us':>10} {'GB/s':>7} ours/this (p50)"
)


def named(size: int) -> str:
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size // factor} {unit}"
    return f"{size} B"


def ours(dtype: str, size: int) -> Callable[[], float]:
    array = np.zeros(size, np.uint8).view(DTYPES[dtype][0])
    return peers.timed(lambda: horovodish.allreduce_(array, op=horovodish.Sum, name=f"{dtype} {size}"))


def contenders(dtype: str, size: int) -> dict[str, Callable[[], float]]:
    array = np.zeros(size // 4, np.float32)
    tensor = torch.zeros(size // DTYPES[dtype][1].itemsize, dtype=DTYPES[dtype][1])
    # Written to: the pages of an array of zeros would all be one page, which never leaves the cache.
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    of_mpi = {"mpi4py": peers.timed(lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array))}
    return {
        OURS: ours(dtype, size),
        **(of_mpi if dtype == "float32" else {}),
        "gloo": peers.timed(lambda: torch.distributed.all_reduce(tensor)),
        "memcpy": peers.timed(lambda: np.copyto(target, source)),
    }


def measured(dtype: str, size: int, rounds: int) -> Iterator[Figures]:
    taking_part = contenders(dtype, size)
    calls = peers.calls_within(taking_part, BLOCK_SECONDS, most=200)
    seconds = peers.alternate(taking_part, rounds, calls)
    own = peers.percentile(seconds[OURS], 50)
    for name, values in seconds.items():
        median = peers.percentile(values, 50)
        yield Figures(
            horovodish.size(),
            horovodish.cross_size(),
            dtype,
            size,
            name,
            len(values),
            min_us=min(values) * 1e6,
            p50_us=median * 1e6,
            p99_us=peers.percentile(values, 99) * 1e6,
            gb_per_s=size / median / 1e9,
            ours_over_this=own / median,
        )


def bfloat16_over_float32(rounds: int) -> float:
    """The time of an all-reduce in bfloat16, divided by the time for the same number of elements in float32."""
    taking_part = {dtype: ours(dtype, COMPARED_ELEMENTS * DTYPES[dtype][1].itemsize) for dtype in DTYPES}
    seconds = peers.alternate(taking_part, rounds, peers.calls_within(taking_part, 2 * BLOCK_SECONDS, most=200))
    return peers.percentile(seconds["bfloat16"], 50) / peers.percentile(seconds["float32"], 50)


def plot(figures: Sequence[Figures], path: Path) -> None:
    """The median time over the size, one panel for each dtype."""
    dtypes = list(dict.fromkeys(row.dtype for row in figures))
    drawing, axes = panels(len(dtypes))
    for axis, dtype in zip(axes, dtypes, strict=True):
        for contender in dict.fromkeys(row.contender for row in figures if row.dtype == dtype):
            rows = [row for row in figures if (row.dtype, row.contender) == (dtype, contender)]
            style = {"linestyle": ":", "color": "gray"} if contender == "memcpy" else {"marker": "o"}
            axis.plot([row.bytes for row in rows], [row.p50_us for row in rows], label=contender, **style)
        axis.set(xlabel="bytes", ylabel="median time, us", title=f"allreduce, {dtype}, {figures[0].ranks} ranks")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.legend()
    save(drawing, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="blocks of each contender and size")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of the tensors")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--csv", type=Path, help="writes the figures there")
    parser.add_argument("--plot", type=Path, help="draws them there, as SVG")
    options = parser.parse_args()
    peers.start()
    peers.say(f"{peers.setup()}\n\n{HEADER}")
    figures = []
    for dtype in options.dtypes:
        for size in options.sizes:
            for row in measured(dtype, size, options.rounds):
                figures.append(row)
                peers.say(str(row))
    if options.dtypes == list(DTYPES):
        ratio = bfloat16_over_float32(options.rounds)
        peers.say(f"{COMPARED_ELEMENTS >> 20} Mi elements in bfloat16 take {ratio:.2f} x the time of float32")
    if horovodish.rank() == 0:
        if options.csv:
            write_csv(figures, options.csv)
        if options.plot:
            plot(figures, options.plot)
    peers.stop()


if __name__ == "__main__":
    main()
