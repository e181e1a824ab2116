"""The end of the engine waits for operations and functions that TensorFlow executes asynchronously."""

from __future__ import annotations

import contextlib

import tensorflow as tf
from tensorflow.python.eager import context

from horovodish.runtime import basics


def _finish() -> None:
    if not tf.config.experimental.get_synchronous_execution():
        with contextlib.suppress(tf.errors.OpError):
            context.async_wait()


basics.follow(finish=_finish)
