"""`sync=` for Keras: where a round is, in variables of the optimizer, and the meeting that ends the round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import keras

from horovodish.gradients import windows
from horovodish.gradients.compression import NoneCompressor
from horovodish.gradients.options import GradientOptions
from horovodish.gradients.plan import GradientAdapter, GradientPlan
from horovodish.gradients.sync import Sync, ranks_within
from horovodish.keras import backends
from horovodish.keras.added_variables import AddedVariables

Reduce = Callable[[GradientPlan, Sequence[Any]], list[Any]]
"""Gives the gradients of all ranks that a plan has."""


class Rounds(windows.Round, AddedVariables):
    """The rounds of one optimizer.

    Its variables are the number of steps, the age of the round in steps, the number of meetings, and of each trained
    variable the start of the round and what the policy remembers.

    Attributes:
        name: of the reductions of changes.
        policy: says when the ranks meet.
    """

    def __init__(self, name: str, options: GradientOptions, adapter: GradientAdapter, remedy: str) -> None:
        """With `Hierarchical("host")` it blocks, and every rank must call it.

        Args:
            name: what to call the changes, the same on every rank.
            options: of the optimizer.
            adapter: of the backend.
            remedy: what to do if the ranks begin with different parameters.

        Raises:
            ValueError: the policy asks for fragments or an overlap.
        """
        self.policy = policy = cast(Sync, options.sync)
        for what in ("fragments", "overlap"):
            if (number := getattr(policy, what)) != (what == "fragments"):
                raise ValueError(f"sync: {what}={number} is not available in Keras. Remedy: leave {what}= out")
        self.name = name
        self._is_idle = not options.process_set.included()
        of_changes = options.of_changes(policy)
        # Codes would leave out what the next meeting is to send.
        of_shown = replace(of_changes, compression=NoneCompressor, codec=None)
        self._of_changes, self._of_shown = (
            GradientPlan(
                each,
                adapter,
                lambda index, _: f", variable {index} ({policy!r})",  # ranks whose policies differ get a MismatchError
                remedy,
                compared=lambda variable: self._start_of[id(variable)],
            )
            for each in (of_changes, of_shown)
        )
        within = ranks_within(policy, options.process_set)
        of_gradients = replace(options, process_set=within or options.process_set)
        reduces = within is not None or policy.after > 0
        self._of_gradients = GradientPlan(of_gradients, adapter, remedy=remedy) if reduces else None
        self._variables: list[Any] = []
        self._starts: list[Any] = []
        self._start_of: dict[int, Any] = {}
        self._memory: list[list[Any]] = []
        self._counts: list[Any] = []
        self._is_showing = False
        windows.follow(self)

    def build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Add the variables to the optimizer's."""
        self._variables = list(variables)
        self._counts = [optimizer.add_variable((), dtype="int32", name=name) for name in ("steps", "age", "meetings")]
        self._starts = [optimizer.add_variable_from_reference(each, name="start") for each in variables]
        self._start_of = {id(each): start for each, start in zip(variables, self._starts, strict=True)}
        self._memory = [
            [
                optimizer.add_variable(tuple(array.shape), dtype=_dtype(array), name="memory")
                for array in self.policy.begin(keras.ops.zeros(variable.shape, _dtype(variable)))
            ]
            for variable in variables
        ]

    def own(self) -> list[Any]:
        return [*self._counts, *self._starts, *_flat(self._memory)]

    @property
    def steps(self) -> int:
        """How many steps this rank has taken."""
        return backends.number_of(self._counts[0]) if self._counts else 0

    def is_open(self) -> bool:
        """Whether this rank has taken steps that no other rank knows of."""
        return bool(self._counts) and backends.number_of(self._counts[1]) > 0

    def restart(self) -> None:
        """Forget the round. The parameters stay as they are."""
        if self._counts:
            self._counts[1].assign(0)

    # -- in a step

    def before_step(self, gradients: Sequence[Any], reduce: Reduce) -> Sequence[Any]:
        """Note where a round begins. Collective in steps that use gradients of other ranks.

        Args:
            gradients: of this rank.
            reduce: reduces gradients by a plan.

        Returns:
            The gradients to step with.

        Raises:
            RuntimeError: within `synchronized()`.
        """
        if self._is_idle:
            return gradients
        if self._is_showing:
            raise RuntimeError(_WITHIN)
        steps, age = self._numbers()[:2]
        _assign_if(_both(steps >= self.policy.after, age == 0), self._starts, lambda: _values(self._variables))
        plan = self._of_gradients
        if plan is None:
            return gradients
        if self.policy.within is not None:
            return reduce(plan, gradients)
        is_early = steps < self.policy.after
        if isinstance(is_early, bool):
            return reduce(plan, gradients) if is_early else gradients
        given = [index for index, gradient in enumerate(gradients) if gradient is not None]

        def reduced() -> list[Any]:
            found = reduce(plan, gradients)
            return [found[index] for index in given]

        chosen = iter(keras.ops.cond(is_early, reduced, lambda: [gradients[index] for index in given]))
        return [None if gradient is None else next(chosen) for gradient in gradients]

    def after_step(self) -> None:
        """Count the step, and meet if a meeting is due. Collective then; blocks unless a program is traced."""
        if self._is_idle:
            return
        steps, age, _ = self._numbers()
        number = steps + 1 - self.policy.after
        self._counts[0].assign(steps + 1)
        self._counts[1].assign(_chosen(number > 0, age + 1, age))
        is_due = self.policy.is_due(number)
        _assign_if(_both(number > 0, is_due), self._changing(), lambda: self._met(self._of_changes))

    def stateless(self, optimizer: Any, trained: Sequence[Any], state: Sequence[Any], method: Callable[[], Any]) -> Any:
        """What a method gives, and the values of the trained and of the optimizer's variables after it.

        Args:
            optimizer: that has these rounds.
            trained: values for the trained variables.
            state: values for the optimizer's variables.
            method: reads and assigns variables.
        """
        mapping = [*zip(self._variables, trained, strict=True), *zip(optimizer.variables, state, strict=True)]
        with keras.StatelessScope(mapping) as scope:
            result = method()
        return result, *(
            [scope.get_current_value(variable) for variable in variables]
            for variables in (self._variables, optimizer.variables)
        )

    def _changing(self) -> list[Any]:
        """The variables that a meeting changes."""
        return [*self._variables, *_flat(self._memory), *self._counts[1:]]

    def _met(self, plan: GradientPlan) -> list[Any]:
        """The values of `_changing` after a meeting. Collective."""
        _, _, meetings = self._numbers()
        starts = _values(self._starts)
        changes = [value - start for value, start in zip(_values(self._variables), starts, strict=True)]
        if not plan.options.alone:
            changes = plan.with_parameters(self.name, changes, self._variables, starts)
        changes = plan.reduce(self.name, changes, self._variables)
        merged, memory = [], []
        for start, change, kept in zip(starts, changes, self._memory, strict=True):
            begun = self.policy.begin(start)
            before = [_chosen(meetings == 0, *pair) for pair in zip(begun, _values(kept), strict=True)]
            value, after = self.policy.merge(start, change, tuple(before))
            merged.append(value)
            memory.append(after)
        return [*merged, *_flat(memory), 0, meetings + 1]

    def _numbers(self) -> list[Any]:
        """The number of steps, the age of the round and the number of meetings; traced in a traced program."""
        values = _values(self._counts)
        return values if self._of_changes.is_traced(values) else [int(value) for value in values]

    # -- outside of a step

    def end_round(self) -> None:
        """Meet now; nothing where no round has begun. Collective; blocks."""
        if not self._is_idle and self.is_open():
            _assign(self._changing(), self._met(self._of_changes))

    @contextmanager
    def synchronized(self) -> Iterator[None]:
        """A context in which the variables have the values that a meeting would give them now. Collective; blocks."""
        if self._is_showing:
            raise RuntimeError("synchronized() within synchronized()")
        if self._is_idle or not self._counts:
            yield
            return
        self.note_shown()
        steps, kept = self.steps, [keras.ops.copy(value) for value in _values(self._changing())]
        self._is_showing = True
        try:
            if self.is_open():
                _assign(self._changing(), self._met(self._of_shown))
            yield
            if self.steps != steps:  # a compiled step does not ask
                raise RuntimeError(_WITHIN)
        finally:
            self._is_showing = False
            _assign(self._changing(), kept)


_WITHIN = (
    "a step within synchronized(): its parameters are merged from all ranks, and are dropped at its end. Remedy: train "
    "outside of the block"
)


class SavedRounds(keras.layers.Layer):
    """The state that Keras writes to files below the optimizer, and reads back. It is no part of a model.

    A file that a plain optimizer reads has the same variables of the optimizer as without it.
    """

    def __init__(self, rounds: Rounds) -> None:
        super().__init__()
        self._of = rounds

    def save_own_variables(self, store: Any) -> None:
        """Called by Keras."""
        rounds = self._of
        rounds.note_shown()
        for name, variable in _named(rounds, rounds.is_open()).items():
            store[name] = keras.ops.convert_to_numpy(variable)

    def load_own_variables(self, store: Any) -> None:
        """Called by Keras.

        Raises:
            ValueError: the file is of another policy.
        """
        rounds, given = self._of, {*store.keys()}
        if not given:
            return
        named = _named(rounds, "start0" in given)
        if given != {*named}:
            raise ValueError(
                f"the file has the round of another policy, and not of {rounds.policy!r}. Remedy: pass the sync= with "
                "which it was saved"
            )
        for name, variable in named.items():
            variable.assign(store[name])


def _named(rounds: Rounds, is_open: bool) -> dict[str, Any]:
    """The variables of rounds by their names in files; without starts between two rounds."""
    named = dict(zip(("steps", "age", "meetings"), rounds._counts, strict=False))
    if is_open:
        named |= {f"start{index}": start for index, start in enumerate(rounds._starts)}
    memory = {
        f"memory{index}.{place}": each for index, kept in enumerate(rounds._memory) for place, each in enumerate(kept)
    }
    return named | memory


def _flat(lists: Sequence[Sequence[Any]]) -> list[Any]:
    return [each for members in lists for each in members]


def _dtype(array: Any) -> str:
    dtype: str = keras.backend.standardize_dtype(array.dtype)
    return dtype


def _values(variables: Sequence[Any]) -> list[Any]:
    """The values, without a record of gradients in PyTorch."""
    return [keras.ops.stop_gradient(keras.ops.convert_to_tensor(variable)) for variable in variables]


def _assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _assign_if(condition: Any, variables: Sequence[Any], values: Callable[[], Sequence[Any]]) -> None:
    """Assign values if a condition holds, which may be traced. JAX traces both branches, so neither assigns."""
    if isinstance(condition, bool):
        if condition:
            _assign(variables, values())
        return

    def new() -> list[Any]:
        return [keras.ops.cast(value, _dtype(each)) for value, each in zip(values(), variables, strict=True)]

    _assign(variables, keras.ops.cond(condition, new, lambda: _values(variables)))


def _both(one: Any, other: Any) -> Any:
    if isinstance(one, bool):
        return one and bool(other)
    return keras.ops.logical_and(one, other)


def _chosen(condition: Any, one: Any, other: Any) -> Any:
    if isinstance(condition, bool):
        return one if condition else other
    return keras.ops.where(condition, one, other)
