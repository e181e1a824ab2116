"""The JAX primitive behind every operation: collectives on flat lists of arrays, described by static values.

One call of the primitive holds all operations that belong together, such as the buckets of a tree of gradients, so
that JAX's transformations never take them apart. `autograd.py` defines its transformations, `lowering.py` how it is
compiled, and `eager.py` how it runs outside of jit.
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

from horovodish.collectives.adapter import checked_splits, result_shape
from horovodish.collectives.operation import Family, Operation
from horovodish.collectives.process_sets import checked_id

T = TypeVar("T")

primitive = Primitive("horovodish")
primitive.multiple_results = True


@dataclass(frozen=True)
class Traced:
    """An operation on a group of arrays, and what JAX's transformations must know besides. Hashable, as JAX wants it.

    Attributes:
        operation: what to do. The second use of its name in a compiled program gets the number 2, and so on.
        unnamed: the user gave no name, so it is a place in the source; outside of jit the call is counted instead.
        part: follows the name where a tree is cut into several operations.
        members: for each array, the text that follows the name.
        rows: of each member's result, where its shape does not say: for an allgather with different numbers of rows on
            the ranks, and for a reducescatter by elements.
        horovods_gradients: for an operation of a gradient, what it was computed for, see `derivatives`; else None.
    """

    operation: Operation
    unnamed: bool = False
    part: str = ""
    members: tuple[str, ...] = ("",)
    rows: tuple[int, ...] = ()
    horovods_gradients: bool | None = None

    @property
    def name(self) -> str:
        """The name of the operation. The parts of a tree share it."""
        return str(self.operation.name)

    def changed(self, **fields: Any) -> Traced:
        """The same of a changed operation."""
        return replace(self, operation=self.operation._replace(**fields))

    def of_members(self, chosen: Sequence[bool]) -> Traced:
        """The operation of the chosen members."""
        members = tuple(member for member, has in zip(self.members, chosen, strict=True) if has)
        rows = tuple(rows for rows, has in zip(self.rows, chosen, strict=False) if has)
        return replace(self, members=members, rows=rows)


def whole(traced: Sequence[Traced], run: int = 0) -> list[Operation]:
    """The operations of one call of the primitive with all their names. The parts of a tree are a family.

    Args:
        traced: the operations, in the order of the call.
        run: tells the uses of the families apart.
    """
    by_name: dict[str, list[Traced]] = defaultdict(list)
    for each in traced:
        by_name[each.name].append(each)
    families = {name: _family(name, parts, run) for name, parts in by_name.items()}
    return [
        each.operation._replace(
            name=each.name + each.part,
            member_names=tuple(each.name + member for member in each.members),
            family=families[each.name] if each.part else None,
        )
        for each in traced
    ]


def _family(name: str, parts: Sequence[Traced], run: int) -> Family:
    digest = hashlib.blake2b("\n".join(part.part for part in parts).encode(), digest_size=8).digest()
    return Family(name, sum(len(part.members) for part in parts), int.from_bytes(digest, "little", signed=True), run)


def run(traced: Sequence[Traced], arrays: Sequence[Any], follows: Sequence[Any] = ()) -> list[jax.Array]:
    """The results of the operations, in the order of their arrays.

    Args:
        traced: what to do.
        arrays: the members of the first operation, then the members of the second, and so on; also traced arrays.
        follows: arrays with elements that a compiled program computes before it begins the operations.

    Raises:
        What `horovodish.collectives` lists; NotInitializedError before `init()`.
    """
    for each in traced:
        checked_id(each.operation.process_set)
    if not traced:
        return []
    results: list[jax.Array] = primitive.bind(*arrays, *follows, traced=tuple(traced))
    return results


def by_operation(traced: Sequence[Traced], flat: Sequence[T]) -> Iterator[tuple[Traced, Sequence[T]]]:
    """Each operation with its part of a flat list of something that each member has."""
    begin = 0
    for each in traced:
        end = begin + len(each.members)
        yield each, flat[begin:end]
        begin = end


@primitive.def_abstract_eval
def _results(*arrays: ShapedArray, traced: tuple[Traced, ...]) -> list[ShapedArray]:
    return [
        ShapedArray(_result_shape(each, index, array.shape), array.dtype)
        for each, members in by_operation(traced, arrays)
        for index, array in enumerate(members)
    ]


def _result_shape(traced: Traced, index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    operation = traced.operation
    if traced.rows:
        return (traced.rows[index], *shape[1:])
    if operation.kind == "alltoall":
        checked_splits(None, shape[0], operation.process_set.size(), traced.name)
    return result_shape(operation, shape)
