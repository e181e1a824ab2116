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
from typing import Any

import keras

from horovodish import elastic
from horovodish.elastic import *  # noqa: F403
from horovodish.elastic import State
from horovodish.elastic.state import assign
from horovodish.gradients.sync import check_rounds
from horovodish.keras.backends import compile_anew
from horovodish.keras.broadcast_state import keeping_layers_of, optimizers_of, state_of, weights_of
from horovodish.keras.distribution import distribution_of
from horovodish.keras.epoch_sync import callbacks_that_begin, check_wrapped
from horovodish.keras.layer_state import give_back, kept_of

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback"]
__all__ += elastic.__all__

_REMEDY = "make the same model on every rank, with an Input or built"
_OPTIMIZER_REMEDY = "before the first commit, call model.optimizer.build(model.trainable_variables)"


class KerasState(State):
    """A state with a model: its weights, the variables of its optimizers and what its layers have adapted to.

    Random seeds, metrics, local layers and windows of `backward_passes_per_step` stay each rank's own; windows begin
    anew when the ranks have changed. Compiled steps are then compiled anew.

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
        for each in (*optimizers_of(model), optimizer):
            distribution = distribution_of(each)
            if distribution is not None and distribution.rounds is not None:
                check_rounds(1, within=distribution.rounds.policy.within)
        super().__init__(model=model, **given, **attributes)

    def reset(self) -> None:
        """Have steps compiled anew."""
        compile_anew()

    def _let_go(self) -> None:
        if _uses_jax():
            for model in self._objects(keras.Model):
                # A step takes the weights out of the model, and fit() may have failed to put them back.
                model._jax_state, model._jax_state_synced = None, True
            for variable, value in self._own:
                if not _is_readable(variable):
                    variable.assign(value)

    def _has_open_window(self) -> bool:
        if _uses_jax():
            for model in self._objects(keras.Model):
                model.jax_state_sync()
        return super()._has_open_window()

    def _committed(self) -> None:
        # A step that fails takes these from the rank, though no other rank needs them.
        if _uses_jax():
            others = [variable for model in self._objects(keras.Model) for variable in _others(model)]
            self._own = [(variable, keras.ops.convert_to_numpy(variable)) for variable in others]

    def _finish(self) -> None:
        if _uses_jax():
            variables = [variable for model in self._objects(keras.Model) for variable in _variables_that_travel(model)]
            importlib.import_module("jax").block_until_ready([variable.value for variable in variables])

    def _keeps(self, value: object) -> bool:
        return isinstance(value, keras.Model | keras.optimizers.Optimizer) or super()._keeps(value)

    def _kept_of(self, value: Any) -> Any:
        if isinstance(value, keras.Model):
            optimizers = [_values(each) for each in _of_optimizers(value)]
            return _values(weights_of(value)), optimizers, list(map(kept_of, keeping_layers_of(value)))
        if isinstance(value, keras.optimizers.Optimizer):
            return [] if self._is_of_model(value) else _values(_variables_of(value))
        return super()._kept_of(value)

    def _give_back(self, value: Any, kept: Any) -> None:
        if isinstance(value, keras.Model):
            weights, optimizers, layers = kept
            for optimizer, values in zip(optimizers_of(value), optimizers, strict=False):
                if not optimizer.built and len(values) > len(optimizer.variables):
                    optimizer.build(value.trainable_variables)
            assign("the model", weights_of(value), weights, _REMEDY)
            for variables, values in zip(_of_optimizers(value), optimizers, strict=True):
                assign("the model's optimizer", variables, values, _OPTIMIZER_REMEDY)
            give_back(keeping_layers_of(value), layers)
        elif not isinstance(value, keras.optimizers.Optimizer):
            super()._give_back(value, kept)
        elif kept:
            if not value.built:
                raise ValueError(f"this {type(value).__name__} is not built; build it before the first sync()")
            assign("the optimizer", _variables_of(value), kept, _REMEDY)

    def _is_of_model(self, optimizer: Any) -> bool:
        return any(optimizer is each for each in optimizers_of(self.model))


def _uses_jax() -> bool:
    return keras.config.backend() == "jax"


def _of_optimizers(model: Any) -> list[list[Any]]:
    """The variables of each optimizer that all ranks have alike."""
    alike = {id(variable) for variable in state_of(model)}
    return [[each for each in _variables_of(one) if id(each) in alike] for one in optimizers_of(model)]


def _variables_that_travel(model: Any) -> list[Any]:
    return [*weights_of(model), *(variable for each in _of_optimizers(model) for variable in each)]


def _variables_of(optimizer: Any) -> list[Any]:
    """The variables of an optimizer, without the variables of its window."""
    distribution = distribution_of(optimizer)
    with distribution.hiding(distribution.window) if distribution else contextlib.nullcontext():
        return list(optimizer.variables)


def _others(model: Any) -> list[Any]:
    """The variables that are this rank's own: seeds, metrics and local layers."""
    alike = {id(variable) for variable in weights_of(model)}
    return [variable for variable in [*model.variables, *model.metrics_variables] if id(variable) not in alike]


def _values(variables: Sequence[Any]) -> list[Any]:
    return [keras.ops.convert_to_numpy(variable) for variable in variables]


def _is_readable(variable: Any) -> bool:
    """Whether a variable on the JAX backend has a value."""
    array = variable._value
    return array is not None and importlib.import_module("horovodish.jax.elastic").are_readable([array])


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Keeps `state.batch` at the number of batches of the epoch that are done; 0 between epochs.

    When `fit` begins with `state.batch` above 0, its first epoch ends that many batches sooner, if Keras knows how many
    an epoch has. Which samples are left is up to your data.

    Args:
        state: with an attribute `batch`.

    Attributes:
        batches_before: how many batches of this epoch an earlier `fit` has done.
    """

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state: Any = state
        self.batches_before = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        self.batches_before = self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Called by Keras."""
        self.state.batch = self.batches_before + batch + 1
        if self.batches_before and self.state.batch >= (self.params.get("steps") or float("inf")):
            self._model.stop_training = _END_OF_EPOCH

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        self.state.batch = self.batches_before = 0
        if self._model.stop_training is _END_OF_EPOCH:
            self._model.stop_training = False


class _EndOfEpoch(int):
    """The value of `stop_training` that ends the epoch but not the training."""


_END_OF_EPOCH = _EndOfEpoch(1)


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Keeps `state.epoch` at the number of epochs that are done, over all calls of `fit`.

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
        batches_per_commit: after how many batches; within a round of `sync=` or a window, as soon as that has ended.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._left = batches_per_commit
        self._updates: list[UpdateBatchStateCallback] = []

    def on_train_begin(self, logs: Any = None) -> None:
        """Called by Keras."""
        check_wrapped(self.model)
        self._left = self.batches_per_commit
        self._updates = [each for each in callbacks_that_begin() if isinstance(each, UpdateBatchStateCallback)]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Called by Keras."""
        for update in self._updates:  # which may come behind this callback
            update.on_train_batch_end(batch, logs)
        self._left -= 1
        if self._left <= 0 and not self.state._has_open_window():
            self._left = self.batches_per_commit
            self.state.commit()
