"""Codecs when executing eagerly, in functions and in those that XLA compiles: all ranks alike, and nothing is lost."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import horovodish.tensorflow as hvd
from support.coded import ELEMENTS, Floats, encode_or_refuse, loses_nothing
from support.on_ranks import on_ranks
from support.tensorflow_tensors import EAGER, GRAPH, XLA, called


def everything(name: str, shape: tuple[int, ...]) -> bool:
    assert shape in ((ELEMENTS, 1), (3,))
    return len(shape) == 2


@pytest.mark.soak
@on_ranks((3, "mpi_ring"))
def test_a_tape_loses_nothing() -> None:
    kernel, bias = tf.Variable(tf.zeros((ELEMENTS, 1)), name="kernel"), tf.Variable(tf.zeros(3), name="bias")

    def gradient_of(given: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(kernel * given) + tf.reduce_sum(bias)
        tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.int8(where=everything))
        return tape.gradient(loss, [kernel, bias])[0]

    for step in (gradient_of, tf.function(gradient_of), tf.function(gradient_of, jit_compile=True)):

        def given(gradient: Floats, step: Any = step) -> object:
            return step(tf.constant(gradient)).numpy()

        loses_nothing(given)


@pytest.mark.soak
@on_ranks((2, "mpi_ring"))
@pytest.mark.parametrize("mode", [EAGER, GRAPH, XLA])
def test_allreduce(mode: str) -> None:
    own = np.random.default_rng(hvd.rank()).standard_normal((300, 3), np.float32)
    exact = np.mean([np.random.default_rng(rank).standard_normal((300, 3), np.float32) for rank in range(2)], 0)

    def reduced(tensor: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            result = hvd.allreduce(tensor, compression=hvd.Compression.int8)
            product = tf.reduce_sum(result * own)
        return result, tape.gradient(product, tensor)

    for result in called(reduced, mode)(tf.constant(own)):
        assert 1e-4 < np.abs(result - exact).max() < 0.1


@on_ranks((2, "mpi_ring"))
def test_every_function_that_takes_a_compression() -> None:
    tensor, weight = tf.ones((300, 300)), tf.Variable(tf.zeros((300, 300)))

    def step(wrap: Any, compression: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight)
        wrap(tape, compression=compression).gradient(loss, [weight])

    def minimize(compression: Any) -> None:
        sgd = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        hvd.DistributedOptimizer(sgd, compression=compression).minimize(
            lambda: tf.reduce_sum(weight), var_list=[weight]
        )

    def meet(policy: Any) -> None:
        sgd = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), sync=policy)
        sgd.apply([tensor], [keras.Variable(tensor)])

    encode_or_refuse(
        hvd,
        {
            "allreduce": lambda its: hvd.allreduce(tensor, compression=its),
            "grouped_allreduce": lambda its: hvd.grouped_allreduce([tensor], compression=its),
            "DiLoCo": lambda its: meet(hvd.DiLoCo(1, compression=its)),
            "Sync": lambda its: meet(hvd.Sync(1, compression=its)),
            "DistributedGradientTape": lambda its: step(hvd.DistributedGradientTape, its),
            "PartialDistributedGradientTape": lambda its: step(hvd.PartialDistributedGradientTape, its),
            "DistributedOptimizer": minimize,
        },
        {
            "reducescatter": lambda its: hvd.reducescatter(tensor, compression=its),
            "grouped_reducescatter": lambda its: hvd.grouped_reducescatter([tensor], compression=its),
        },
    )
