"""Codecs in `fit`, on every backend: every rank gets the same bits, and nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import horovodish.keras as hvd
from support.coded import ELEMENTS, Floats, encode_or_refuse, loses_nothing
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


@on_ranks((2, "mpi_ring"))
def test_every_function_that_takes_a_compression(tmp_path: Path) -> None:
    file = tmp_path / f"{hvd.rank()}.keras"
    images, labels = np.ones((1, 300)), np.zeros((1, 300))

    def fitted(wrap: Any = hvd.DistributedOptimizer, **options: Any) -> keras.Model:
        model = keras.Sequential([keras.Input((300,)), keras.layers.Dense(300)])
        model.compile(wrap(keras.optimizers.SGD(1.0), **options), loss="mse")
        model.fit(images, labels, verbose=0)
        return model

    def load(compression: Any) -> None:
        fitted().save(file)
        hvd.load_model(file, compression=compression).fit(images, labels, verbose=0)

    encode_or_refuse(
        hvd,
        {
            "allreduce": lambda its: hvd.allreduce(np.ones((300, 300)), compression=its),
            "DistributedOptimizer": lambda its: fitted(compression=its),
            "PartialDistributedOptimizer": lambda its: fitted(hvd.PartialDistributedOptimizer, compression=its),
            "DiLoCo": lambda its: fitted(sync=hvd.DiLoCo(1, compression=its)),
            "Sync": lambda its: fitted(sync=hvd.Sync(1, compression=its)),
            "load_model": load,
        },
        {},
    )


@on_ranks((2, "mpi_ring"))
def test_auto() -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((300,)), keras.layers.Dense(300)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=hvd.Compression.auto), loss="mse")
    model.fit(np.ones((3, 300)), np.full((3, 300), hvd.rank()), batch_size=1, verbose=0)
    chosen = [(one.name, one.codec, one.steps) for one in hvd.compression_report().tensors]
    assert chosen in ([], [(model.trainable_variables[0].path, "int8", 3)])
    assert len({*map(str, hvd.allgather_object((chosen, [its.tobytes() for its in model.get_weights()])))}) == 1
