"""Tensors of TensorFlow from the NumPy arrays of `support.model`, and the ways to execute on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

EAGER, GRAPH, XLA = "eager", "graph", "compiled by XLA"


def called(function: Callable[..., Any], way: str) -> Callable[..., Any]:
    """The function as it is, or as a function of its own that TensorFlow traces, and XLA may compile."""
    return function if way == EAGER else tf.function(function, jit_compile=way == XLA)


def few_threads(inter: int = 2) -> None:
    """Before TensorFlow does anything else: many ranks share few cores."""
    tf.config.threading.set_inter_op_parallelism_threads(inter)
    tf.config.threading.set_intra_op_parallelism_threads(1)
