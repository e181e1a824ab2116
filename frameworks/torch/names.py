"""The names of an optimizer's parameters and plans."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from horovodish import _native
from horovodish.collectives.process_sets import ProcessSet, checked_id
from horovodish.collectives.submission import counted
from horovodish.runtime import basics


class Names:
    """The names of an optimizer's parameters: unique, and the same on every rank."""

    def __init__(self, optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None):
        self._given = None if named_parameters is None else _checked(named_parameters)
        self._optimizer = weakref.ref(optimizer)
        self._seen: list[Tensor] = []
        if self._given is not None:
            given = {id(parameter) for _, parameter in self._given}
            unnamed = [
                f"parameter {index} of group {number}, of shape {tuple(parameter.shape)}"
                for number, group in enumerate(optimizer.param_groups)
                for index, parameter in enumerate(group["params"])
                if id(parameter) not in given
            ]
            if unnamed:
                raise ValueError(
                    f"named_parameters does not name {'; '.join(unnamed)}. Pass the parameters of every module that "
                    "the optimizer trains, or leave named_parameters out"
                )

    def in_order(self) -> list[tuple[str, Tensor]]:
        """The optimizer's parameters with their names, in the order of the model.

        Parameters that `named_parameters` does not name come last, under the number of their group and their place.
        """
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        numbered = [pair for number, group in enumerate(groups) for pair in _numbered(number, group)]
        trained = {id(parameter) for _, parameter in numbered}
        named = [(name, parameter) for name, parameter in self._given or () if id(parameter) in trained]
        given = {id(parameter) for _, parameter in named}
        return named + [(name, parameter) for name, parameter in numbered if id(parameter) not in given]

    def given(self) -> list[tuple[str, Tensor]]:
        """The names that the user has given, and their parameters."""
        return self._given or []

    def changed(self) -> bool:
        """Whether the optimizer has other parameters than at the last `note()`. Scripts may edit `param_groups`."""
        optimizer = self._optimizer()
        if optimizer is None:
            return False
        # Once per backward and step, so without a loop in Python over the parameters.
        lists = [group["params"] for group in optimizer.param_groups]
        if sum(map(len, lists)) != len(self._seen):
            return True
        return not all(map(operator.is_, itertools.chain.from_iterable(lists), self._seen))

    def current(self, reduced: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Names and parameters to reduce from now on.

        Args:
            reduced: the ones reduced until now. If a parameter is not among them and the optimizer had it at the last
                `note()`, another optimizer has taken it over, and keeps it.
        """
        elsewhere = {id(parameter) for parameter in self._seen} - {id(parameter) for _, parameter in reduced}
        return [(name, parameter) for name, parameter in self.in_order() if id(parameter) not in elsewhere]

    def note(self) -> None:
        """The parameters that the optimizer has now are known."""
        self._seen = self.flat()

    def flat(self) -> list[Tensor]:
        """The optimizer's parameters, in the order of its groups."""
        optimizer = self._optimizer()
        if optimizer is None:
            return self._seen
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _numbered(number: int, group: dict[str, Any]) -> list[tuple[str, Tensor]]:
    return [(f"group{number}.{index}", parameter) for index, parameter in enumerate(group["params"])]


def _checked(named_parameters: Any) -> list[tuple[str, Tensor]]:
    named = list(named_parameters) if isinstance(named_parameters, Iterable) else [named_parameters]
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in named):
        raise ValueError("named_parameters must be pairs of a name and a parameter; pass model.named_parameters()")
    repeated = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if repeated:
        raise ValueError(
            f"named_parameters has these names more than once: {', '.join(repeated)}; give each a prefix of its own, "
            "such as the name of its module"
        )
    # A shared parameter may have several names; the first counts.
    first = {id(parameter): name for name, parameter in reversed(named)}
    return [(name, parameter) for name, parameter in named if first[id(parameter)] == name]


class PlanNames:
    """Names for the plans of one optimizer: unique in the process set, and the same on every rank.

    The first name is counted; the names of later plans follow from it, so that optimizers may replace their plans in an
    order that differs by rank. On a new engine all names start anew. Reports and errors show the names, such as
    "gradients of optimizer 1, plan 2", and "gradients of optimizer 1 of ranks [0, 2]" in a process set.

    Attributes:
        first: the name of the first plan on this engine.
    """

    def __init__(self, process_set: ProcessSet, what: str = "gradients"):
        self._what = what
        self._process_set = process_set
        self._engine: _native.Engine | None = None
        self.first = ""
        self._count = 0

    def number(self) -> None:
        """Count the optimizer on this engine, if it is not; this rank is in the process set."""
        if self._engine is basics.engine():
            return
        identity = checked_id(self._process_set)
        kind = f"{self._what} of optimizer"
        self.first = f"{kind} {counted(kind, identity)}"
        if identity:
            self.first += f" of ranks {self._process_set.ranks}"
        self._engine, self._count = basics.engine(), 0

    def next(self) -> str:
        """The name for another plan; this rank is in the process set."""
        self.number()
        self._count += 1
        return self.first if self._count == 1 else f"{self.first}, plan {self._count}"
