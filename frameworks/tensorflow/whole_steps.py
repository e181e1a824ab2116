"""In a function, writes after a collective wait for the collective, so that a step that fails has written nothing.

TensorFlow lets each write of a function wait for its own inputs only. In a step that loses a rank, it would update the
variables whose gradients have come, and count the step, though other gradients never come.
"""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps

_NAME = "horovodish_gate"

_gates: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # the last one of each function
_passed: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # the same up to the operation looked at


def hold_writes(outputs: Any) -> None:
    """In the function that is traced, whatever is written from here on waits for these tensors and operations.

    Args:
        outputs: any structure of them. When executing eagerly they are there already.
    """
    if tf.executing_eagerly():
        return
    graph = tf.compat.v1.get_default_graph()
    if graph.building_function:
        before = [_gates[graph]] if graph in _gates else []
        with tf.control_dependencies([*tf.nest.flatten(outputs), *before]):
            _gates[graph] = tf.no_op(_NAME)


def _wait(operation: Any, _: Any, writes: Any) -> bool:
    """TensorFlow calls it for the operations of a function in the order of the program, when all are there."""
    graph = operation.graph
    if operation.type == "NoOp" and _NAME in operation.name:
        _passed[graph] = operation
    elif writes and graph in _passed:
        operation._add_control_input(_passed[graph])
    return False  # it adds no resources


auto_control_deps.register_acd_resource_resolver(_wait)
