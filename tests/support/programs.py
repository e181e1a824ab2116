"""Random programs of collectives: what every rank calls, and what must come out according to NumPy.

A program is a list of phases. Each ends with a call that blocks, and those are in one order on all ranks; before it
come calls that give handles, which each rank makes in an order of its own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from support.model import FLOATS, INTEGERS, OPS, Array, adasum, reduced, values

KINDS = [
    "allreduce",
    "allgather",
    "broadcast",
    "alltoall",
    "reducescatter",
    "sparse_allreduce",
    "allgather_object",
    "broadcast_object",
    "barrier",
]
ONLY_BLOCKING = {"allgather_object", "broadcast_object", "barrier"}
ONLY_WITH_HANDLE = {"sparse_allreduce"}
GROUPED = {"allreduce", "allgather", "reducescatter"}
IN_PLACE = {"allreduce", "broadcast"}
REDUCING = {"allreduce", "reducescatter", "sparse_allreduce"}
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (2, 3), (5, 0, 2), (4, 1, 3), (70, 50)]


@dataclass(frozen=True)
class Call:
    """One collective, the same on every rank that takes part.

    Attributes:
        kind: the function, without `grouped_` and `_async`.
        name: None to have it counted.
        ranks: that take part.
        members: dtype and shape of each tensor of the group, or of the only one; the first dimension is replaced where
            the ranks' may differ.
        splits: for alltoall, how many rows each rank sends to each; None for equally many.
        transposed: the tensors are not contiguous.
        dropped: nobody waits for it.
    """

    kind: str
    name: str | None
    ranks: tuple[int, ...]
    members: tuple[tuple[str, tuple[int, ...]], ...]
    op: str = "Sum"
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    splits: tuple[tuple[int, ...], ...] | None = None
    in_place: bool = False
    grouped: bool = False
    transposed: bool = False
    dropped: bool = False

    def arrays(self, rank: int) -> list[Array]:
        """What a rank gives."""
        return [values(dtype, self._shape(shape, rank), rank, self.op) for dtype, shape in self.members]

    def expected(self, rank: int) -> list[Array]:
        """What a rank gets; in float64 where that is the exact result of a reduction of floating-point numbers."""
        by_rank = [self.arrays(each) for each in self.ranks]
        own = self.ranks.index(rank)
        return [self._combined([arrays[i] for arrays in by_rank], own) for i in range(len(self.members))]

    def scale(self) -> float:
        """A bound on what is computed on the way."""
        return 4.0 * len(self.ranks) * max(1.0, self.prescale) ** 3 * max(1.0, self.postscale)

    def _shape(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        own = self.ranks.index(rank)
        if self.kind == "alltoall":
            return (sum(self.splits[own]) if self.splits else shape[0] * len(self.ranks), *shape[1:])
        if self.kind == "allgather" and shape:
            return ((shape[0] + 2 * rank) % 5, *shape[1:])
        return shape

    def _combined(self, arrays: list[Array], own: int) -> Array:
        if self.kind == "broadcast":
            return arrays[self.ranks.index(self.root)]
        if self.kind == "allgather":
            return np.concatenate([np.atleast_1d(array) for array in arrays])
        if self.kind == "alltoall":
            parts = [np.split(array, np.cumsum(self._sent(i))[:-1])[own] for i, array in enumerate(arrays)]
            return np.concatenate(parts)
        total = adasum(arrays) if self.op == "Adasum" else reduced(arrays, self.op, self.prescale, self.postscale)
        return np.array_split(total, len(self.ranks))[own] if self.kind == "reducescatter" else total

    def _sent(self, index: int) -> tuple[int, ...]:
        size = len(self.ranks)
        return self.splits[index] if self.splits else (self.members[0][1][0],) * size

    def received(self, rank: int) -> list[int]:
        """With splits: how many rows come from each rank."""
        assert self.splits is not None
        return [row[self.ranks.index(rank)] for row in self.splits]


@dataclass
class Phase:
    with_handles: list[Call] = field(default_factory=list)
    blocking: Call | None = None


def program(seed: int, sets: list[tuple[int, ...]]) -> list[Phase]:
    """The program of a seed.

    Args:
        seed: any number.
        sets: the ranks of each process set that may be used.
    """
    choice = random.Random(seed)
    names = iter(range(1000))
    phases = []
    for _ in range(choice.randint(1, 4)):
        phase = Phase()
        for _ in range(choice.randint(0, 5)):
            kind = choice.choice([kind for kind in KINDS if kind not in ONLY_BLOCKING])
            # Few names, so that they come again with other tensors; but what nobody waits for may still be under way.
            dropped = choice.random() < 0.1
            name = f"dropped {seed} {next(names)}" if dropped else f"name {next(names)}"
            phase.with_handles.append(_call(choice, kind, name, sets, dropped))
        kind = choice.choice([kind for kind in KINDS if kind not in ONLY_WITH_HANDLE])
        phase.blocking = _call(choice, kind, choice.choice([None, f"name {next(names)}"]), sets, False)
        phases.append(phase)
    return phases


def _call(choice: random.Random, kind: str, name: str | None, sets: list[tuple[int, ...]], dropped: bool) -> Call:
    ranks = choice.choice(sets)
    grouped = kind in GROUPED and choice.random() < 0.4
    op = choice.choice(_ops(kind))
    members = tuple(_member(choice, kind, op) for _ in range(choice.randint(1, 3) if grouped else 1))
    scaled = kind in REDUCING - {"sparse_allreduce"} and all(dtype in FLOATS for dtype, _ in members) and op != "Adasum"
    in_place = kind in IN_PLACE and choice.random() < 0.5
    splits = None
    if kind == "alltoall" and choice.random() < 0.7:
        splits = tuple(tuple(choice.choice([0, 1, 4]) for _ in ranks) for _ in ranks)
    return Call(
        kind,
        name,
        ranks,
        members,
        op,
        choice.choice([1.0, 0.5, 2.0]) if scaled else 1.0,
        choice.choice([1.0, -1.5]) if scaled else 1.0,
        choice.choice(ranks),
        splits,
        in_place,
        grouped,
        not in_place and choice.random() < 0.2,
        dropped,
    )


def _ops(kind: str) -> list[str]:
    if kind not in REDUCING:
        return ["Sum"]
    return ["Sum", "Average"] if kind == "sparse_allreduce" else [*OPS, *(["Adasum"] if kind == "allreduce" else [])]


def _member(choice: random.Random, kind: str, op: str) -> tuple[str, tuple[int, ...]]:
    dtypes = [*FLOATS, *INTEGERS] if kind in REDUCING else [*FLOATS, *INTEGERS, "bool"]
    if op == "Adasum":
        # One number of one rank may all but cancel another's, and then no two ways to compute it agree.
        return choice.choice(["float32", "float64"]), choice.choice([(0,), (7,), (4, 1, 3), (70, 50)])
    rows = kind in ("alltoall", "reducescatter", "sparse_allreduce")
    return choice.choice(dtypes), choice.choice([shape for shape in SHAPES if shape or not rows])


def difference_of_objects(result: Any, expected: Any) -> str:
    return "" if result == expected else f"{result!r} instead of {expected!r}"
