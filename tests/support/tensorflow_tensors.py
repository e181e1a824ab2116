"""Tensors of TensorFlow from the NumPy arrays of `support.model`, and the ways to execute on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

EAGER, GRAPH, XLA = "eager", "graph", "compiled by XLA"


def called(function: Callable[..., Any], way: str) -> Callable[..., Any]:
    """The function as it is, or as a function of its own that TensorFlow traces, and XLA may compile."""
    return function if way == EAGER else tf.function(function, jit_compile=way == XLA)
