"""Which elements of an optimizer's parameters and state a rank has."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from horovodish.collectives.adapter import dealt_rows
from horovodish.collectives.process_sets import ProcessSet

__all__ = ["Layout", "own_bounds"]


def own_bounds(shape: tuple[int, ...], process_set: ProcessSet) -> tuple[int, int]:
    """Where this rank's elements of a parameter begin and end, as a reducescatter of all of them deals them out."""
    ends = [0, *itertools.accumulate(dealt_rows(math.prod(shape), process_set))]
    return ends[process_set.rank()], ends[process_set.rank() + 1]


@dataclass(frozen=True)
class Layout:
    """The parts of one rank.

    Attributes:
        paths, shapes: of each parameter.
        bounds: where this rank's elements of each parameter begin and end.
        parameters: for each leaf of the optimizer's state, the index of the parameter whose elements it has a number
            for; None where it is the same on all ranks.
        process_set: the ranks that share.
    """

    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    bounds: tuple[tuple[int, int], ...]
    parameters: tuple[int | None, ...]
    process_set: ProcessSet

    @property
    def piece_shapes(self) -> list[tuple[int, ...]]:
        """Of this rank's pieces."""
        return self._shapes([end - begin for begin, end in self.bounds])

    def shapes_of_pieces(self) -> list[list[tuple[int, ...]]]:
        """The shapes that pieces have on any rank, without empty ones: the largest, and the smallest."""
        counts, ranks = [math.prod(shape) for shape in self.shapes], self.process_set.size()
        largest = [-(-count // ranks) for count in counts]
        return [self._shapes(largest), self._shapes([max(count // ranks, min(count, 1)) for count in counts])]

    def _shapes(self, counts: Sequence[int]) -> list[tuple[int, ...]]:
        # As many dimensions as the parameter has, since optimizers may treat matrices and vectors differently.
        return [(count, *[1] * (len(shape) - 1)) for shape, count in zip(self.shapes, counts, strict=True)]

    def pieces(self, tree: Any) -> Any:
        """This rank's elements of a tree of whole parameters."""
        leaves, definition = jax.tree_util.tree_flatten(tree)
        return jax.tree_util.tree_unflatten(definition, map(self.piece, range(len(leaves)), leaves))

    def piece(self, index: int, whole: Any) -> Any:
        """This rank's elements of a parameter, or of what has its shape."""
        begin, end = self.bounds[index]
        flat = whole.reshape(-1) if isinstance(whole, np.ndarray) else jnp.reshape(whole, -1)
        return flat[begin:end].reshape(self.piece_shapes[index])
