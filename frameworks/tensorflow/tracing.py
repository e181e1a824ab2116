"""Helpers for code that runs while TensorFlow traces a function into a graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.ops import control_flow_util

Function = TypeVar("Function", bound=Callable[..., Any])

_belongs_to_xla: ContextVar[bool] = ContextVar("_belongs_to_xla", default=False)


def as_written(function: Function) -> Function:
    """A decorator for what users call in their functions: AutoGraph is to leave it as it is."""
    decorated: Function = tf.autograph.experimental.do_not_convert(function)
    return decorated


def in_graph_for_sessions() -> bool:
    """True inside a TensorFlow 1 graph, where an operation runs only if a session fetches it."""
    return not tf.executing_eagerly() and not tf.compat.v1.get_default_graph().building_function


def compiled_by_xla() -> bool:
    """Whether a function is traced that XLA will compile."""
    if tf.executing_eagerly():
        return False
    return _belongs_to_xla.get() or control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


@contextmanager
def belonging_to_xla() -> Iterator[None]:
    """The gradient of what XLA compiles is compiled by it, too, which its graph does not tell."""
    token = _belongs_to_xla.set(True)
    try:
        yield
    finally:
        _belongs_to_xla.reset(token)


def trace_anew() -> None:
    """Have every `tf.function` of this process be traced again when it is called next."""
    function = type(tf.function(lambda: None))
    for each in gc.get_objects():
        if issubclass(type(each), function):
            each._function_cache.clear()


def refuse_xla(what: str) -> None:
    """Raise if XLA will compile the function that is traced.

    Args:
        what: cannot be compiled.

    Raises:
        NotImplementedError: the function has `jit_compile=True`.
    """
    if compiled_by_xla():
        raise NotImplementedError(
            f"XLA cannot compile horovodish's {what}: leave out jit_compile=True for the function that calls it (in "
            "Keras, model.compile(..., jit_compile=False)), and put it on a function called from there that computes "
            "the gradients."
        )
