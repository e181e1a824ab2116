"""Starting alike in graphs for sessions, as programs of TensorFlow 1's kind do."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovodish.collectives.process_sets import ProcessSet, global_process_set
from horovodish.tensorflow.broadcast_state import broadcast_variables
from horovodish.tensorflow.tracing import in_graph_for_sessions

__all__ = ["BroadcastGlobalVariablesHook", "broadcast_global_variables"]

Hook: Any = tf.compat.v1.train.SessionRunHook


def broadcast_global_variables(root_rank: int, process_set: ProcessSet = global_process_set) -> Any:
    """The operation that gives every rank's global variables the values of one rank, for a session to run. Collective.

    Args:
        root_rank: the rank whose values to send, counted among all ranks, the same on every rank.
        process_set: the ranks that take part.

    Raises:
        ValueError: there is no rank `root_rank` in the process set.
        RuntimeError: not in a graph for sessions: elsewhere TensorFlow has no list of all variables.

    Example:
        >>> broadcast = hvd.broadcast_global_variables(0)  # the last part of the graph
        >>> session.run(tf.compat.v1.global_variables_initializer())
        >>> session.run(broadcast)
    """
    if not in_graph_for_sessions():
        raise RuntimeError(
            "broadcast_global_variables() is for graphs that sessions run: TensorFlow has no list of all variables "
            "elsewhere. Use broadcast_variables(variables, root_rank)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank, process_set)


class BroadcastGlobalVariablesHook(Hook):
    """Gives every rank's global variables the values of one rank when a session begins. Every rank must use it.

    Args:
        root_rank: the rank whose values to send, counted among all ranks, the same on every rank.
        device: Horovod's, without effect here: TensorFlow chooses where operations run.
        process_set: the ranks that take part.

    Example:
        >>> hooks = [hvd.BroadcastGlobalVariablesHook(0)]
        >>> with tf.compat.v1.train.MonitoredTrainingSession(hooks=hooks) as session:
        ...     session.run(train)
    """

    def __init__(self, root_rank: int, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self._root_rank = root_rank
        self._process_set = process_set
        self._broadcast: Any = None

    def begin(self) -> None:
        """Adds the operation to the graph, which is finalized afterwards."""
        graph = tf.compat.v1.get_default_graph()
        if self._broadcast is None or self._broadcast.graph is not graph:
            self._broadcast = broadcast_global_variables(self._root_rank, self._process_set)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs it, once the variables are initialized or restored. Collective."""
        session.run(self._broadcast)
