"""The end of the engine waits for operations and functions that TensorFlow executes asynchronously."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.eager import context

from horovodish.runtime import basics


def _finish() -> list[str]:
    if not tf.config.experimental.get_synchronous_execution():
        try:
            context.async_wait()
        except tf.errors.OpError as error:
            return [error.message]
    return []


basics.follow(finish=_finish)
