"""`horovodish predict`: tables of what more ranks would give."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from horovodish.predictions.cluster import Cluster, read_cluster
from horovodish.predictions.quantities import QuantityError
from horovodish.predictions.steps import STRATEGIES, Case, Prediction, predicted, steps_to_train
from horovodish.predictions.workload import Workload, read_workload
from horovodish.reports.durations import text_of_bytes, text_of_hours, text_of_seconds
from horovodish.reports.prediction_page import WEAK_SCALING, prediction_page

__all__ = ["run"]

WORTH_IT = 0.9
"""An allreduce of less efficiency is where one should send less."""


def run(
    models: Sequence[str],
    cluster: str | None,
    most: int,
    *,
    strong: bool,
    ranks_per_host: int | None,
    steps: int | None,
    output: str | None,
) -> int:
    """Print a table for each model, write the page, and return the exit status.

    Args:
        models: pages of `horovodish report`, or files such as MODEL.yaml.
        cluster: CLUSTER.yaml; None: the cluster of `Cluster()`.
        most: the largest number of ranks.
        strong: all ranks together have as large a batch as before.
        ranks_per_host: overrides the number in CLUSTER.yaml.
        steps: of the training, with as many ranks as the run had; overrides the number in the description.
        output: where the page goes; None: no page.
    """
    inputs = [*models, *([] if cluster is None else [cluster])]
    if output is not None and os.path.realpath(output) in map(os.path.realpath, inputs):
        return _failed(f"{output} is an input of the prediction: give its page another name")
    try:
        usual = Cluster(ranks_per_host=ranks_per_host or Cluster.ranks_per_host)
        machines = usual if cluster is None else read_cluster(Path(cluster), ranks_per_host)
        workloads = {model: read_workload(Path(model), machines) for model in models}
    except QuantityError as problem:
        return _failed(str(problem))
    if steps:
        workloads = {model: replace(each, steps=float(steps)) for model, each in workloads.items()}
    numbers = numbers_of_ranks(most)
    for index, (model, workload) in enumerate(workloads.items()):
        print("\n" * (index > 0) + about(model, workload))
        for line in _lines(workload, machines, numbers, strong=strong):
            print(line)
    if output is not None:
        assumed = [*(about(model, each) for model, each in workloads.items()), _hosts(machines)]
        text = prediction_page(workloads, assumed, machines, numbers, strong=strong)
        try:
            Path(output).write_text(text, encoding="utf-8", errors="replace")
        except OSError as problem:
            return _failed(f"{Path(output)} cannot be written: {problem.strerror}")
        print(f"the page is {output}")
    return 0


def _failed(what: str) -> int:
    print(f"horovodish: {what}", file=sys.stderr)
    return 1


def numbers_of_ranks(most: int) -> list[int]:
    """1, 2, 4 and so on, and the last one."""
    numbers = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    return numbers if numbers[-1] == most else [*numbers, most]


def about(model: str, workload: Workload) -> str:
    """A description of a step."""
    measured = f" on each of {workload.ranks} ranks" if workload.ranks > 1 else ""
    buckets = f"{len(workload.buckets)} bucket{'s' * (len(workload.buckets) != 1)}"
    return (
        f"{model}: a step with {text_of_seconds(workload.work)} of own work{measured} and "
        f"{text_of_bytes(workload.bytes)} of gradients in {buckets}. Memory: {workload.states} numbers of state for "
        f"each parameter, and {text_of_bytes(workload.activations)} of activations"
    )


def _hosts(cluster: Cluster) -> str:
    return (
        f"hosts of {cluster.ranks_per_host} ranks, {cluster.bandwidth * 8 / 1e9:g} Gbit/s, "
        f"{text_of_seconds(cluster.latency)}; a host reduces {text_of_bytes(cluster.memory)}/s"
    )


def _lines(workload: Workload, cluster: Cluster, numbers: Sequence[int], *, strong: bool) -> Iterator[str]:
    every = iter(predicted(workload, [Case(cluster, ranks, each, strong) for each in STRATEGIES for ranks in numbers]))
    table = {strategy.name: [next(every) for _ in numbers] for strategy in STRATEGIES}
    yield _hosts(cluster)
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
    if workload.steps:
        yield from _time_to_train(workload, cluster, numbers)


def _cell(it: Prediction) -> str:
    return f"{text_of_seconds(it.step):>14}  {it.efficiency:>6.0%}"


def _time_to_train(workload: Workload, cluster: Cluster, numbers: Sequence[int]) -> Iterator[str]:
    yield ""
    of = "one rank" if workload.ranks == 1 else f"{workload.ranks} ranks"
    yield f"time to train with an allreduce: {workload.steps:.0f} steps of {of}"
    yield f"ranks {'weak scaling':>22}{'strong scaling':>22}"
    plain = [Case(cluster, ranks, STRATEGIES[0], strong) for ranks in numbers for strong in (False, True)]
    times = [
        text_of_hours(its.step * steps_to_train(workload, case.ranks, strong=case.strong))
        for case, its in zip(plain, predicted(workload, plain), strict=True)
    ]
    for index, ranks in enumerate(numbers):
        yield f"{ranks:>5} " + "".join(f"{each:>22}" for each in times[2 * index : 2 * index + 2])
    yield WEAK_SCALING


def _advice(table: dict[str, list[Prediction]], numbers: Sequence[int], cluster: Cluster) -> Iterator[str]:
    poor = next((each for each in table["allreduce"] if each.efficiency < WORTH_IT), None)
    index = numbers.index(poor.ranks) if poor else len(numbers) - 1
    if poor:
        better = max(table, key=lambda name: table[name][index].efficiency)
        yield (
            f"From {poor.ranks} ranks on, an allreduce has less than {WORTH_IT:.0%} efficiency. "
            f"{better} would have {table[better][index].efficiency:.0%}."
        )
    else:
        yield f"An allreduce keeps {WORTH_IT:.0%} efficiency up to {numbers[-1]} ranks."
    if cluster.rank_memory and table["allreduce"][-1].memory > cluster.rank_memory:
        # The memory of a strategy with shards falls with the ranks.
        fit = ((name, its.ranks) for name in table for its in table[name] if its.memory <= cluster.rank_memory)
        name, ranks = next(fit, ("no strategy", 0))
        fits = f"{name} fits from {ranks} ranks on" if ranks else f"{name} fits with {numbers[-1]} ranks"
        yield f"A rank has {text_of_bytes(cluster.rank_memory)} of memory: {fits}."
