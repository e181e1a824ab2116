"""Models of Keras and their data, on any backend; and marks that say on which backends a test runs."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import keras
import numpy as np
import pytest

import horovodish.keras as hvd

if "TEST_WITHOUT_TENSORFLOW" in os.environ:
    sys.modules["tensorflow"] = None  # type: ignore[assignment]  # Keras takes seconds to import it, and does not need it

STEPS, BATCH, EPOCHS = 5, 4, 2
# Sums of float32 in another order: a few units in the last place for each step, of weights of magnitude 1.
CLOSE = {"rtol": 5e-5, "atol": 5e-6}

BACKENDS = ("torch", "jax", "tensorflow")
three_ranks_too = pytest.mark.parametrize(
    ("world", "backend"),
    [
        ((2, ""), "torch"),
        ((2, ""), "jax"),
        ((2, ""), "tensorflow"),
        pytest.param((3, ""), "jax", marks=pytest.mark.soak),
    ],
    ids=["2-torch", "2-jax", "2-tensorflow", "3-jax"],
    indirect=["backend"],
    scope="module",
)
"""More ranks than cores perhaps, sums whose order matters, and a rank in the middle."""


def only_on(*backends: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("backend", backends, indirect=True)


def long_on(*backends: str) -> pytest.MarkDecorator:
    """On every backend, but on these only in `make soak`."""
    every = [pytest.param(each, marks=pytest.mark.soak if each in backends else ()) for each in BACKENDS]
    return pytest.mark.parametrize("backend", every, indirect=True)


def sgd(**options: Any) -> Any:
    return keras.optimizers.SGD(**{"learning_rate": 0.05, "momentum": 0.9, **options})


def adam(**options: Any) -> Any:
    return keras.optimizers.Adam(**{"learning_rate": 1e-2, "epsilon": 1e-5, **options})


def mlp() -> Any:
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, activation="tanh")(inputs)
    hidden = keras.layers.Dense(8, activation="tanh")(hidden)
    return keras.Model(inputs, keras.layers.Dense(2)(hidden))


def data() -> tuple[np.ndarray, np.ndarray]:
    """By step, rank and example."""
    x = np.random.default_rng(3).normal(size=(STEPS, hvd.size(), BATCH, 6)).astype("float32")
    return x, np.stack([x.sum(-1), x.prod(-1)], -1)


def fit(
    model: Any, optimizer: Any, parts: Any, batch: int, callbacks: Any = (), jit_compile: Any = "auto"
) -> list[np.ndarray]:
    """Trains on parts of the data and gives the weights."""
    x, y = (array[:, parts].reshape(-1, array.shape[-1]) for array in data())
    model.compile(optimizer, loss="mse", jit_compile=jit_compile)
    model.fit(x, y, epochs=EPOCHS, batch_size=batch, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model.get_weights()


def examples(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The examples of this rank."""
    x = np.random.default_rng(hvd.rank()).normal(size=(count, 6)).astype("float32")
    return x, np.stack([x.sum(1), x.prod(1)], 1)


@functools.cache
def model_of_all_tests() -> Any:
    """One for all, because compiling takes longer than training."""
    model = mlp()
    model.compile(hvd.DistributedOptimizer(sgd()), loss="mse", metrics=["mae"])
    return model


def compiled(seed: int = 0) -> Any:
    """The model with fresh weights and an optimizer that has done nothing."""
    model, random = model_of_all_tests(), np.random.default_rng(seed)
    model.set_weights([random.normal(size=weight.shape) * 0.3 for weight in model.get_weights()])
    for variable in model.optimizer.variables:
        variable.assign(np.zeros(variable.shape))
    model.optimizer.learning_rate = 0.05
    return model


def same_everywhere(model: Any) -> bool:
    own = [*(weight.tobytes() for weight in model.get_weights()), int(model.optimizer.iterations)]
    first, *others = hvd.allgather_object(own)
    return all(first == other for other in others)
