"""The options of a wrapped optimizer: how its gradients are reduced. Checked here for all frameworks."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

from horovodish.collectives.operation import Operation
from horovodish.collectives.process_sets import ProcessSet, check_kind, global_process_set
from horovodish.collectives.reduce_ops import Average, ReduceOp, chosen_op
from horovodish.gradients.compression import Compressor, check_compression
from horovodish.runtime import basics

__all__ = ["GradientOptions", "Groups", "check_trained", "checked_passes"]

Groups = int | Sequence[Sequence[Any]] | None


@dataclass(frozen=True)
class GradientOptions:
    """The arguments of a `DistributedOptimizer` or of one of its siblings.

    Attributes:
        op: how gradients are reduced.
        compression: what travels instead of each gradient.
        prescale_factor, postscale_factor: multiply every gradient before and after the reduction.
        groups: the parameters whose gradients are reduced as a unit, or how many such groups to make of all.
        sparse_as_dense: sparse gradients are made dense before they are reduced.
        passes: how many gradients are added up on a rank before they are reduced.
        process_set: the ranks that reduce among themselves.
        scale_local_gradients: gradients that stay this rank's own are divided by the number of ranks.
    """

    op: ReduceOp
    compression: Compressor
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    groups: Groups = None
    sparse_as_dense: bool = False
    passes: int = 1
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True

    @classmethod
    def checked(
        cls,
        *,
        compression: Compressor,
        op: ReduceOp = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Groups = None,
        backward_passes_per_step: int = 1,
        process_set: ProcessSet = global_process_set,
        sparse_as_dense: bool = False,
        scale_local_gradients: bool = True,
    ) -> GradientOptions:
        """The options that a user asks for.

        Raises:
            ValueError: they do not go together, or one of them is not possible.
            TypeError: `process_set` is no process set.
        """
        op = chosen_op(None, op)
        if gradient_predivide_factor != 1.0 and op is not Average:
            raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor} needs op=Average")
        if gradient_predivide_factor <= 0:
            raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor} is not positive")
        check_compression(compression)
        check_kind(process_set)
        return cls(
            op,
            compression,
            1.0 / gradient_predivide_factor,
            float(gradient_predivide_factor),
            _checked_groups(num_groups, groups),
            sparse_as_dense,
            checked_passes(backward_passes_per_step),
            process_set,
            scale_local_gradients,
        )

    @property
    def alone(self) -> bool:
        """True if this rank has nobody to reduce with: it is the only one, or it is outside the process set.

        With plane="nccl" a world of one reduces all the same: so one GPU is enough to test or measure NCCL.
        """
        if not self.process_set.included():
            return True
        return self.process_set.size() == 1 and basics.running().settings.plane != "nccl"

    @property
    def names_members(self) -> bool:
        """True if `groups` names the members of each group."""
        return not (self.groups is None or isinstance(self.groups, int))

    def groups_of(self, parameters: Sequence[Any]) -> list[int | None]:
        """The number of each parameter's group; None where it has none.

        Args:
            parameters: all that are trained, in the order of the model.
        """
        if self.groups is None:
            return [None] * len(parameters)
        if isinstance(self.groups, int):
            return [index * self.groups // len(parameters) for index in range(len(parameters))]
        numbers = {id(member): number for number, group in enumerate(self.groups) for member in group}
        return [numbers.get(id(parameter)) for parameter in parameters]

    def check_groups(self, trained: Iterable[Any]) -> None:
        """Raise ValueError unless all members of the groups are trained."""
        if self.groups is not None and not isinstance(self.groups, int):
            check_trained("groups", [member for group in self.groups for member in group], trained)

    def operation(self, name: str, member_names: Sequence[str] = ()) -> Operation:
        """The reduction of some of the gradients, by the name of all of them and that of each."""
        return Operation(
            "allreduce",
            name,
            self.process_set,
            self.op,
            prescale_factor=self.prescale_factor,
            postscale_factor=self.postscale_factor,
            member_names=member_names,
        )


def checked_passes(passes: int) -> int:
    """The number of backward passes per step.

    Raises:
        ValueError: it is not a whole number, 1 or more.
    """
    if isinstance(passes, bool) or not isinstance(passes, SupportsIndex) or passes < 1:
        raise ValueError(f"backward_passes_per_step={passes!r} must be a whole number, 1 or more")
    return operator.index(passes)


def check_trained(what: str, chosen: Iterable[Any], trained: Iterable[Any]) -> None:
    """Raise unless the chosen parameters are trained.

    Args:
        what: the argument that has them, for the message.
        chosen: what the user has named.
        trained: the optimizer's parameters.

    Raises:
        ValueError: one of them is not.
    """
    known = {id(parameter) for parameter in trained}
    for parameter in chosen:
        if id(parameter) not in known:
            raise ValueError(f"{what}: {_description(parameter)} is none of the parameters that the optimizer trains")


def _checked_groups(num_groups: int, groups: Groups) -> Groups:
    if num_groups:
        if groups is not None:
            raise ValueError("num_groups= and groups= were both given; pass groups= alone")
        warnings.warn("num_groups= is Horovod's older name; pass groups=", DeprecationWarning, stacklevel=4)
        groups = num_groups
    if groups is None:
        return None
    if not isinstance(groups, Iterable):
        if isinstance(groups, bool) or not isinstance(groups, SupportsIndex) or groups < 0:
            raise ValueError(
                f"groups={groups!r} is not possible; it is a number of groups, 0 for none, or a list of lists of "
                "parameters"
            )
        return operator.index(groups) or None
    group_of: dict[int, int] = {}
    for number, group in enumerate(groups):
        if not isinstance(group, list | tuple):
            raise ValueError(
                f"groups must be a number, or a list of lists of parameters, not of {type(group).__name__}"
            )
        for member in group:
            if id(member) in group_of:
                raise ValueError(
                    f"groups has a parameter in group {group_of[id(member)]} and in group {number}: "
                    f"{_description(member)}"
                )
            group_of[id(member)] = number
    return [tuple(group) for group in groups]


def _description(parameter: Any) -> str:
    name = getattr(parameter, "path", None) or getattr(parameter, "name", None)
    return str(name) if name else f"a {type(parameter).__name__} of shape {tuple(getattr(parameter, 'shape', ()))}"
