"""What the gradients of collectives should be, by formula, for every framework with the same functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from support.model import Array

SETTINGS = ("exact", "horovod")

_ROWS, _COLUMNS = 2, 3
_BEFORE, _AFTER = 2.0, 0.25


class Case(NamedTuple):
    """A collective whose result each rank multiplies by weights of its own; the sum of the products is its loss.

    Attributes:
        label: for messages.
        call: `call(hvd, tensors)` makes the collective of a framework and gives its results.
        shape: of every tensor that is passed.
        results: the shapes of the results on a rank.
        gradients: what a rank should get for its tensors.
    """

    label: str
    call: Callable[[Any, list[Any]], list[Any]]
    shape: tuple[int, ...]
    results: list[tuple[int, ...]]
    gradients: Callable[[int], list[Array]]


def weights(rank: int, index: int, shape: tuple[int, ...]) -> Array:
    """What a rank multiplies a result by."""
    return np.random.default_rng([rank, index]).uniform(-1, 1, shape).astype(np.float32)


def cases(ranks: int, setting: str) -> Iterator[Case]:
    """All collectives that have a gradient, alone and in groups of two, under `collective_gradients=setting`."""
    every = range(ranks)
    whole = (ranks * _ROWS, _COLUMNS)
    part = (_ROWS, _COLUMNS)
    is_horovods = setting == "horovod"
    root = ranks - 1

    def own(rank: int, array: Array) -> Array:
        return array[rank * _ROWS : (rank + 1) * _ROWS]

    def summed(index: int, shape: tuple[int, ...]) -> Array:
        return sum((weights(rank, index, shape) for rank in every), np.zeros(shape, np.float32))

    for count in (1, 2):
        some = range(count)
        group = "grouped_" if count == 2 else ""

        def called(kind: str, group: str = group, **options: Any) -> Callable[[Any, list[Any]], list[Any]]:
            def call(hvd: Any, tensors: list[Any]) -> list[Any]:
                chosen = {key: getattr(hvd, each) if key == "op" else each for key, each in options.items()}
                collective = getattr(hvd, group + kind, None) or getattr(hvd, kind)  # some take trees
                result = collective(tensors if group else tensors[0], **chosen)
                return list(result) if group else [result]

            return call

        for op in ("Sum", "Average"):
            factor = _BEFORE * _AFTER / (ranks if op == "Average" else 1)
            scaled = {"op": op, "prescale_factor": _BEFORE, "postscale_factor": _AFTER}
            yield Case(
                f"{group}allreduce {op}",
                called("allreduce", **scaled),
                part,
                [part] * count,
                lambda _, f=factor, some=some: [summed(index, part) * f for index in some],
            )
            yield Case(
                f"{group}reducescatter {op}",
                called("reducescatter", **scaled),
                whole,
                [part] * count,
                lambda _, f=factor * (ranks if is_horovods else 1), some=some: [
                    np.concatenate([weights(rank, index, part) for rank in every]) * f for index in some
                ],
            )
        yield Case(
            f"{group}allgather",
            called("allgather"),
            part,
            [whole] * count,
            lambda rank, f=1 / ranks if is_horovods else 1, some=some: [
                own(rank, summed(index, whole)) * f for index in some
            ],
        )
    yield Case(
        "broadcast",
        lambda hvd, tensors: [hvd.broadcast(tensors[0], root_rank=root)],
        part,
        [part],
        lambda rank: [summed(0, part) * (1 / ranks if is_horovods else 1) * (rank == root)],
    )
    yield Case(
        "alltoall",
        lambda hvd, tensors: [hvd.alltoall(tensors[0])],
        whole,
        [whole],
        lambda rank: [np.concatenate([own(rank, weights(other, 0, whole)) for other in every])],
    )


def loss(case: Case, hvd: Any, tensors: list[Any], weighted_sum: Callable[[Any, Array], Any]) -> Any:
    """A rank's loss; `weighted_sum(result, weights)` is one number of the framework."""
    shapes = enumerate(case.results)
    given = [weights(hvd.rank(), index, shape) for index, shape in shapes]
    return sum(weighted_sum(*pair) for pair in zip(case.call(hvd, tensors), given, strict=True))
