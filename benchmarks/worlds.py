"""All-reduce calls within a host and between hosts, in one table:  python benchmarks/worlds.py

Runs allreduce.py in three worlds in turns: two ranks on one host, two hosts with one rank each, and two hosts with two
ranks each. The hosts are network namespaces, which only root can make. The table has the medians of all turns: our
time, and our time divided by the times of mpi4py and gloo in the same turn. Below 1, ours takes less. Other checkouts
that have a .venv can be measured in the same turns, to look at before and after:

    python benchmarks/worlds.py --turns 5 . ../before

A machine has slow and fast moments. The last line tells them apart, by the time of mpi4py for 64 KiB on one host.
"""

import argparse
import csv
import os
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from machine import command, machine
from plots import panels, save

SIZES = [4, 4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20]
WORLDS = {
    "one host": ["horovodish", "run", "-np", "2", "python", "benchmarks/allreduce.py"],
    "1+1 hosts": ["python", "benchmarks/two_hosts.py", "1", "benchmarks/allreduce.py"],
    "2+2 hosts": ["python", "benchmarks/two_hosts.py", "2", "benchmarks/allreduce.py"],
}
PEERS = ("mpi4py", "gloo")

Key = tuple[str, str, int]
"""A checkout, a world and a size."""


def microseconds(checkout: Path, world: str, sizes: Sequence[int], rounds: int) -> dict[int, dict[str, float]]:
    """The median times of one run, by size and contender."""
    binaries = (checkout / ".venv/bin").resolve()
    environment = {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "figures.csv")
        options = ["--dtypes", "float32", "--rounds", str(rounds), "--csv", str(path), "--sizes", *map(str, sizes)]
        subprocess.run([*WORLDS[world], *options], cwd=checkout, env=environment, check=True, stdout=subprocess.DEVNULL)
        times: dict[int, dict[str, float]] = defaultdict(dict)
        for row in csv.DictReader(path.read_text().splitlines()):
            times[int(row["bytes"])][row["contender"]] = float(row["p50_us"])
    return times


def named(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB" if size >= 1 << 10 else f"{size} B"


def plot(ratios: dict[Key, dict[str, list[float]]], checkout: str, sizes: Sequence[int], path: Path) -> None:
    """Ours over each peer by size, a panel for each peer and a line for each world."""
    drawing, axes = panels(len(PEERS))
    for axis, peer in zip(axes, PEERS, strict=True):
        for world in WORLDS:
            medians = [statistics.median(ratios[checkout, world, size][peer]) for size in sizes]
            axis.plot(sizes, medians, marker="o", label=world)
        axis.axhline(1, color="gray", linestyle=":")
        axis.set(title=f"horovodish over {peer}", xlabel="bytes", ylabel="time over time", xscale="log", yscale="log")
        axis.legend()
    save(drawing, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", default=["."], help="what to measure, in turns")
    parser.add_argument("--turns", type=int, default=5, help="runs of each world")
    parser.add_argument("--rounds", type=int, default=4, help="blocks of each contender and size within a run")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of the tensors")
    parser.add_argument("--plot", type=Path, help="draws the ratios of the first checkout there, as SVG")
    options = parser.parse_args()
    print(f"{command()}\n{machine(['mpi4py', 'torch'])}\n", flush=True)
    times: dict[Key, list[float]] = defaultdict(list)
    ratios: dict[Key, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    moments = []
    for _ in range(options.turns):
        for world in WORLDS:
            for checkout in options.checkouts:
                for size, by_contender in microseconds(Path(checkout), world, options.sizes, options.rounds).items():
                    own = by_contender["horovodish"]
                    times[checkout, world, size].append(own)
                    for peer in PEERS:
                        ratios[checkout, world, size][peer].append(own / by_contender[peer])
                    if (world, size) == ("one host", 64 << 10):
                        moments.append(by_contender["mpi4py"])
    print(f"{'world':<10} {'size':>7}" + "".join(f"   {name:<24}" for name in options.checkouts))
    print(f"{'':<18}" + f"   {'us':>10}{'mpi4py':>7}{'gloo':>7}" * len(options.checkouts))
    for world in WORLDS:
        for size in options.sizes:
            cells = [
                f"   {statistics.median(times[key]):>10.1f}"
                + "".join(f"{statistics.median(ratios[key][peer]):>7.2f}" for peer in PEERS)
                for key in ((checkout, world, size) for checkout in options.checkouts)
            ]
            print(f"{world:<10} {named(size):>7}" + "".join(cells))
    print("\nmpi4py at 64 KiB on one host, us, by run: " + ", ".join(f"{moment:.0f}" for moment in moments))
    if options.plot:
        plot(ratios, options.checkouts[0], options.sizes, options.plot)


if __name__ == "__main__":
    main()
