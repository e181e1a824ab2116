"""Codecs in `fit`, on every backend: every rank gets the same bits, and nothing is lost."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import horovodish.keras as hvd
from support.coded import ELEMENTS, Floats, loses_nothing
from support.on_ranks import on_ranks

pytestmark = pytest.mark.usefixtures("backend")


@on_ranks((2, "mpi_ring"))
def test_fit_loses_nothing() -> None:
    model = keras.Sequential([keras.Input((ELEMENTS,)), keras.layers.Dense(1, use_bias=False)])
    codec = hvd.Compression.int8(where=lambda name, shape: name.endswith("kernel") and shape == (ELEMENTS, 1))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=codec)
    model.compile(optimizer, loss=lambda _, predicted: keras.ops.mean(predicted))

    def step(gradient: Floats) -> object:
        model.set_weights([np.zeros_like(gradient)])
        model.fit(gradient.T, np.zeros((1, 1)), verbose=0)
        return -model.get_weights()[0]

    loses_nothing(step)
    own = np.random.default_rng(hvd.rank()).standard_normal(300, np.float32)
    exact = np.mean([np.random.default_rng(rank).standard_normal(300, np.float32) for rank in range(2)], 0)
    for value in (own, keras.ops.convert_to_tensor(own)):
        result = keras.ops.convert_to_numpy(hvd.allreduce(value, compression=hvd.Compression.int8))
        assert 1e-4 < np.abs(result - exact).max() < 0.1
