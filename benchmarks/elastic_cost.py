"""What an elastic job costs while nothing happens:  horovodish run -np 2 --min-np 1 python benchmarks/elastic_cost.py

Steps of a PyTorch model of 25 million parameters are taken in a block of `hvd.elastic.attempt()` that looks for new
hosts, and outside of any, in turns. `commit()` of 100 MB takes turns with a copy of the same arrays to memory that was
written before. It prints medians.
"""

import argparse
from collections.abc import Callable
from statistics import median

import numpy as np
import recovery
import torch
from rounds import alternate, say, timed

import horovodish.torch as hvd
from horovodish import basics

MEGABYTES = 100


def main() -> None:
    """Measures and prints, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    hvd.init()
    inside, outside, operations = steps(arguments.rounds)
    say(f"step: {inside * 1e3:.2f} ms in a block, {outside * 1e3:.2f} ms outside; ratio {inside / outside:.3f}")
    say(f"operations of the engine for a step: {operations[0]} in a block, {operations[1]} outside")
    committed, copied = commits(arguments.rounds)
    ratio = committed / copied
    say(f"commit of {MEGABYTES} MB: {committed * 1e3:.1f} ms, copy: {copied * 1e3:.1f} ms; ratio {ratio:.2f}")


def steps(rounds: int) -> tuple[float, float, tuple[int, int]]:
    """Seconds of a step inside of a block and outside, and how many operations each needs."""
    layers = [torch.nn.Linear(recovery.FEATURES, recovery.FEATURES) for _ in range(recovery.LAYERS)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    inputs = torch.randn(4, recovery.FEATURES)
    state = hvd.elastic.TorchState(model, optimizer, step=0)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        state.step += 1

    def elastic_step() -> None:
        with hvd.elastic.attempt(state):
            step()
            state.check_host_updates()

    elastic_step()
    counts = tuple(operations_of(each) for each in (elastic_step, step))
    return *medians(rounds, elastic_step, step), (counts[0], counts[1])


def commits(rounds: int) -> tuple[float, float]:
    """Seconds of a commit, and of a copy of the same bytes."""
    arrays = [np.ones(MEGABYTES * 1_000_000 // 40) for _ in range(5)]
    targets = [np.zeros_like(array) for array in arrays]
    state = hvd.elastic.ObjectState(arrays=arrays)

    def copy() -> None:
        for target, array in zip(targets, arrays, strict=True):
            np.copyto(target, array)

    return medians(rounds, state.commit, copy)


def medians(rounds: int, one: Callable[[], object], other: Callable[[], object]) -> tuple[float, float]:
    """Seconds of two functions that take turns."""
    taken = alternate({"one": timed(one), "other": timed(other)}, rounds, {"one": 3, "other": 3})
    return median(taken["one"]), median(taken["other"])


def operations_of(function: Callable[[], object]) -> int:
    """How many operations of the engine succeed meanwhile."""
    before = basics.engine().completed()
    function()
    return basics.engine().completed() - before


if __name__ == "__main__":
    main()
