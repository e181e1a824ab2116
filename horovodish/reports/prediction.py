"""`horovodish predict`: a table of what more ranks would give."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from horovodish.predictions.cluster import Cluster, read_cluster
from horovodish.predictions.quantities import QuantityError
from horovodish.predictions.steps import STRATEGIES, Prediction, predict
from horovodish.predictions.workload import Workload, read_workload
from horovodish.reports.durations import text_of_bytes, text_of_seconds

__all__ = ["run"]

WORTH_IT = 0.9
"""An allreduce of less efficiency is where one should send less."""


def run(model: str, cluster: str | None, most: int, *, strong: bool, ranks_per_host: int | None) -> int:
    """Print the table, and return the exit status.

    Args:
        model: a page of `horovodish report`, or MODEL.yaml.
        cluster: CLUSTER.yaml; None: the cluster of `Cluster()`.
        most: of ranks.
        strong: all ranks together have as large a batch as before.
        ranks_per_host: in place of that of the cluster.
    """
    try:
        workload = read_workload(Path(model))
        machines = read_cluster(Path(cluster)) if cluster else Cluster()
    except QuantityError as problem:
        print(f"horovodish: {problem}", file=sys.stderr)
        return 1
    if ranks_per_host:
        machines = replace(machines, ranks_per_host=ranks_per_host)
    for line in _lines(workload, machines, most, strong=strong):
        print(line)
    return 0


def numbers_of_ranks(most: int) -> list[int]:
    """1, 2, 4 and so on, and the last one."""
    numbers = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    return numbers if numbers[-1] == most else [*numbers, most]


def _lines(workload: Workload, cluster: Cluster, most: int, *, strong: bool) -> Iterator[str]:
    numbers = numbers_of_ranks(most)
    table = {
        strategy.name: [predict(workload, cluster, ranks, strategy, strong=strong) for ranks in numbers]
        for strategy in STRATEGIES
    }
    yield (
        f"a step with {text_of_seconds(workload.work)} of own work and {text_of_bytes(workload.bytes)} of gradients in "
        f"{len(workload.buckets)} buckets; hosts of {cluster.ranks_per_host} ranks, "
        f"{cluster.bandwidth * 8 / 1e9:g} Gbit/s, {text_of_seconds(cluster.latency)}"
    )
    yield ""
    names = list(table)
    yield "ranks " + "".join(f"{name:>22}" for name in names)
    yield "      " + f"{'step  efficiency':>22}" * len(names)
    for index, ranks in enumerate(numbers):
        yield f"{ranks:>5} " + "".join(_cell(table[name][index]) for name in names)
    yield ""
    memory = [f"{name} {text_of_bytes(table[name][-1].memory)}" for name in names if name[:4] in ("allr", "ZeRO")]
    yield f"memory of a rank with {numbers[-1]}: {', '.join(memory)}"
    yield from _advice(table, numbers, cluster)


def _cell(it: Prediction) -> str:
    return f"{text_of_seconds(it.step):>14}  {it.efficiency:>6.0%}"


def _advice(table: dict[str, list[Prediction]], numbers: Sequence[int], cluster: Cluster) -> Iterator[str]:
    poor = next((each for each in table["allreduce"] if each.efficiency < WORTH_IT), None)
    if poor is None:
        yield f"An allreduce keeps {WORTH_IT:.0%} efficiency up to {numbers[-1]} ranks."
        return
    index = numbers.index(poor.ranks)
    better = max(table, key=lambda name: table[name][index].efficiency)
    yield (
        f"From {poor.ranks} ranks on an allreduce is below {WORTH_IT:.0%}: {poor.efficiency:.0%}. "
        f"{better} would have {table[better][index].efficiency:.0%} there."
    )
    if cluster.rank_memory and table["allreduce"][index].memory > cluster.rank_memory:
        fits = next((name for name in table if table[name][index].memory <= cluster.rank_memory), "no strategy")
        yield f"A rank has {text_of_bytes(cluster.rank_memory)}, in which {fits} fits."
