"""Wrapped optimizers: the subclass that an optimizer becomes, and the state that the subclass needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

import keras

from horovodish.collectives.consistency import FIRST_APART
from horovodish.elastic import membership
from horovodish.gradients.options import check_trained
from horovodish.gradients.plan import COMPARED_REDUCTION, GradientPlan
from horovodish.keras.accumulation import Accumulation
from horovodish.keras.added_variables import AddedVariables
from horovodish.keras.backends import untraced
from horovodish.keras.sync import Rounds, SavedRounds


class Distribution:
    """The extra state of a wrapped optimizer.

    Attributes:
        name: of the reductions, unique among the optimizers of the process set.
        plan: how the gradients are reduced.
        window: accumulates the gradients before they are reduced; None if nothing does.
        rounds: where the ranks take steps of their own and meet.
        variables: of the optimizer, as far as they are known: Keras passes them when it builds the optimizer.
        within: whether a method of the optimizer itself is running; it gets the gradients unchanged.
        local: the layers that stay this rank's own, with their variables that are not trained.
        in_fit: whether one of our callbacks has seen it in a `fit`.
        compares: whether the ranks compare their parameters when `fit` traces its step for the first time.
    """

    def __init__(
        self, name: str, plan: GradientPlan, window: Accumulation | None = None, rounds: Rounds | None = None
    ) -> None:
        self.name = name
        self.plan = plan
        self.window = window
        self.rounds = rounds
        self.variables: list[Any] | None = None
        self.within = False
        self.local: list[Any] = []
        self.in_fit = False
        self.compares = True
        self._hidden: set[int] = set()

    def in_step(
        self, gradients: Sequence[Any], variables: Sequence[Any] | None, values: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """The gradients to step with: the reduced gradients, or in rounds the gradients that the policy wants.

        Args:
            gradients: of this rank.
            variables: what they are the gradients of; None: those that the optimizer was built with.
            values: of the variables, if the step gets them.
        """
        variables = self.variables if variables is None else variables
        if variables is None and (self.plan.local or self.plan.options.names_members):
            raise ValueError(
                "groups and local variables need the optimizer's variables, which it was built with before it was "
                "wrapped; wrap it before compile() or build()"
            )
        in_fit = self.plan.is_traced(gradients) and _is_within_fit()
        if in_fit and membership.start() == membership.worlds() == 0:  # later, only new processes may trace a step
            self.plan.options.comparison.compare()
        compares, self.compares = self.compares, False
        if in_fit and compares and variables is not None and (self.rounds is None or not self.rounds.is_open()):
            self.plan.compare_parameters(self.name if self.rounds is None else self.rounds.name, variables)
        # Some ranks may have compared in an earlier `fit` or process. Yet all must compare before the same reductions.
        first = FIRST_APART if in_fit else COMPARED_REDUCTION

        def reduce(plan: GradientPlan, gradients: Sequence[Any]) -> list[Any]:
            if variables is not None and values is not None and not plan.options.alone:
                gradients = plan.with_parameters(self.name, gradients, variables, values)
            return plan.reduce(self.name, gradients, variables, first)

        if self.rounds is None:
            return reduce(self.plan, gradients)
        return self.rounds.before_step(gradients, reduce)

    def learn(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Takes note of the variables that the optimizer is built with, and makes what depends on them.

        Raises:
            ValueError: the user has named variables that are not among them.
        """
        self.variables = list(variables)
        check_trained("local variables", self.plan.local, self.variables)
        self.plan.options.check_groups(self.variables)
        for each in (self.window, self.rounds):
            if each is not None:
                each.build(optimizer, variables)

    def visible(self, variables: list[Any]) -> list[Any]:
        """The optimizer's variables, less those that are hidden now."""
        return [each for each in variables if id(each) not in self._hidden] if self._hidden else variables

    @contextmanager
    def hiding(self, *added: AddedVariables | None) -> Iterator[None]:
        """A context in which the optimizer does not show these variables."""
        self._hidden = {id(variable) for each in added if each is not None for variable in each.own()}
        try:
            yield
        finally:
            self._hidden = set()

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
    """The methods that a wrapped optimizer's class adds to the optimizer's own class or replaces."""

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
            gradients = distribution.in_step(gradients, variables)
            with distribution.inside():
                parent.apply(gradients, variables)
            if distribution.rounds is not None:
                distribution.rounds.after_step()

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
            rounds, trained = distribution.rounds, trainable_variables

            def in_step() -> Any:
                return distribution.in_step(gradients, None, trainable_variables)

            if rounds is None:
                gradients = in_step()
            else:
                gradients, trained, optimizer_variables = rounds.stateless(self, trained, optimizer_variables, in_step)
            with distribution.inside():
                values = parent.stateless_apply(optimizer_variables, gradients, trained)
            return values if rounds is None else rounds.stateless(self, *values, rounds.after_step)[1:]

        if distribution.window is None:
            return update(grads, optimizer_variables)
        return distribution.window.stateless_apply(self, optimizer_variables, grads, trainable_variables, update)

    def register_local_var(self: Any, variable: Any) -> None:
        """Take the gradients of a trainable variable out of the reduction. Every rank must call it, before training."""
        distribution = self._distribution
        if distribution.rounds is not None:
            raise ValueError(
                "register_local_var: with sync= all variables meet. Remedy: leave sync= out, or train the variable "
                "with an optimizer of its own that is not wrapped"
            )
        if distribution.variables is not None:
            check_trained("register_local_var", [variable], distribution.variables)
        distribution.plan.local.append(variable)

    @property
    def variables(self: Any) -> list[Any]:
        return self._distribution.visible(super().variables)

    def save_own_variables(self: Any, store: Any) -> None:
        with self._distribution.hiding(self._distribution.window, self._distribution.rounds):
            super().save_own_variables(store)

    def load_own_variables(self: Any, store: Any) -> None:
        with self._distribution.hiding(self._distribution.window, self._distribution.rounds):
            super().load_own_variables(store)

    def __reduce__(self: Any) -> Any:
        # The class exists in this process only, so a pickle has the class that was wrapped.
        rebuild, arguments = super().__reduce__()
        return getattr(self.__class__, rebuild.__name__), arguments


class _Meets(_Optimizer):
    """The methods that a wrapped optimizer has besides with `sync`."""

    _distribution: Distribution

    def synchronized(self) -> AbstractContextManager[None]:
        """A context in which the variables have the values that a meeting would give them now. Collective; blocks.

        Not for compiled programs. At its end each rank has its own values again, bit by bit, and the round goes on.

        Raises:
            RuntimeError: within another one; or steps were taken within the block, which are undone.
            HorovodInternalError: the reduction failed.

        Example:
            >>> with model.optimizer.synchronized():
            ...     results = model.evaluate(x, y)
            ...     if hvd.rank() == 0:
            ...         model.save("model.keras")
        """
        return self._rounds.synchronized()

    def end_round(self) -> None:
        """Meet now; nothing where no round has begun. Collective; blocks. Not for compiled programs.

        Raises:
            HorovodInternalError: the reduction failed.
        """
        self._rounds.end_round()

    @property
    def _rounds(self) -> Rounds:
        assert self._distribution.rounds is not None
        return self._distribution.rounds


def is_distributed(optimizer: Any) -> bool:
    """Whether an optimizer is wrapped."""
    return issubclass(type(optimizer), _Distributed)


def distribution_of(optimizer: Any) -> Distribution | None:
    """The distribution of a wrapped optimizer, or of the one in a LossScaleOptimizer; None for others."""
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
    if distribution.rounds is not None:
        optimizer.__dict__["rounds"] = SavedRounds(distribution.rounds)
    kinds = (_Distributed,) if distribution.rounds is None else (_Meets, _Distributed)
    optimizer.__class__ = type(own.__name__, (*kinds, own), names)
    # torch.compile looks for methods in the object, and then in what its `__class__` says, not in its type.
    optimizer.__dict__["apply"] = untraced(optimizer.apply)


def undistribute(optimizer: Any) -> Distribution:
    """Makes a wrapped optimizer what it was, and gives what it had besides."""
    distribution: Distribution = optimizer.__dict__.pop("_distribution")
    del optimizer.__dict__["apply"]
    optimizer.__dict__.pop("rounds", None)
    vars(object)["__class__"].__set__(optimizer, optimizer.__class__)
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
        for added in (distribution.window, distribution.rounds):
            if added is not None:  # a file has the inner optimizer's variables by themselves
                added.move(inner, optimizer)


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
