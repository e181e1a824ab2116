"""Elastic training with TensorFlow: `horovodish.elastic` with a state that holds variables.

Example:
    import horovodish.tensorflow as hvd

    hvd.init()

    @hvd.elastic.run
    def train(state):
        while state.step < 1000:
            step(*batch_of(state.step))  # a tf.function with a DistributedGradientTape
            state.step += 1
            state.commit()

    train(hvd.elastic.TensorFlowState([*model.variables, *optimizer.variables], step=0))

    $ horovodish run -np 4 --min-np 2 python train.py
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from horovodish import elastic
from horovodish.elastic import *  # noqa: F403
from horovodish.elastic import State
from horovodish.elastic.state import assign
from horovodish.tensorflow.broadcast_state import finalize_layers
from horovodish.tensorflow.tracing import trace_anew

if TYPE_CHECKING:
    from horovodish.tensorflow.keras.elastic import KerasState as TensorFlowKerasState

__all__ = ["TensorFlowKerasState", "TensorFlowState"]
__all__ += elastic.__all__


class TensorFlowState(State):
    """A state with variables. An attribute may be one, a list or dict of them, or an object with `variables`.

    Variables stay the same objects; values are assigned to them. When the ranks have changed, every `tf.function` is
    traced anew, so that it sees the `hvd.size()` and the process sets that there are now.

    Args:
        variables: of TensorFlow or Keras, the same ones in the same order on every rank.
        session: taken because Horovod takes it; variables of sessions cannot be kept.
        attributes: the first attributes: numbers, variables, tensors and everything that can be pickled.

    Raises:
        ValueError: `session` is given.

    Example:
        >>> state = hvd.elastic.TensorFlowState(model.variables, momenta=momenta, epoch=0)
    """

    def __init__(self, variables: Iterable[Any] | None = None, session: None = None, **attributes: Any) -> None:
        if session is not None:
            raise ValueError(
                "TensorFlowState cannot keep the variables of a session; put session.run(variables) into an attribute "
                "of an ObjectState before each commit(), and load it from there"
            )
        super().__init__(variables=list(variables or ()), **attributes)

    def reset(self) -> None:
        """Have functions traced anew."""
        trace_anew()

    def _keeps(self, value: object) -> bool:
        return _variables(value) is not None or super()._keeps(value)

    def _kept_of(self, value: Any) -> Any:
        variables = _variables(value)
        return super()._kept_of(value) if variables is None else [each.numpy() for each in variables]

    def _give_back(self, value: Any, kept: Any) -> None:
        variables = _variables(value)
        if variables is None:
            super()._give_back(value, kept)
            return
        assign("it", variables, kept, "make the same variables on every rank before the first sync()")
        finalize_layers(variables)


def _variables(value: Any) -> list[Any] | None:
    """The variable itself, or the variables of an object that has some; None for anything else."""
    if isinstance(value, type):
        return None
    if isinstance(value, tf.Variable) or (hasattr(value, "assign") and hasattr(value, "numpy")):  # Keras has its own
        return [value]
    variables = getattr(value, "variables", None)
    return list(variables) if isinstance(variables, list | tuple) else None


def __getattr__(name: str) -> object:
    if name == "TensorFlowKerasState":
        from horovodish.tensorflow.keras.elastic import KerasState  # Keras takes a second to import

        return KerasState
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
