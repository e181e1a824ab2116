"""Elastic training with Keras: `horovodish.elastic` with a state that holds a model, and callbacks that keep it.

Example:
    import horovodish.keras as hvd

    hvd.init()
    model.compile(hvd.DistributedOptimizer(optimizer), loss="sparse_categorical_crossentropy")

    @hvd.elastic.run
    def train(state):
        callbacks = [
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state),
        ]
        model.fit(x, y, epochs=10, initial_epoch=state.epoch, callbacks=callbacks)

    train(hvd.elastic.KerasState(model, batch=0, epoch=0))

    $ horovodish run -np 4 --min-np 2 python train.py
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from horovodish.elastic import HorovodInternalError, HostsUpdatedInterrupt, ObjectState, State, attempt, run
from horovodish.keras.broadcast_state import distributions_of, optimizers_of, state_of, weights_of
from horovodish.keras.distribution import distribution_of
from horovodish.keras.epoch_sync import callbacks_that_begin

__all__ = [
    "CommitStateCallback",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "attempt",
    "run",
]


class KerasState(State):
    """A state with a model, of which it holds the weights and the variables of its optimizers.

    Random seeds, metrics, local layers and windows of `backward_passes_per_step` stay each rank's own; windows begin
    anew when the ranks have changed. Compiled steps are then compiled anew.

    On the JAX backend a step that fails takes the model's weights with it: the state goes back to its last commit. So
    commit after every batch, or more steps than one may be repeated.

    Args:
        model: with weights: one whose first layer is an `Input`, or that was built.
        optimizer: one that is not the model's, built.
        backend: taken because Horovod takes it; it changes nothing.
        attributes: the first attributes, such as `batch` and `epoch` for the callbacks.

    Example:
        >>> state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    """

    model: Any

    def __init__(self, model: Any, optimizer: Any = None, backend: object = None, **attributes: Any) -> None:
        self._own: list[tuple[Any, Any]] = []
        given = {} if optimizer is None else {"optimizer": optimizer}
        super().__init__(model=model, **given, **attributes)

    def save(self) -> None:
        """Copy the state to memory of this host, when it is computed. Not collective.

        Raises:
            TypeError: a part of the state cannot be pickled; the message names it.
        """
        if _uses_jax():
            self.model.jax_state_sync()
            importlib.import_module("jax").block_until_ready([variable.value for variable in self._variables()])
        super().save()
        self._keep_own()

    def sync(self) -> None:
        """As `State.sync`. Collective; blocks."""
        super().sync()
        self._keep_own()

    def reset(self) -> None:
        """Have steps compiled anew, and begin windows anew."""
        for distribution in distributions_of(self.model):
            if distribution.window is not None:
                distribution.window.restart()
        if keras.config.backend() == "tensorflow":
            importlib.import_module("horovodish.tensorflow.tracing").trace_anew()
        elif _uses_jax():
            importlib.import_module("jax").clear_caches()

    def _captured(self, value: Any) -> Any:
        if isinstance(value, keras.Model):
            return _Values(_values(weights_of(value)), [_values(each) for each in _of_optimizers(value)])
        if isinstance(value, keras.optimizers.Optimizer):
            return _Values([] if self._is_of_model(value) else _values(_variables_of(value)), [])
        return super()._captured(value)

    def _put_back(self, name: str, captured: Any) -> None:
        if not isinstance(captured, _Values):
            super()._put_back(name, captured)
            return
        value = getattr(self, name)
        if isinstance(value, keras.Model):
            for optimizer, values in zip(optimizers_of(value), captured.optimizers, strict=False):
                if not optimizer.built and len(values) > len(optimizer.variables):
                    optimizer.build(value.trainable_variables)
            _assign(name, weights_of(value), captured.values)
            for variables, values in zip(_of_optimizers(value), captured.optimizers, strict=True):
                _assign(f"{name}.optimizer", variables, values)
        elif captured.values:
            _assign(name, _variables_of(value), captured.values)

    def _is_intact(self) -> bool:
        if not _uses_jax():
            return True
        model = self.model
        # A step takes the weights out of the model, and fit() may have failed to put them back.
        is_whole = getattr(model, "_jax_state", None) is None and not any(
            getattr(optimizer, "use_ema", False) for optimizer in optimizers_of(model)
        )  # with averaged weights, fit() has put the averages in their place
        model._jax_state, model._jax_state_synced = None, True
        variables = [*self._variables(), *_others(model)]
        is_whole = is_whole and all(map(_is_readable, variables))
        if not is_whole:
            for variable, value in self._own:
                if not _is_readable(variable):
                    variable.assign(value)
        return is_whole

    def _variables(self) -> list[Any]:
        return [*weights_of(self.model), *(variable for each in _of_optimizers(self.model) for variable in each)]

    def _keep_own(self) -> None:
        """Remember what a step that fails would take from this rank, though no other rank needs it."""
        if _uses_jax():
            self._own = [(variable, keras.ops.convert_to_numpy(variable)) for variable in _others(self.model)]

    def _is_of_model(self, optimizer: Any) -> bool:
        return any(optimizer is each for each in optimizers_of(self.model))


class _Values(NamedTuple):
    """The values of the variables of a model and of its optimizers."""

    values: list[Any]
    optimizers: list[list[Any]]


def _uses_jax() -> bool:
    return keras.config.backend() == "jax"


def _of_optimizers(model: Any) -> list[list[Any]]:
    """The variables of each optimizer that all ranks have alike."""
    alike = {id(variable) for variable in state_of(model)}
    return [[each for each in _variables_of(one) if id(each) in alike] for one in optimizers_of(model)]


def _variables_of(optimizer: Any) -> list[Any]:
    """The variables of an optimizer but for those of its window."""
    distribution = distribution_of(optimizer)
    with distribution.without_window() if distribution else contextlib.nullcontext():
        return list(optimizer.variables)


def _others(model: Any) -> list[Any]:
    """The variables that are this rank's own: seeds, metrics and local layers."""
    alike = {id(variable) for variable in weights_of(model)}
    return [variable for variable in [*model.variables, *model.metrics_variables] if id(variable) not in alike]


def _values(variables: Sequence[Any]) -> list[Any]:
    return [keras.ops.convert_to_numpy(variable) for variable in variables]


def _assign(what: str, variables: Sequence[Any], values: Sequence[Any]) -> None:
    if len(variables) != len(values):
        raise ValueError(
            f"state.{what} has {len(variables)} variables where {len(values)} values are to be put back; make the same "
            "model on every rank, with an Input or built"
        )
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _is_readable(variable: Any) -> bool:
    """Whether a variable on the JAX backend has a value."""
    array = variable._value
    return array is not None and importlib.import_module("horovodish.jax.elastic").are_readable([array])


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Has `state.batch` say how many batches of the epoch are done; 0 between epochs.

    When `fit` begins with `state.batch` above 0, its first epoch ends that many batches sooner, if Keras knows how many
    an epoch has. Which samples are left is up to your data.

    Args:
        state: with an attribute `batch`.
    """

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state: Any = state
        self._before = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        self._before = self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Called by Keras."""
        self.state.batch = self._before + batch + 1
        if self._before and self.state.batch >= (self.params.get("steps") or float("inf")):
            self._model.stop_training = _END_OF_EPOCH

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        self.state.batch = self._before = 0
        if self._model.stop_training is _END_OF_EPOCH:
            self._model.stop_training = False


class _EndOfEpoch(int):
    """What `stop_training` is where the epoch shall end, and not the training."""


_END_OF_EPOCH = _EndOfEpoch(1)


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Has `state.epoch` say how many epochs are done, over all calls of `fit`.

    Call `fit` with `initial_epoch=state.epoch`, or with as many epochs as are left.

    Args:
        state: with an attribute `epoch`.
    """

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state: Any = state
        self._first: int | None = None
        self._before = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Called by Keras."""
        self._first, self._before = None, self.state.epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        if self._first is None:
            self._first = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        self.state.epoch = self._before + epoch + 1 - (self._first or 0)


class CommitStateCallback(keras.callbacks.Callback):
    """Commits the state after batches. Its place among the callbacks does not matter.

    Args:
        state: to commit.
        batches_per_commit: after how many batches.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._left = batches_per_commit
        self._updates: list[UpdateBatchStateCallback] = []

    def on_train_begin(self, logs: Any = None) -> None:
        """Called by Keras."""
        self._left = self.batches_per_commit
        self._updates = [each for each in callbacks_that_begin() if isinstance(each, UpdateBatchStateCallback)]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Called by Keras."""
        for update in self._updates:  # which may come behind this callback
            update.on_train_batch_end(batch, logs)
        self._left -= 1
        if self._left == 0:
            self._left = self.batches_per_commit
            self.state.commit()
