"""What the negotiation costs rank 0 as the world grows:  python benchmarks/negotiation_scale.py

Negotiates 1000 tensors among 2 to 512 ranks of one host, and among 2 to 16384 ranks on hosts of 8. All ranks are state
machines of one thread, and messages are handed over in memory. The figures are rank 0's: the messages and bytes that it
receives and sends, the CPU time for them, and the memory of its negotiation. The depth is the number of messages, one
after the other, from the farthest rank to rank 0. The first step states every tensor in full. In later steps the
response cache knows the tensors; the table has their median.

Half of the runs submit all tensors "together", before any rank looks at messages. They empty the processor's caches
before each turn of rank 0, as a training step does. The other runs negotiate each tensor before they submit the next
one, "in turn", which costs most. Their CPU time grows a little with the memory of the other simulated ranks. Runs with
response caches that are too small follow. All of it takes some minutes, a C++ compiler, and 15 GiB of memory for the
largest world.

A second table shows the engine's all-reduce between the same hosts: its schedule, its steps, and the bytes that a host
sends, as a multiple of the tensor's bytes.
"""

import argparse
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from machine import command, machine, write_csv
from plots import panels, save

from horovodish import _native
from horovodish.predictions.steps import steps_and_bytes

TENSORS = 1000
RANKS = [2**power for power in range(1, 15)]
MOST_IN_TURN = 512
"""The largest number of ranks for the runs on one host, and for the runs "in turn"."""
RANKS_PER_HOST = 8
CACHE_RANKS = 64
CAPACITY = 4096
SMALL_CAPACITIES = [1000, 999, 500, 100, 0]
STEPS = 8
LENGTHS = (4 << 10, 1 << 20, 64 << 20)
"""Bytes of the tensors whose schedules are shown."""
CSRC = Path(__file__).parent.parent / "horovodish" / "csrc"
SOURCES = ["negotiation", "pending", "tensor_table", "request", "rank_set", "tree", "unacknowledged"]


@dataclass(frozen=True)
class Cost:
    """What a step costs rank 0."""

    ranks: int
    ranks_per_host: int
    capacity: int
    submitted: str  # "together" or "in turn"
    step: str  # "first" or "later"
    messages_in: int
    bytes_in: int
    messages_out: int
    bytes_out: int
    cpu_us: float
    memory_bytes: int
    depth: int


def compiled(folder: str) -> str:
    """The program beside this script, built."""
    program = str(Path(folder, "negotiation_scale"))
    sources = [str(CSRC / "negotiation" / f"{name}.cc") for name in SOURCES]
    options = ["-std=c++20", "-O3", "-ffp-contract=off", f"-I{CSRC}"]
    subprocess.run(["c++", *options, str(Path(__file__).with_suffix(".cc")), *sources, "-o", program], check=True)
    return program


def measured(program: str, ranks: int, ranks_per_host: int, capacity: int, submitted: str) -> Iterator[Cost]:
    """The first step, and the median of the later ones."""
    per_turn = TENSORS if submitted == "together" else 1
    arguments = [ranks, ranks_per_host, TENSORS, capacity, STEPS, per_turn]
    done = subprocess.run([program, *map(str, arguments)], check=True, capture_output=True, text=True)
    first, *later = [[float(value) for value in line.split()] for line in done.stdout.splitlines()]
    for step, values in (
        ("first", first),
        ("later", [statistics.median(column) for column in zip(*later, strict=True)]),
    ):
        *counts, cpu_us, memory_bytes, depth = values
        numbers = [int(value) for value in counts]
        yield Cost(ranks, ranks_per_host, capacity, submitted, step, *numbers, cpu_us, int(memory_bytes), int(depth))


def study(program: str) -> list[Cost]:
    costs: list[Cost] = []
    for ranks in RANKS:
        is_small = ranks <= MOST_IN_TURN
        for ranks_per_host in dict.fromkeys([ranks] * is_small + [min(ranks, RANKS_PER_HOST)]):
            for submitted in ("together", *["in turn"] * is_small):
                costs += measured(program, ranks, ranks_per_host, CAPACITY, submitted)
    for capacity in SMALL_CAPACITIES:
        costs += measured(program, CACHE_RANKS, RANKS_PER_HOST, capacity, "together")
    return costs


def table(costs: Sequence[Cost]) -> str:
    lines = [
        f"{TENSORS} tensors; rank 0 only, in one step",
        f"{'ranks':>5} {'per host':>8} {'cache':>5} {'submitted':<9} {'step':<5} {'messages in':>11} {'out':>6} "
        f"{'bytes in':>9} {'out':>9} {'CPU us':>8} {'KiB held':>8} {'depth':>5}",
    ]
    lines += [
        f"{cost.ranks:>5} {cost.ranks_per_host:>8} {cost.capacity:>5} {cost.submitted:<9} {cost.step:<5} "
        f"{cost.messages_in:>11} {cost.messages_out:>6} {cost.bytes_in:>9} {cost.bytes_out:>9} {cost.cpu_us:>8.0f} "
        f"{cost.memory_bytes / 1024:>8.0f} {cost.depth:>5}"
        for cost in costs
    ]
    return "\n".join(lines)


def schedules() -> str:
    """The engine's choice between hosts, by the number of ranks and the bytes of a tensor."""
    lines = [
        f"schedules between hosts of {RANKS_PER_HOST} ranks; each rank of a host exchanges its share of the bytes",
        f"{'ranks':>5} {'hosts':>5} {'bytes':>9} {'schedule':<9} {'steps':>5} {'times the bytes sent':>20}",
    ]
    for ranks in (ranks for ranks in RANKS if ranks > RANKS_PER_HOST):
        hosts = ranks // RANKS_PER_HOST
        for length in LENGTHS:
            share = length // RANKS_PER_HOST
            steps, times = steps_and_bytes(hosts, share)
            name = _native.fastest_allreduce(hosts, share)
            lines.append(f"{ranks:>5} {hosts:>5} {length:>9} {name:<9} {steps:>5} {times:>20.2f}")
    return "\n".join(lines)


def plot(costs: Sequence[Cost], path: Path) -> None:
    """Messages, bytes and CPU time over the number of ranks."""
    figure, axes = panels(4)
    quantities = {
        "messages in and out": lambda cost: cost.messages_in + cost.messages_out,
        "bytes in and out": lambda cost: cost.bytes_in + cost.bytes_out,
        "CPU time, us": lambda cost: cost.cpu_us,
        "memory, MiB": lambda cost: cost.memory_bytes / 2**20,
    }
    for axis, (label, quantity) in zip(axes, quantities.items(), strict=True):
        for one_host in (True, False):
            for step, submitted in (("first", "together"), ("later", "together"), ("later", "in turn")):
                line = [
                    cost
                    for cost in costs
                    if (cost.capacity, cost.step, cost.submitted) == (CAPACITY, step, submitted)
                    and cost.ranks_per_host == (cost.ranks if one_host else min(cost.ranks, RANKS_PER_HOST))
                ]
                kind = f"{step} step" if submitted == "together" else "one by one"
                name = f"{'one host' if one_host else f'hosts of {RANKS_PER_HOST}'}, {kind}"
                style = {"marker": "o" if one_host else "s", "linestyle": "-" if one_host else "--"}
                color = {"first": "C3", "later": "C0"}[step] if submitted == "together" else "C2"
                axis.plot([cost.ranks for cost in line], list(map(quantity, line)), label=name, color=color, **style)
        axis.set(xlabel="ranks", title=f"Rank 0, {TENSORS} tensors: {label}")
        axis.set_xscale("log", base=2)
        axis.set_xticks([2, 16, 128, 1024, 16384], ["2", "16", "128", "1024", "16384"])
        if label.startswith("memory"):
            axis.set_ylim(0, 1.2 * axis.get_ylim()[1])
        else:
            axis.set_yscale("log")
    axes[0].legend(ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.1))
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, help="writes the figures there")
    parser.add_argument("--plot", type=Path, help="draws them there, as SVG")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        costs = study(compiled(folder))
    print(f"{command()}\n{machine()}\n\n{table(costs)}\n\n{schedules()}")
    if options.csv:
        write_csv(costs, options.csv)
    if options.plot:
        plot(costs, options.plot)


if __name__ == "__main__":
    main()
