"""The JAX primitive behind every operation: collectives on flat lists of arrays, described by static values.

One call of the primitive holds all operations that belong together, such as the buckets of a tree of gradients, so
that JAX's transformations never take them apart. What each transformation makes of it stands in `autograd.py`,
what is compiled in `lowering.py`, and what happens outside of jit in `eager.py`.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive

from horovodish.collectives.operation import checked_splits, scattered_rows
from horovodish.collectives.process_sets import ProcessSet, checked_id, global_process_set
from horovodish.collectives.reduce_ops import Average, ReduceOp, Sum

T = TypeVar("T")

primitive = Primitive("horovodish")
primitive.multiple_results = True


@dataclass(frozen=True)
class Collective:
    """One operation of the engine on a group of arrays. Hashable, as JAX wants it of what it compiles for.

    Attributes:
        kind: a key of `_native.KINDS`.
        name: the same on every rank. The second use of it in a compiled program gets the number 2, and so on.
        unnamed: the user gave no name, so `name` is a place in the source; outside of jit the call is counted instead.
        part: follows the name where a tree is cut into several operations.
        members: what follows the name, for each array.
        total_rows: of an allgather, the rows that all ranks give, by member; empty where every rank gives as many.
        horovods_gradients: of an operation of a gradient, what it was computed for, see `collective_gradients`; else
            None.
    """

    kind: str
    name: str
    unnamed: bool
    members: tuple[str, ...] = ("",)
    part: str = ""
    op: ReduceOp = Sum
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    root_rank: int = 0
    process_set: ProcessSet = global_process_set
    total_rows: tuple[int, ...] = ()
    horovods_gradients: bool | None = None

    @property
    def is_linear(self) -> bool:
        """Whether its derivative is an operation of the same kind or the opposite one."""
        return self.op in (Average, Sum)

    def derived(self, suffix: str, chosen: Sequence[bool], **changes: Any) -> Collective:
        """An operation of the chosen members that needs a name of its own beside this one."""
        members = tuple(member for member, has in zip(self.members, chosen, strict=True) if has)
        rows = tuple(rows for rows, has in zip(self.total_rows, chosen, strict=False) if has)
        return replace(self, name=self.name + suffix, members=members, **{"total_rows": rows, **changes})


@dataclass(frozen=True)
class Tree:
    """What the operations on a tree have in common.

    Attributes:
        name: of the tree; empty for an operation on one array or on a group of arrays.
        leaves: how many there are.
        structure: a digest of the operations that there are, 64 bits, signed. Their members are compared one by one.
    """

    name: str = ""
    leaves: int = 0
    structure: int = 0


def trees(collectives: Sequence[Collective]) -> list[Tree]:
    """The tree that each of the operations of one call of the primitive is a part of."""
    by_name: dict[str, list[Collective]] = defaultdict(list)
    for collective in collectives:
        by_name[collective.name].append(collective)
    found = {name: _tree(name, parts) for name, parts in by_name.items()}
    return [found[collective.name] if collective.part else Tree() for collective in collectives]


def _tree(name: str, parts: Sequence[Collective]) -> Tree:
    digest = hashlib.blake2b("\n".join(part.part for part in parts).encode(), digest_size=8).digest()
    leaves = sum(len(part.members) for part in parts)
    return Tree(name, leaves, int.from_bytes(digest, "little", signed=True))


def run(collectives: Sequence[Collective], arrays: Sequence[Any]) -> list[jax.Array]:
    """The results of the operations, in the order of their arrays.

    Args:
        collectives: what to do.
        arrays: the members of the first operation, then those of the second one, and so on; also traced ones.

    Raises:
        What `horovodish.collectives` lists; NotInitializedError before `init()`.
    """
    for collective in collectives:
        checked_id(collective.process_set)
    if not collectives:
        return []
    results: list[jax.Array] = primitive.bind(*arrays, collectives=tuple(collectives))
    return results


def by_collective(collectives: Sequence[Collective], flat: Sequence[T]) -> Iterator[tuple[Collective, Sequence[T]]]:
    """Each operation with its part of a flat list of something that each member has."""
    begin = 0
    for collective in collectives:
        end = begin + len(collective.members)
        yield collective, flat[begin:end]
        begin = end


def result_shape(collective: Collective, index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a result, where every rank gives as many rows."""
    if collective.kind == "allgather":
        rows = collective.total_rows[index] if collective.total_rows else shape[0] * collective.process_set.size()
        return (rows, *shape[1:])
    if collective.kind == "reducescatter":
        return (scattered_rows(shape[0], collective.process_set), *shape[1:])
    if collective.kind == "alltoall":
        checked_splits(None, shape[0], collective.process_set.size(), collective.name)
    return shape


@primitive.def_abstract_eval
def _results(*arrays: ShapedArray, collectives: tuple[Collective, ...]) -> list[ShapedArray]:
    return [
        ShapedArray(result_shape(collective, index, array.shape), array.dtype)
        for collective, members in by_collective(collectives, arrays)
        for index, array in enumerate(members)
    ]
