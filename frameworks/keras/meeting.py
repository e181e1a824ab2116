"""Where the ranks meet in `fit`: at the end of every epoch, however many batches each of them had, and at its end."""

from __future__ import annotations

from typing import Any

import keras

from horovodish.collectives import allgather_object, join
from horovodish.keras.distribution import is_distributed
from horovodish.keras.state import broadcast_variables, optimizers_of, state_of, weights_of
from horovodish.process_sets import ProcessSet, global_process_set


class Meeting:
    """What the ranks agree on in one `fit` of a model.

    A rank whose epoch has ended joins: the others go on and reduce among themselves, until all have ended theirs. If
    they have not done equally many steps, they all get the variables of the one that has done most. (Not in a process
    set, for which there is no join.)

    When all callbacks have had their turn, `stop_training` is set on every rank if it is set on any.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._met = False

    def meet(self) -> None:
        """Waits until all ranks have ended the epoch, and makes up for steps that some have not done. Collective."""
        if self._met or self._alone:
            return
        self._met = True
        if self.process_set is global_process_set:
            join()
            own = [int(optimizer.iterations) for optimizer in optimizers_of(self._model)]
            steps = allgather_object(own, "meeting.steps")
            if min(steps) < max(steps):
                broadcast_variables(state_of(self._model), steps.index(max(steps, key=sum)))

    def end_epoch(self) -> None:
        """Called when all callbacks have been called at the end of the epoch. Collective."""
        self.meet()
        self._met = False
        if not self._alone:
            stops = allgather_object(bool(self._model.stop_training), "meeting.stop", self.process_set)
            self._model.stop_training = any(stops)

    def end_training(self) -> None:
        """Called at the end of `fit`: callbacks may have put back the best weights by the figures of one rank."""
        if not self._alone:
            broadcast_variables(weights_of(self._model), self.process_set.ranks[0], self.process_set)

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that train together."""
        wrapped = filter(is_distributed, optimizers_of(self._model))
        return next((one._distribution.reduction.process_set for one in wrapped), global_process_set)

    @property
    def _alone(self) -> bool:
        return self.process_set.size() == 1 or not self.process_set.included()


def attended(model: Any) -> Meeting:
    """The meeting of the `fit` that begins: one for all callbacks.

    Raises:
        ValueError: `fit` keeps no history.
    """
    history = getattr(model, "history", None)
    if not isinstance(history, keras.callbacks.History):
        raise ValueError("horovodish's callbacks need fit() to keep a history; pass it a list of callbacks")
    if "meeting" not in vars(history):
        meeting = history.meeting = Meeting(model)
        end_epoch, end_training = history.on_epoch_end, history.on_train_end

        # Keras puts the history behind the callbacks of the user: it is called when they have decided.
        def on_epoch_end(epoch: int, logs: Any = None) -> None:
            end_epoch(epoch, logs)
            meeting.end_epoch()

        def on_train_end(logs: Any = None) -> None:
            end_training(logs)
            meeting.end_training()
            for name in ("meeting", "on_epoch_end", "on_train_end"):
                delattr(history, name)

        history.on_epoch_end, history.on_train_end = on_epoch_end, on_train_end
    return history.meeting


class MeetingCallback(keras.callbacks.Callback):
    """What all our callbacks have in common: with any of them the ranks meet."""

    meeting: Meeting

    def on_train_begin(self, logs: Any = None) -> None:
        """Called by Keras."""
        self.meeting = attended(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras. Collective."""
        self.meeting.meet()
