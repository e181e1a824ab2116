"""Where the ranks meet in `fit`: at the end of every epoch, however many batches each of them had, and at its end."""

from __future__ import annotations

import hashlib
import sys
from types import FrameType
from typing import Any

import keras

from horovodish.collectives.functions import join
from horovodish.collectives.objects import allgather_object
from horovodish.collectives.process_sets import ProcessSet, global_process_set
from horovodish.errors import MismatchError
from horovodish.keras.broadcast_state import broadcast_model, distributions_of, optimizers_of, state_of, weights_of
from horovodish.keras.distribution import distribution_of
from horovodish.launch import failures
from horovodish.runtime import basics


class EpochSync(keras.callbacks.Callback):
    """The ranks' agreements in one `fit` of a model.

    A rank whose epoch has ended joins: the others go on and reduce among themselves, until all have ended theirs. If
    they have not done equally many steps, they all get the variables of the one that has done most. (Not in a process
    set: all ranks of the world would have to join.)

    As the last callback, when all others have decided, it sets `stop_training` on every rank if it is set on any, and
    gives every rank the learning rates of the first one.

    Attributes:
        sent_since_step: whether the weights were broadcast after the last step, so that they say nothing about it.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.set_model(model)
        self._synced = self._compared = self._begun = self.sent_since_step = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Called by Keras, also with callbacks whose earlier epoch has failed."""
        self._synced = self._compared = self._begun = self.sent_since_step = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras. Collective in the first epoch.

        Raises:
            MismatchError: the ranks begin with different epochs.
        """
        if self._begun:
            return
        self._begun = True
        epochs = self.gathered(epoch, "the first epoch")
        if len(set(epochs)) > 1:
            raise MismatchError(
                f"fit() begins with different epochs on ranks {list(self.process_set.ranks)}: {epochs}; pass the same "
                "initial_epoch on every rank, and give each rank a folder of its own for BackupAndRestore"
            )

    def sync(self) -> None:
        """Waits until all ranks have ended the epoch, and makes up for steps that some have not done. Collective."""
        if self._synced or self._alone:
            return
        self._synced = True
        if self.process_set is global_process_set:
            join()
            for distribution in distributions_of(self.model):
                distribution.plan.options.comparison.skip()
                distribution.compares = False  # a rank without batches may trace its first step in a later epoch
            own = [_steps_of(optimizer) for optimizer in optimizers_of(self.model)]
            steps = self.gathered(own, "the steps of an epoch")
            if min(steps) < max(steps):
                broadcast_model(self.model, state_of(self.model), steps.index(max(steps, key=sum)))
            elif not (self._compared or self.sent_since_step or distributions_of(self.model)):
                self._compared = True
                self._compare_weights()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras. Collective."""
        self.sync()
        self._synced = False
        rates = [float(optimizer.learning_rate) for optimizer in self._with_rates]
        stops, everyones_rates = zip(
            *self.gathered((bool(self.model.stop_training), rates), "what follows an epoch"), strict=True
        )
        self.model.stop_training = any(stops)
        if self.model.stop_training or epoch + 1 == (self.params or {}).get("epochs"):
            for distribution in distributions_of(self.model):
                if distribution.rounds is not None:
                    distribution.rounds.end_round()
        for rank, others in zip(self.process_set.ranks, everyones_rates, strict=False):
            if others != everyones_rates[0]:
                self._unite_rates(rank, others, everyones_rates[0])
                break

    def on_train_end(self, logs: Any = None) -> None:
        """Called by Keras, when callbacks may have put back the best weights by the figures of one rank. Collective."""
        if not self._alone:
            root = self.process_set.ranks[0]
            broadcast_model(self.model, weights_of(self.model), root, self.process_set)

    @property
    def _with_rates(self) -> list[Any]:
        """The optimizers whose learning rates callbacks can set."""
        return [
            each
            for each in optimizers_of(self.model)
            if isinstance(getattr(each, "learning_rate", None), keras.Variable)
        ]

    def _unite_rates(self, rank: int, others: list[float], first: list[float]) -> None:
        failures.warn(
            f"the learning rates differ after an epoch: {others} on rank {rank}, {first} on rank "
            f"{self.process_set.ranks[0]}, which all ranks take now. Put hvd.callbacks.MetricAverageCallback() before "
            "ReduceLROnPlateau and other callbacks that decide by the logs"
        )
        for optimizer, rate in zip(self._with_rates, first, strict=True):
            optimizer.learning_rate = rate

    def _compare_weights(self) -> None:
        """Warn if the ranks have trained without our optimizers, after which their weights differ. Collective."""
        digest = hashlib.sha256()
        for variable in self.model.trainable_variables:
            digest.update(keras.ops.convert_to_numpy(variable).tobytes())
        if len(set(self.gathered(digest.digest(), "the weights after an epoch"))) > 1:
            failures.warn(
                f"the ranks have different weights of {self.model.name} after an epoch, and none of its optimizers is "
                "wrapped: wrap them with hvd.DistributedOptimizer, or reduce the gradients in train_step()"
            )

    def gathered(self, value: Any, what: str) -> list[Any]:
        """The objects that the ranks which train with this one pass, of any picklable type. Collective."""
        return [value] if self._alone else allgather_object(value, f"{what} in fit()", self.process_set)

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that train together."""
        distributions = distributions_of(self.model)
        return distributions[0].plan.options.process_set if distributions else global_process_set

    @property
    def _alone(self) -> bool:
        return self.process_set.size() == 1 or not self.process_set.included()


def _steps_of(optimizer: Any) -> int:
    """How many steps an optimizer has taken. In rounds a rank may skip steps alone, which its iterations leave out."""
    distribution = distribution_of(optimizer)
    rounds = distribution.rounds if distribution is not None else None
    return int(optimizer.iterations) if rounds is None else rounds.steps


def attended(model: Any) -> EpochSync:
    """The meeting of the `fit` that begins: one for all callbacks, behind all of them.

    Raises:
        ValueError: the callback that asks for it is in no list of Keras's, or `fit` would train each rank alone.
    """
    check_wrapped(model)
    callbacks = callbacks_that_begin()
    if not isinstance(callbacks[-1], EpochSync):
        epoch_sync = EpochSync(model)
        epoch_sync.set_params(callbacks[-1].params)
        callbacks.append(epoch_sync)
    _train_as_wrapped(model)
    found: EpochSync = callbacks[-1]
    return found


def check_wrapped(model: Any) -> None:
    """Raise if `fit` would train each rank alone, because the optimizer is not wrapped.

    A `train_step` or an optimizer of the user's own may reduce gradients, so they pass.
    """
    optimizers = optimizers_of(model)
    own = type(model).train_step is keras.Model.train_step
    if own and basics.size() > 1 and optimizers and not distributions_of(model):
        inner = [getattr(each, "inner_optimizer", each) for each in optimizers]  # compile() may have put one around it
        if all(type(each).__module__.startswith("keras.") for each in inner):
            raise ValueError(
                f"the optimizer of {model.name} is not wrapped, so each rank would train alone: pass "
                "hvd.DistributedOptimizer(optimizer) to compile(), call hvd.DistributedOptimizer(model.optimizer), or "
                "load the model with hvd.load_model"
            )


def _train_as_wrapped(model: Any) -> None:
    """Makes Keras compile the step again: it may have compiled it before an optimizer was wrapped."""
    distributions = distributions_of(model)
    if not all(each.in_fit for each in distributions) and getattr(model, "train_function", None) is not None:
        model.train_function = None
        model.make_train_function()
    for each in distributions:
        each.in_fit = True


def callbacks_that_begin() -> list[Any]:
    """The callbacks that `fit` calls. Keras tells a callback its model, but not the other callbacks."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.callbacks.CallbackList):
            callbacks: list[Any] = caller.callbacks
            return callbacks
        frame = frame.f_back
    raise ValueError("horovodish's callbacks must be called by fit() or in a keras.callbacks.CallbackList")


class EpochSyncCallback(keras.callbacks.Callback):
    """The base of all our callbacks: with any of them the ranks meet."""

    epoch_sync: EpochSync

    def on_train_begin(self, logs: Any = None) -> None:
        """Called by Keras."""
        self.epoch_sync = attended(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras. Collective."""
        self.epoch_sync.sync()
