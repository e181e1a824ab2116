"""What an elastic job costs while nothing happens:  horovodish run -np 2 --min-np 1 python benchmarks/elastic_cost.py

Steps of a PyTorch model of 25 million parameters are taken in a block of `hvd.elastic.attempt()`, whose end is a
commit, and outside of any, in turns. `save()` of 100 MB takes turns with a copy of the same arrays to memory that was
written before. It prints medians, and for the steps also means, because a commit is copied now and then.
"""

import argparse
from collections.abc import Callable
from statistics import fmean, median

import numpy as np
import recovery
import torch
from rounds import alternate, say, timed

import horovodish.torch as hvd
from horovodish.runtime import basics

MEGABYTES = 100


def main() -> None:
    """Measures and prints, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    hvd.init()
    (inside, outside), means, operations = steps(arguments.rounds)
    say(f"step: {inside * 1e3:.2f} ms in a block, {outside * 1e3:.2f} ms outside; ratio {inside / outside:.3f}")
    say(f"means: {means[0] * 1e3:.2f} ms in a block, {means[1] * 1e3:.2f} ms outside; ratio {means[0] / means[1]:.3f}")
    say(f"operations of the engine for a step: {operations[0]} in a block, {operations[1]} outside")
    saved, copied = saves(arguments.rounds)
    ratio = saved / copied
    say(f"save() of {MEGABYTES} MB: {saved * 1e3:.1f} ms, copy: {copied * 1e3:.1f} ms; ratio {ratio:.2f}")


def steps(rounds: int) -> tuple[tuple[float, float], tuple[float, float], tuple[int, int]]:
    """Seconds of a step inside of a block and outside, medians and means, and how many operations each needs."""
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

    for _ in range(8):  # it learns how long a copy takes
        elastic_step()
    counts = tuple(operations_of(each) for each in (elastic_step, step))
    taken = in_turns(rounds, elastic_step, step)
    return medians(taken), (fmean(taken["one"]), fmean(taken["other"])), (counts[0], counts[1])


def saves(rounds: int) -> tuple[float, float]:
    """Seconds of a commit, and of a copy of the same bytes."""
    arrays = [np.ones(MEGABYTES * 1_000_000 // 40) for _ in range(5)]
    targets = [np.zeros_like(array) for array in arrays]
    state = hvd.elastic.ObjectState(arrays=arrays)

    def copy() -> None:
        for target, array in zip(targets, arrays, strict=True):
            np.copyto(target, array)

    return medians(in_turns(rounds, state.save, copy))


def in_turns(rounds: int, one: Callable[[], object], other: Callable[[], object]) -> dict[str, list[float]]:
    """Seconds of two functions."""
    return alternate({"one": timed(one), "other": timed(other)}, rounds, {"one": 3, "other": 3})


def medians(taken: dict[str, list[float]]) -> tuple[float, float]:
    """Return the median seconds of both functions."""
    return median(taken["one"]), median(taken["other"])


def operations_of(function: Callable[[], object]) -> int:
    """How many operations of the engine succeed meanwhile."""
    before = basics.engine().completed()
    function()
    return basics.engine().completed() - before


if __name__ == "__main__":
    main()
