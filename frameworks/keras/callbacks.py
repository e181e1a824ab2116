"""Callbacks of `fit`. With any of them, the ranks agree at the end of every epoch whether training goes on.

Pass the same callbacks in the same order on every rank. `EarlyStopping` and others that set `stop_training` may then
decide by figures that differ between ranks: when one rank stops, all do, after the same epoch, and `fit` ends with the
same weights on all of them. A rank may also have fewer batches than others; see the guide "Keras".

Example:
    >>> callbacks = [
    ...     hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    ...     hvd.callbacks.MetricAverageCallback(),
    ...     hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.001 * hvd.size(), warmup_epochs=3),
    ...     keras.callbacks.EarlyStopping(patience=5),
    ... ]
    >>> model.fit(x, y, epochs=50, callbacks=callbacks, verbose=2 if hvd.rank() == 0 else 0)
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from horovodish.collectives.objects import allgather_object
from horovodish.collectives.process_sets import ProcessSet
from horovodish.errors import MismatchError
from horovodish.keras.broadcast_state import broadcast_model, optimizers_of, state_of, weights_of
from horovodish.keras.distribution import distribute_outside, distribution_of
from horovodish.keras.epoch_sync import EpochSyncCallback
from horovodish.keras.learning_rates import LearningRateScheduleCallback, LearningRateWarmupCallback
from horovodish.runtime import basics

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(EpochSyncCallback):
    """Gives every rank the root's weights and optimizer state before the first step.

    Where `compile` has put a LossScaleOptimizer around the wrapped optimizer, it also has the outer one reduce.

    What a model has only once it sees data (TensorFlow's backend, no `Input`) is broadcast after its first step. A
    model with its own `train_step` may have several optimizers: those that are its attributes are meant, or attributes
    of its layers. Random seeds, metrics and local layers stay each rank's own.

    Args:
        root_rank: the rank whose values to send, counted among all ranks, the same on every rank.
        device: taken because Horovod takes it; it changes nothing.

    Raises:
        ValueError: Keras knows of no weights of the model, after its first step or before.
    """

    def __init__(self, root_rank: int = 0, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self._complete = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Called by Keras. Collective."""
        super().on_train_begin(logs)
        model = self.model
        optimizers = optimizers_of(model)
        for optimizer in optimizers:
            distribute_outside(optimizer)
        if any(optimizer is model.optimizer and not optimizer.built for optimizer in optimizers) and model.built:
            model.optimizer.build(model.trainable_variables)
        self._complete = model.built
        if self._complete:
            self._send_all()
        else:  # it may be that all its layers are built, and that it never will be
            self._send(weights_of(model))
            for optimizer in optimizers:
                if distribution := distribution_of(optimizer):
                    distribution.compares = False  # what the first step makes is broadcast after it

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Called by Keras. Collective after the first step, which every rank does."""
        self.epoch_sync.sent_since_step = not self._complete
        if not self._complete:
            self._complete = True
            self._send_all()

    def _send_all(self) -> None:
        if not self.model.weights:
            raise ValueError(
                f"BroadcastGlobalVariablesCallback: {self.model.name} has no weights that Keras knows, so the ranks "
                "would train models of their own; make the layers and models that it trains its attributes"
            )
        self._send(state_of(self.model))

    def _send(self, variables: list[Any]) -> None:
        process_set = self.epoch_sync.process_set
        if process_set.included():
            broadcast_model(self.model, variables, self.root_rank, process_set)


class MetricAverageCallback(EpochSyncCallback):
    """Replaces the figures in the logs of an epoch, validation included, by their averages over the ranks.

    Callbacks behind it in the list, the history and `fit`'s own output see the averages.

    Args:
        device: taken because Horovod takes it; it changes nothing.
        process_set: the ranks to average over; by default the ranks of the wrapped optimizer.
    """

    def __init__(self, device: str = "", process_set: ProcessSet | None = None) -> None:
        super().__init__()
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras. Collective."""
        super().on_epoch_end(epoch, logs)
        average(logs, self._process_set or self.epoch_sync.process_set)


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint, EpochSyncCallback):
    """Saves the model whenever the average of a figure over the ranks is the best so far. Only the first rank writes.

    Args:
        filepath: where to, as for `keras.callbacks.ModelCheckpoint`.
        monitor: the figure in the logs of an epoch.
        verbose, mode, save_freq, save_weights_only, initial_value_threshold: as for `keras.callbacks.ModelCheckpoint`.
            `save_freq` other than "epoch" monitors the figures of the first rank.
    """

    def __init__(
        self,
        filepath: Any,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        save_weights_only: bool = False,
        initial_value_threshold: float | None = None,
    ) -> None:
        super().__init__(
            filepath,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
            initial_value_threshold=initial_value_threshold,
        )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Called by Keras."""
        if self._writes:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras. Collective."""
        self.epoch_sync.sync()
        averages = dict(logs or {})
        average(averages, self.epoch_sync.process_set)
        if self._writes:
            super().on_epoch_end(epoch, averages)

    @property
    def _writes(self) -> bool:
        return basics.rank() == self.epoch_sync.process_set.ranks[0]


def average(logs: dict[str, Any] | None, process_set: ProcessSet) -> None:
    """Replaces the numbers in the logs by their averages over the ranks. Collective.

    Raises:
        MismatchError: the ranks have different figures in their logs.
    """
    if not process_set.included() or process_set.size() == 1:
        return
    own = {name: float(value) for name, value in (logs or {}).items() if np.ndim(value) == 0}
    everyones = allgather_object(own, "the logs of an epoch in fit()", process_set)
    for rank, others in zip(process_set.ranks, everyones, strict=True):
        if others.keys() != everyones[0].keys():
            raise MismatchError(
                f"the logs of rank {rank} have {sorted(others)}, the logs of rank {process_set.ranks[0]} have "
                f"{sorted(everyones[0])}; compile and validate alike on every rank"
            )
    for name in own:
        logs[name] = float(np.mean([figures[name] for figures in everyones]))  # type: ignore[index]
