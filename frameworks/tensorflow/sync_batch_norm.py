"""Batch normalization over the batches of all ranks. Imported when it is asked for, because it needs Keras."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovodish.collectives.process_sets import ProcessSet, checked_id, global_process_set
from horovodish.collectives.reduce_ops import Sum
from horovodish.tensorflow.collectives import allreduce
from horovodish.tensorflow.names import operation_name


@tf.keras.utils.register_keras_serializable(package="horovodish")
class SyncBatchNormalization(tf.keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization` that takes the batches of all ranks for one batch.

    While training every call is collective: each rank must make it as often as the others, with any number of samples,
    and compute its gradient. It costs one collective in either direction. Otherwise nothing travels. Statistics are put
    together as float64. The gradients of gamma and beta are this rank's share, as those of all variables.

    Args:
        process_set: the ranks whose batches count as one; all of them in a model that was loaded.
        options: those of `keras.layers.BatchNormalization`, but for `renorm`, `synchronized` and `fused`, which may be
            False.

    Raises:
        ValueError: options that it does not have, or Keras runs on another backend than TensorFlow.

    Example:
        >>> model = keras.Sequential([keras.layers.Conv2D(8, 3), hvd.SyncBatchNormalization(), keras.layers.ReLU()])
    """

    def __init__(self, *, process_set: ProcessSet = global_process_set, **options: Any) -> None:
        if tf.keras.backend.backend() != "tensorflow":
            raise ValueError(
                "SyncBatchNormalization needs Keras on TensorFlow, and it runs on "
                f"{tf.keras.backend.backend()}; set KERAS_BACKEND=tensorflow"
            )
        for name in ("renorm", "synchronized", "fused"):
            if options.pop(name, False):
                raise ValueError(f"SyncBatchNormalization has no {name}=True; leave it out")
        super().__init__(**options)
        self.process_set = process_set

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """The normalized inputs. Collective while training."""
        # A rank outside the set has nobody to share its statistics with, and Keras has its own way for those of one.
        if not (training and self.trainable) or self.process_set.size() == 1 or not self.process_set.included():
            return super().call(inputs, training=training, mask=mask)
        dtype = tf.float64 if inputs.dtype == tf.float64 else tf.float32
        values = tf.cast(inputs, dtype)
        mean, variance = (tf.cast(moment, dtype) for moment in self._shared_moments(values, mask))
        for moving, new in ((self.moving_mean, mean), (self.moving_variance, variance)):
            old = tf.cast(tf.convert_to_tensor(moving), dtype)
            moving.assign(old * self.momentum + new * (1.0 - self.momentum))
        along = [1] * len(inputs.shape)
        along[self.axis] = -1
        gamma = tf.convert_to_tensor(self.gamma) if self.scale else None
        beta = tf.convert_to_tensor(self.beta) if self.center else None
        scale, offset = (None if each is None else tf.reshape(tf.cast(each, dtype), along) for each in (gamma, beta))
        shared = (tf.reshape(moment, along) for moment in (mean, variance))
        return tf.cast(tf.nn.batch_normalization(values, *shared, offset, scale, self.epsilon), self.compute_dtype)

    def _shared_moments(self, values: tf.Tensor, mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Mean and biased variance of each channel over all ranks, as float64."""
        rank = len(values.shape)
        axes = [axis for axis in range(rank) if axis != self.axis % rank]
        weights = tf.ones_like(values)
        if mask is not None:
            weights *= tf.cast(mask, values.dtype)[..., tf.newaxis]
        count = tf.reduce_sum(weights, axes, keepdims=True)
        mean = tf.math.divide_no_nan(tf.reduce_sum(values * weights, axes, keepdims=True), count)
        squares = tf.reduce_sum(tf.square(values - mean) * weights, axes)
        count, mean, squares = (tf.cast(tf.reshape(each, [-1]), tf.float64) for each in (count, mean, squares))
        own = tf.stack([count, count * mean, squares + count * mean * mean])
        name = operation_name("sync_batch_norm", None, checked_id(self.process_set))
        count, total, squares = tf.unstack(allreduce(own, op=Sum, name=name, process_set=self.process_set))
        mean = tf.math.divide_no_nan(total, count)
        return mean, tf.maximum(tf.math.divide_no_nan(squares, count) - mean * mean, 0.0)
