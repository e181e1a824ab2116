"""How an optimizer's gradients become those of all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from horovodish.collectives import allreduce_async
from horovodish.compression import Compressor
from horovodish.keras.backends import as_slices, collectives, dense, is_sparse, knows_slices, name_in_step, runs_eagerly
from horovodish.process_sets import ProcessSet
from horovodish.reduce_ops import Max, ReduceOp

_ABSENT, _DENSE, _SPARSE = 0, 1, 2
"""What a rank has for a variable. The largest over the ranks says how it is reduced."""

Groups = int | Sequence[Sequence[Any]] | None


@dataclass
class Reduction:
    """The arguments of `DistributedOptimizer` that say how gradients are reduced.

    Attributes:
        name: of the reductions, unique among the optimizers of the process set.
        groups: variables whose gradients are reduced as a unit, or the number of such groups to make of all.
        local_variables: whose gradients stay those of the rank.
    """

    name: str
    op: ReduceOp
    compression: Compressor
    sparse_as_dense: bool
    prescale_factor: float
    postscale_factor: float
    groups: Groups
    process_set: ProcessSet
    local_variables: list[Any]
    scale_local_gradients: bool

    @property
    def alone(self) -> bool:
        """Whether this rank has nobody to reduce with: it is the only one, or outside the process set."""
        return self.process_set.size() == 1 or not self.process_set.included()

    @property
    def names_variables(self) -> bool:
        """Whether it takes the variables of the gradients to reduce them."""
        return bool(self.local_variables) or not (self.groups is None or isinstance(self.groups, int))

    def reduced(self, gradients: Sequence[Any], variables: Sequence[Any] | None) -> list[Any]:
        """The gradients of all ranks. Collective.

        Args:
            gradients: of this rank; None where it has none.
            variables: of the gradients; needed if `names_variables`.

        Returns:
            New gradients in the same order. One that is None on every rank stays None.
        """
        if self.alone:
            return list(gradients)
        local = _ids(self.local_variables)
        shared = [i for i in range(len(gradients)) if not local or id(_at(variables, i)) not in local]
        result = [g if i in shared else self._local(g) for i, g in enumerate(gradients)] if local else list(gradients)
        given = {i: gradients[i] for i in shared if gradients[i] is not None}
        eager = runs_eagerly() and variables is not None
        kinds = self._kinds(shared, given) if eager else None
        if kinds is not None:
            # Slices travel in another way, so what another rank has must be known before.
            sparse = np.equal(kinds.wait(), _SPARSE) if knows_slices() else np.zeros(len(shared))
            given = {
                i: _filled(given.get(i), _at(variables, i), among_slices)
                for i, among_slices in zip(shared, sparse, strict=True)
            }
        name = name_in_step(self.name)
        for number, members in enumerate(self._grouped(list(given), variables)):
            reduced = self._reduced_group(f"{name}.group{number}", [given[i] for i in members])
            for i, gradient in zip(members, reduced, strict=True):
                result[i] = gradient
        if kinds is not None:
            for i, kind in zip(shared, kinds.wait(), strict=True):
                if kind == _ABSENT:
                    result[i] = None
        return result

    def _local(self, gradient: Any) -> Any:
        scales = self.scale_local_gradients and gradient is not None
        return keras.ops.divide(gradient, self.process_set.size()) if scales else gradient

    def _kinds(self, shared: Sequence[int], given: dict[int, Any]) -> Any:
        """What any rank has for each of the places: a handle, because the answer may be needed only afterwards."""
        own = [
            _ABSENT if i not in given else _SPARSE if is_sparse(given[i]) and not self.sparse_as_dense else _DENSE
            for i in shared
        ]
        return allreduce_async(np.array(own, np.uint8), name=f"{self.name}.kinds", op=Max, process_set=self.process_set)

    def _reduced_group(self, name: str, gradients: list[Any]) -> list[Any]:
        if self.sparse_as_dense:
            gradients = [dense(gradient) for gradient in gradients]
        pairs = [self.compression.compress(gradient) for gradient in gradients]
        reduced = collectives().grouped_allreduce(
            [payload for payload, _ in pairs],
            name=name,
            op=self.op,
            prescale_factor=self.prescale_factor,
            postscale_factor=self.postscale_factor,
            process_set=self.process_set,
        )
        contexts = [context for _, context in pairs]
        return [self.compression.decompress(*pair) for pair in zip(reduced, contexts, strict=True)]

    def _grouped(self, places: list[int], variables: Sequence[Any] | None) -> Iterator[list[int]]:
        """The places of the gradients of each group; those in no list form the last one."""
        groups = self.groups
        if groups is None or isinstance(groups, int):
            count = min(groups or 1, len(places))
            bounds = [len(places) * number // max(count, 1) for number in range(count + 1)]
            yield from (places[begin:end] for begin, end in itertools.pairwise(bounds))
            return
        left = dict.fromkeys(places)
        for members in map(_ids, groups):
            group = [i for i in left if id(_at(variables, i)) in members]
            for i in group:
                del left[i]
            if group:
                yield group
        if left:
            yield list(left)


def checked_groups(num_groups: int, groups: Any) -> Groups:
    """What the two arguments say together.

    Raises:
        ValueError: a negative or fractional number, both at once, or lists that are none or share a variable.
    """
    if num_groups and groups is not None:
        raise ValueError("num_groups and groups say the same; pass groups alone")
    groups = num_groups or groups
    if groups is None or groups == 0:
        return None
    if isinstance(groups, int):
        if groups < 0 or isinstance(groups, bool):
            raise ValueError(f"groups={groups} is no number of groups; pass 1 or more, or lists of variables")
        return groups
    if not isinstance(groups, list | tuple) or not all(isinstance(group, list | tuple) for group in groups):
        raise ValueError(f"groups={groups!r} must be a number or a list of lists of variables")
    seen: set[int] = set()
    for group in groups:
        for variable in group:
            if id(variable) in seen:
                raise ValueError(f"groups: {_name(variable)} is in more than one group")
            seen.add(id(variable))
    return [list(group) for group in groups]


def check_members(what: str, chosen: Iterable[Any], variables: Sequence[Any]) -> None:
    """Passes variables that are among those of the optimizer.

    Raises:
        ValueError: naming one that is not.
    """
    known = _ids(variables)
    for variable in chosen:
        if id(variable) not in known:
            raise ValueError(
                f"{what}: {_name(variable)} is none of the optimizer's variables; pass some of "
                "model.trainable_variables"
            )


def _filled(gradient: Any, variable: Any, among_slices: bool) -> Any:
    if among_slices:
        return as_slices(gradient, variable)
    return keras.ops.zeros_like(variable) if gradient is None else gradient


def _at(variables: Sequence[Any] | None, place: int) -> Any:
    assert variables is not None
    return variables[place]


def _ids(variables: Iterable[Any]) -> set[int]:
    return {id(variable) for variable in variables}


def _name(variable: Any) -> str:
    return str(getattr(variable, "path", None) or getattr(variable, "name", None) or type(variable).__name__)
