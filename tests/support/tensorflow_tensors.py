"""Tensors of TensorFlow from the NumPy arrays of `support.model`, and both ways to execute on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

EAGER, GRAPH = "eager", "graph"


def called(function: Callable[..., Any], way: str) -> Callable[..., Any]:
    """The function as it is, or as a function of its own that TensorFlow traces."""
    return function if way == EAGER else tf.function(function)


def few_threads(inter: int = 2) -> None:
    """Before TensorFlow does anything else: many ranks share few cores."""
    tf.config.threading.set_inter_op_parallelism_threads(inter)
    tf.config.threading.set_intra_op_parallelism_threads(1)
