"""What the benchmarks of several ranks share, whatever the framework: figures, and contenders that alternate."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

import horovodish as hvd


def say(text: str = "") -> None:
    """Prints on rank 0."""
    if hvd.rank() == 0:
        print(text, flush=True)


def timed(call: Callable[[], object]) -> Callable[[], float]:
    """`call` as a contender for `alternate`."""

    def measure() -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    return measure


def alternate(
    contenders: Mapping[str, Callable[[], float]], rounds: int, calls: Mapping[str, int]
) -> dict[str, list[float]]:
    """Times the contenders in turns, so that a slow moment of the machine meets all of them.

    Args:
        contenders: by name, something that does one unit of work and returns the seconds that it took.
        rounds: how many blocks each contender has.
        calls: by name, how many units a block has, after one that does not count.

    Returns:
        The seconds of all units of all blocks, of all ranks, by name.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            hvd.barrier()
            contenders[name]()
            seconds[name] += [contenders[name]() for _ in range(calls[name])]
    return {name: hvd.allgather(np.array(values)).tolist() for name, values in seconds.items()}


def percentile(values: Sequence[float], percent: int) -> float:
    """The value below which `percent` of the values lie."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
