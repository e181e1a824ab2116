"""What makes an optimizer a wrapped one: a subclass of its class, and what that needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import keras

from horovodish.gradients.options import check_trained
from horovodish.gradients.plan import GradientPlan
from horovodish.keras.accumulation import Accumulation
from horovodish.keras.backends import untraced


class Distribution:
    """What a wrapped optimizer has besides what it had.

    Attributes:
        name: of the reductions, unique among the optimizers of the process set.
        plan: how the gradients are reduced.
        window: what accumulates them before, if anything does.
        variables: those of the optimizer, as far as they are known: Keras tells them when it builds the optimizer.
        within: whether a method of the optimizer itself is running, to which gradients are passed as they are.
        local: the layers that stay this rank's own, with those of their variables that are not trained.
        in_fit: whether one of our callbacks has seen it in a `fit`.
        compares: whether the ranks compare their parameters when `fit` traces its step for the first time.
    """

    def __init__(self, name: str, plan: GradientPlan, window: Accumulation | None) -> None:
        self.name = name
        self.plan = plan
        self.window = window
        self.variables: list[Any] | None = None
        self.within = False
        self.local: list[Any] = []
        self.in_fit = False
        self.compares = True
        self._without_window = False

    def reduced(
        self, gradients: Sequence[Any], variables: Sequence[Any] | None, values: Sequence[Any] | None = None
    ) -> list[Any]:
        """As `GradientPlan.reduce`, with the variables that are known, and their values if the step gets them."""
        variables = self.variables if variables is None else variables
        if variables is None and (self.plan.local or self.plan.options.names_members):
            raise ValueError(
                "groups and local variables need the optimizer's variables, which it was built with before it was "
                "wrapped; wrap it before compile() or build()"
            )
        compares, self.compares = self.compares, False
        if compares and variables is not None and self.plan.is_traced(gradients) and _is_within_fit():
            self.plan.compare_parameters(self.name, variables)
        if variables is not None and values is not None and not self.plan.options.alone:
            gradients = self.plan.with_parameters(self.name, gradients, variables, values)
        return self.plan.reduce(self.name, gradients, variables)

    def learn(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Takes note of the variables that the optimizer is built with, and makes what depends on them.

        Raises:
            ValueError: the user has named variables that are not among them.
        """
        self.variables = list(variables)
        check_trained("local variables", self.plan.local, self.variables)
        self.plan.options.check_groups(self.variables)
        if self.window is not None:
            self.window.build(optimizer, variables)

    def visible(self, variables: list[Any]) -> list[Any]:
        """The optimizer's variables, less those of the window where they are to be left out."""
        return self.window.others(variables) if self.window is not None and self._without_window else variables

    @contextmanager
    def without_window(self) -> Iterator[None]:
        """A context in which the optimizer shows the variables that it has unwrapped, for files."""
        self._without_window = True
        try:
            yield
        finally:
            self._without_window = False

    @contextmanager
    def inside(self) -> Iterator[None]:
        """A context in which the optimizer's own methods do what they did."""
        self.within = True
        try:
            yield
        finally:
            self.within = False


_Optimizer: Any = object


class _Distributed(_Optimizer):
    """The methods in which a wrapped optimizer's class differs from that of the optimizer."""

    _distribution: Distribution

    def build(self: Any, variables: Any) -> None:
        super().build(variables)
        self._distribution.learn(self, variables)

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        parent: Any = super()
        distribution = self._distribution
        if distribution.within:
            parent.apply(grads, trainable_variables)
            return
        gradients = list(grads)
        variables = None if trainable_variables is None else list(trainable_variables)
        _check_caller(self, sys._getframe(1))
        if variables is not None:
            if not self.built:
                with keras.name_scope(self.name, caller=self):
                    self.build(variables)
            elif distribution.variables is None:
                distribution.learn(self, variables)
        window = distribution.window

        def update(gradients: Sequence[Any]) -> None:
            with distribution.inside():
                parent.apply(distribution.reduced(gradients, variables), variables)

        if window is None:
            update(gradients)
        else:
            window.apply(gradients, variables, update)

    def stateless_apply(self: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        parent: Any = super()
        distribution = self._distribution
        if distribution.within:
            return parent.stateless_apply(optimizer_variables, grads, trainable_variables)
        _check_caller(self, sys._getframe(1))

        def update(gradients: Sequence[Any], optimizer_variables: Any) -> Any:
            with distribution.inside():
                reduced = distribution.reduced(gradients, None, trainable_variables)
                return parent.stateless_apply(optimizer_variables, reduced, trainable_variables)

        if distribution.window is None:
            return update(grads, optimizer_variables)
        return distribution.window.stateless_apply(self, optimizer_variables, grads, trainable_variables, update)

    def register_local_var(self: Any, variable: Any) -> None:
        """Take the gradients of a trainable variable out of the reduction. Every rank must call it, before training."""
        distribution = self._distribution
        if distribution.variables is not None:
            check_trained("register_local_var", [variable], distribution.variables)
        distribution.plan.local.append(variable)

    @property
    def variables(self: Any) -> list[Any]:
        return self._distribution.visible(super().variables)

    def save_own_variables(self: Any, store: Any) -> None:
        with self._distribution.without_window():
            super().save_own_variables(store)

    def load_own_variables(self: Any, store: Any) -> None:
        with self._distribution.without_window():
            super().load_own_variables(store)

    def __reduce__(self: Any) -> Any:
        # The class exists in this process only: a pickle is that of the class that was wrapped.
        rebuild, arguments = super().__reduce__()
        return getattr(self.__class__, rebuild.__name__), arguments


def is_distributed(optimizer: Any) -> bool:
    """Whether an optimizer is wrapped."""
    return issubclass(type(optimizer), _Distributed)


def distribution_of(optimizer: Any) -> Distribution | None:
    """What a wrapped optimizer has, or the one in a LossScaleOptimizer; None for others."""
    for one in (optimizer, getattr(optimizer, "inner_optimizer", optimizer)):
        if is_distributed(one):
            distribution: Distribution = one._distribution
            return distribution
    return None


def distribute(optimizer: Any, distribution: Distribution) -> None:
    """Gives the optimizer the class and the state of a wrapped one."""
    own = type(optimizer)
    # Keras writes down and looks up what an object's `__class__` says, and users ask isinstance().
    names = {
        "__class__": property(lambda self: own),
        "__module__": own.__module__,
        "__doc__": own.__doc__,
        "from_config": own.from_config,
    }
    optimizer.__dict__["_distribution"] = distribution
    optimizer.__class__ = type(own.__name__, (_Distributed, own), names)
    # torch.compile looks for methods in the object, and then in what its `__class__` says, not in its type.
    optimizer.__dict__["apply"] = untraced(optimizer.apply)


def undistribute(optimizer: Any) -> Distribution:
    """Makes a wrapped optimizer what it was, and gives what it had besides."""
    distribution: Distribution = optimizer.__dict__.pop("_distribution")
    del optimizer.__dict__["apply"]
    vars(object)["__class__"].__set__(optimizer, type(optimizer).__mro__[2])
    return distribution


def distribute_outside(optimizer: Any) -> None:
    """Where a LossScaleOptimizer is around a wrapped optimizer, has the outer one reduce: it decides by gradients.

    Args:
        optimizer: of a model; nothing happens unless it is as said.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    if is_distributed(inner) and not is_distributed(optimizer):
        distribution = undistribute(inner)
        distribute(optimizer, distribution)
        if distribution.window is not None:  # a file has the inner optimizer's variables by themselves
            distribution.window.move(inner, optimizer)


def _is_within_fit() -> bool:
    """Whether Keras's `fit` has called, which every rank calls alike. Loops of users may trace on one rank alone."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "fit" and frame.f_globals.get("__name__", "").startswith("keras."):
            return True
        frame = frame.f_back
    return False


def _check_caller(optimizer: Any, frame: FrameType) -> None:
    """Raise if a LossScaleOptimizer around the optimizer is the caller: it leaves out steps on its rank alone."""
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("torch._dynamo"):
        frame = frame.f_back
    caller = frame.f_locals.get("self")
    if isinstance(caller, keras.optimizers.LossScaleOptimizer) and caller is not optimizer:
        raise ValueError(
            "a LossScaleOptimizer was put around this DistributedOptimizer, by compile() of a mixed_float16 model "
            "perhaps. It would skip steps on some ranks only. Wrap it instead, "
            "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)), or pass "
            "hvd.callbacks.BroadcastGlobalVariablesCallback to fit(), which does so"
        )
