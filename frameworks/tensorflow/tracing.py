"""What is to be heeded while TensorFlow traces a function into a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.ops import control_flow_util

Function = TypeVar("Function", bound=Callable[..., Any])


def as_written(function: Function) -> Function:
    """A decorator for what users call in their functions: AutoGraph is to leave it as it is."""
    decorated: Function = tf.autograph.experimental.do_not_convert(function)
    return decorated


def refuse_xla(operation: str) -> None:
    """Passes, unless a function is traced that XLA will compile: it has no operations of ours.

    Raises:
        NotImplementedError: the function has `jit_compile=True`.
    """
    if tf.executing_eagerly() or not control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        return
    raise NotImplementedError(
        f"XLA cannot compile horovodish's {operation}: leave out jit_compile=True for the function that calls it (in "
        "Keras, model.compile(..., jit_compile=False)), and put it on a function called from there that computes the "
        "gradients."
    )
