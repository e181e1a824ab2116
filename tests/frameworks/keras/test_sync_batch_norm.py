"""SyncBatchNormalization: ranks that share a batch do what one process does with all of it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import horovodish.keras as hvd
from support.on_ranks import on_ranks

pytestmark = pytest.mark.usefixtures("backend")

SAMPLES = {0: slice(0, 6), 1: slice(6, 8)}
"""The samples of each rank. Keras does not train on a rank without samples."""


def trained(layer: Any, optimizer: Any, samples: slice, weight: float) -> Any:
    """A model after two steps with these samples. `weight` makes a mean over them a mean over all."""
    random = np.random.default_rng(5)
    x = random.normal(size=(8, 3, 4)).astype("float32") * [1, 10, 0.1, 1] + [0, 100, 0, 5]
    y = random.normal(size=(8, 3, 2)).astype("float32")
    model = keras.Sequential([keras.Input((3, 4)), layer, keras.layers.Dense(2, kernel_initializer="ones")])
    model.compile(optimizer, loss="mse")
    count = len(x[samples])
    for _ in range(2):
        model.train_on_batch(x[samples], y[samples], sample_weight=np.full((count, 3), weight * count))
    return model


@on_ranks(2)
def test_two_ranks_with_parts_of_a_batch_train_as_one_with_all_of_it() -> None:
    whole = trained(keras.layers.BatchNormalization(), keras.optimizers.SGD(0.1), slice(None), 1 / 8)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Sum)
    shared = trained(hvd.SyncBatchNormalization(), optimizer, SAMPLES[hvd.rank()], 1 / 8)
    for ours, theirs in zip(shared.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)
    x = np.ones((2, 3, 4), "float32")
    np.testing.assert_allclose(shared.predict(x, verbose=0), whole.predict(x, verbose=0), rtol=1e-3, atol=1e-4)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(shared.layers[0]))
    assert type(again) is hvd.SyncBatchNormalization
    assert again.process_set is hvd.global_process_set


@on_ranks(2)
def test_masked_samples_do_not_count() -> None:
    layer = hvd.SyncBatchNormalization(momentum=0.0)
    values = np.arange(8, dtype="float32").reshape(2, 2, 2) + 100 * hvd.rank()
    mask = np.array([[True, True], [hvd.rank() == 0, False]])
    layer(keras.ops.convert_to_tensor(values), training=True, mask=keras.ops.convert_to_tensor(mask))
    counted = np.concatenate([values[mask] for values, mask in zip(*everyones(values, mask), strict=True)])
    np.testing.assert_allclose(keras.ops.convert_to_numpy(layer.moving_mean), counted.mean(0), rtol=1e-6)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(layer.moving_variance), counted.var(0), rtol=1e-5)
    with pytest.raises(ValueError, match="has no renorm=True; leave it out"):
        hvd.SyncBatchNormalization(renorm=True)


def everyones(values: np.ndarray, mask: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    return hvd.allgather_object(values), hvd.allgather_object(mask)
