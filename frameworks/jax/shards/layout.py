"""Which parts of an optimizer's parameters and state a rank has."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax
from jax import numpy as jnp

from horovodish.collectives.adapter import dealt_rows
from horovodish.collectives.process_sets import ProcessSet
from horovodish.gradients.shards import owners

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """The parts of one rank.

    Attributes:
        paths, shapes: of each parameter.
        parameters: for each leaf of the optimizer's state, the index of the parameter that it belongs to; None where it
            is the same on all ranks.
        state: the shape and dtype of each leaf of the state of the plain optimizer.
        process_set: the ranks that share.
        across: the ranks of other sets that have the same parts as this one, and this one; None: there are none.
        owners: of each parameter, the place of the rank that has all of it; None if every rank has elements of each.
    """

    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    parameters: tuple[int | None, ...]
    state: tuple[jax.ShapeDtypeStruct, ...]
    process_set: ProcessSet
    across: ProcessSet | None
    owners: tuple[int, ...] | None = None

    def by_parameter(self) -> Layout:
        """The same with whole parameters for the ranks that there are now. Not collective.

        Raises:
            ValueError: there are fewer parameters than ranks.
        """
        counts, ranks = [math.prod(shape) for shape in self.shapes], self.process_set.size()
        if (given := sum(count > 0 for count in counts)) < ranks:
            raise ValueError(
                f'shard_by="parameter" gives each rank at least one parameter, but there are {given} with elements for '
                f"{ranks} ranks. Remedy: leave shard= out, or pass a process_set= of fewer ranks"
            )
        return replace(self, owners=tuple(owners(counts, [0] * ranks)))

    @property
    def own(self) -> list[int]:
        """The parameters that the optimizer steps on this rank, in whole or in part."""
        place = self.process_set.rank()
        return [index for index in range(len(self.shapes)) if self.owners is None or self.owners[index] == place]

    @property
    def leaves_ranks_out(self) -> bool:
        """Whether there are ranks without an element of any parameter."""
        return self.owners is None and all(math.prod(shape) < self.process_set.size() for shape in self.shapes)

    def cuts(self, shape: Sequence[int], index: int) -> list[int]:
        """Where the part of each rank ends in an array of this shape that belongs to a parameter, in elements."""
        count, ranks = math.prod(shape), self.process_set.size()
        if self.owners is None:  # as a reducescatter of all elements deals them out
            return [*itertools.accumulate(dealt_rows(count, self.process_set))]
        return [0] * self.owners[index] + [count] * (ranks - self.owners[index])

    def shapes_of_pieces(self) -> list[list[tuple[int, ...]]]:
        """The shapes that pieces have on any rank by element, without empty ones: the largest, and the smallest."""
        counts, ranks = [math.prod(shape) for shape in self.shapes], self.process_set.size()
        largest = [-(-count // ranks) for count in counts]
        smallest = [max(count // ranks, min(count, 1)) for count in counts]
        return [[*map(_shape_of_elements, self.shapes, each)] for each in (largest, smallest)]

    def pieces(self, tree: Any) -> Any:
        """This rank's part of a tree of whole parameters, as the optimizer gets it."""
        leaves, definition = jax.tree_util.tree_flatten(tree)
        return self.shaped([self._elements(index, leaf) for index, leaf in enumerate(leaves)], definition)

    def shaped(self, elements: Sequence[Any], definition: Any) -> Any:
        """A tree of this rank's elements of each parameter. A parameter of another rank is left out of the tree."""
        found: list[Any] = [optax.MaskedNode()] * len(elements)
        for index in self.own:
            found[index] = self._shaped(index, elements[index], self.shapes[index])
        return jax.tree_util.tree_unflatten(definition, found)

    def part(self, place: int, whole: Any) -> Any:
        """This rank's part of a leaf of the whole state, by its place. What another rank has is empty here."""
        index = self.parameters[place]
        return whole if index is None else self._shaped(index, self._elements(index, whole), jnp.shape(whole))

    def _elements(self, index: int, whole: Any) -> Any:
        """This rank's elements of a parameter, or of what belongs to it; shape (n,)."""
        ends, place = [0, *self.cuts(jnp.shape(whole), index)], self.process_set.rank()
        flat = whole.reshape(-1) if isinstance(whole, np.ndarray) else jnp.reshape(whole, -1)
        return flat[ends[place] : ends[place + 1]]

    def _shaped(self, index: int, elements: Any, shape: tuple[int, ...]) -> Any:
        if self.owners is None:
            return elements.reshape(_shape_of_elements(shape, elements.size))
        return elements.reshape(shape) if index in self.own else elements

    def stepped(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves of this rank's state that the optimizer steps."""
        held = {None, *self.own}
        return [leaf for leaf, index in zip(leaves, self.parameters, strict=True) if index in held]

    def with_others(self, stepped: Sequence[Any]) -> list[Any]:
        """The opposite of `stepped`, with arrays without elements for what other ranks have."""
        held, following = {None, *self.own}, iter(stepped)
        return [
            next(following) if index in held else jnp.zeros(0, each.dtype)
            for each, index in zip(self.state, self.parameters, strict=True)
        ]


def _shape_of_elements(shape: Sequence[int], count: int) -> tuple[int, ...]:
    # As many dimensions as the parameter has, since optimizers may treat matrices and vectors differently.
    return (count, *[1] * (len(shape) - 1))
