"""Callbacks that set the learning rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from horovodish.keras.broadcast_state import optimizers_of
from horovodish.keras.epoch_sync import EpochSyncCallback, callbacks_that_begin
from horovodish.runtime import basics


class LearningRateScheduleCallback(EpochSyncCallback):
    """Sets the learning rate to a multiple of `initial_lr`, from one epoch on, before another one.

    In an epoch that `hvd.elastic.UpdateBatchStateCallback` continues in its middle, the learning rate continues, too.

    Args:
        initial_lr: the learning rate that is multiplied.
        multiplier: a number, or a function of the epoch; without `staircase` the epoch has a fraction.
        start_epoch: the first epoch, counted from 0, with the multiplied rate.
        end_epoch: the first epoch without it; None for no end.
        staircase: at the beginning of each epoch only, instead of before every batch. Implied by a number.
        momentum_correction: when the learning rate changes, scale the momenta of `keras.optimizers.SGD` by as much,
            since they contain it (Goyal et al., 2017, arXiv:1706.02677, section 3).
        steps_per_epoch: batches of an epoch, where Keras does not know them and `staircase` is False. Where ranks have
            different numbers of batches, the largest counts, so that a batch has the same fraction on all of them.

    Raises:
        ValueError: in `fit`, if the optimizer's learning rate is a schedule, the steps of an epoch are unknown, or the
            model has several optimizers and `compile` got none of them.

    Example:
        >>> decay = hvd.callbacks.LearningRateScheduleCallback(0.1, multiplier=lambda epoch: 0.1 ** (epoch // 30))
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr = initial_lr
        self.multiplier = multiplier
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase or not callable(multiplier)
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._epoch = 0
        self._most_steps: int | None = None
        self._other_optimizer: Any = None
        self._callbacks: list[Any] = []

    def on_train_begin(self, logs: Any = None) -> None:
        """Called by Keras. Collective."""
        super().on_train_begin(logs)
        self._callbacks = callbacks_that_begin()
        steps = self.steps_per_epoch or (self.params or {}).get("steps")
        known = filter(None, self.epoch_sync.gathered(steps, "the number of steps of an epoch"))
        self._most_steps = max(known, default=None)
        optimizers = optimizers_of(self.model)
        if any(optimizer is self.model.optimizer for optimizer in optimizers):
            self._other_optimizer = None
        elif len(optimizers) == 1:
            self._other_optimizer = optimizers[0]
        else:
            raise ValueError(
                f"{type(self).__name__} sets one learning rate, but {self.model.name} is trained by {len(optimizers)} "
                "optimizers, and none was passed to compile(); set their learning rates in a callback of your own"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        self._epoch = epoch
        if self.staircase and self._in_force:
            self._set(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Called by Keras."""
        if not self.staircase and self._in_force:
            done = max((getattr(each, "batches_before", 0) for each in self._callbacks), default=0)
            self._set(self._epoch + (done + batch) / self._steps())

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras. Collective."""
        super().on_epoch_end(epoch, logs)
        if logs is not None:
            logs["learning_rate"] = float(self._optimizer.learning_rate)

    @property
    def _optimizer(self) -> Any:
        model = self.model  # on JAX, Keras brings the variables up to date when it is asked for the model
        return model.optimizer if self._other_optimizer is None else self._other_optimizer

    @property
    def _in_force(self) -> bool:
        return self.start_epoch <= self._epoch and (self.end_epoch is None or self._epoch < self.end_epoch)

    def _steps(self) -> int:
        if self._most_steps is None:
            raise ValueError(
                f"{type(self).__name__} needs steps_per_epoch: Keras does not know how many batches this data has"
            )
        return self._most_steps

    def _set(self, epoch: float) -> None:
        optimizer = self._optimizer
        factor = self.multiplier(epoch) if callable(self.multiplier) else self.multiplier
        before, after = float(optimizer.learning_rate), self.initial_lr * factor
        try:
            optimizer.learning_rate = after
        except TypeError as error:
            raise ValueError(
                f"{type(self).__name__} sets the learning rate, but the optimizer was made with a schedule; make it "
                "with a number"
            ) from error
        if self.momentum_correction and before > 0 and after != before:
            for momentum in getattr(getattr(optimizer, "inner_optimizer", optimizer), "momentums", ()):
                momentum.assign(momentum * (after / before))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate batch by batch, from the rate of one rank to the rate of all ranks.

    lr(epoch) = initial_lr / N * (1 + epoch * (N - 1) / warmup_epochs), for N ranks. Large batches bear a learning rate
    N times as large, though not in the first epochs: Goyal et al., "Accurate, large minibatch SGD: training ImageNet in
    1 hour", 2017, arXiv:1706.02677.

    Args:
        initial_lr: the learning rate after the warm-up: the rate of one process times `hvd.size()`.
        warmup_epochs: how many epochs it takes.
        momentum_correction, steps_per_epoch: as for `LearningRateScheduleCallback`.
        verbose: more than 0 prints a line on rank 0 when it is done.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            ranks = basics.size()
            warm = min((epoch + 1 / self._steps()) / warmup_epochs, 1.0)  # the last batch has all of it
            return (1 + warm * (ranks - 1)) / ranks

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=-int(-warmup_epochs // 1),
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras. Collective."""
        is_last = self.end_epoch is not None and epoch + 1 == self.end_epoch
        if is_last:  # the last batch has not got all of it where a compiled step takes several batches
            self._set(epoch + 1)
        super().on_epoch_end(epoch, logs)
        if is_last and self.verbose > 0 and basics.rank() == 0:
            print(f"Epoch {epoch + 1}: warmed up to learning rate {float(self._optimizer.learning_rate):g}")
