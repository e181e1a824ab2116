"""Batch normalization over the batches of all ranks, on all of Keras's backends."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from horovodish.collectives.process_sets import ProcessSet, global_process_set
from horovodish.keras.collectives import allgather

__all__ = ["SyncBatchNormalization"]


@keras.saving.register_keras_serializable(package="horovodish")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization` that takes the batches of all ranks for one batch.

    While training every call is collective: each rank must make it as often as the others, with any number of samples,
    and compute its gradient. It costs one collective in either direction. Otherwise nothing travels. This rank has its
    own share of the gradients of gamma and beta, which the wrapped optimizer reduces.

    Args:
        process_set: the ranks whose batches count as one; all of them in a model that was loaded.
        options: as for `keras.layers.BatchNormalization`, except that `renorm`, `synchronized` and `fused` may only be
            False.

    Raises:
        ValueError: options that it does not have, or Keras has changed.

    Example:
        >>> model = keras.Sequential([keras.layers.Conv2D(8, 3), hvd.SyncBatchNormalization(), keras.layers.ReLU()])

    Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979,
    for how the ranks' moments are put together.
    """

    def __init__(self, *, process_set: ProcessSet = global_process_set, **options: Any) -> None:
        for name in ("renorm", "synchronized", "fused"):
            if options.pop(name, False):
                raise ValueError(f"SyncBatchNormalization has no {name}=True; leave it out")
        if not hasattr(keras.layers.BatchNormalization, "_moments"):
            raise ValueError(f"SyncBatchNormalization does not know Keras {keras.__version__}; use an older one")
        super().__init__(**options)
        self.process_set = process_set

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        """Mean and biased variance of each channel over all ranks. Keras calls it while training. Collective."""
        # A rank outside the set shares its statistics with nobody. Keras computes the statistics of one rank.
        if self.process_set.size() == 1 or not self.process_set.included():
            return super()._moments(inputs, mask)
        axes = [axis for axis in range(len(inputs.shape)) if axis != self.axis % len(inputs.shape)]
        weights = ops.ones_like(inputs)
        if mask is not None:
            weights *= ops.expand_dims(ops.cast(mask, inputs.dtype), -1)
        count = ops.sum(weights, axes, keepdims=True)
        mean = ops.sum(inputs * weights, axes, keepdims=True) / ops.maximum(count, 1)
        squares = ops.sum(ops.square(inputs - mean) * weights, axes)
        own = ops.stack([ops.reshape(each, [-1]) for each in (count, mean, squares)])
        everyones = allgather(ops.expand_dims(own, 0), process_set=self.process_set)
        counts, means, squares = (everyones[:, row] for row in range(3))
        total = ops.maximum(ops.sum(counts, 0), 1)
        mean = ops.sum(counts * means, 0) / total
        return mean, ops.sum(squares + counts * ops.square(means - mean), 0) / total
