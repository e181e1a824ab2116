"""The same ranks with the same inputs train to the same bits, whichever gradients come late."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovodish.tensorflow as hvd
from support.ranks import run_ranks
from support.tensorflow_tensors import EAGER, GRAPH, called

LAYERS, WIDTH, STEPS = 8, 24, 4
# Buckets of two layers; and a ring, around which the place in a bucket decides in which order elements are added up.
ENVIRONMENT = {"HOROVODISH_FUSION_THRESHOLD_MB": "0.005", "HOROVODISH_PLANE": "mpi_ring"}


def train_with_random_delays(seed: int) -> list[int]:
    """A checksum over the weights after training with a tape, in both ways, and with an optimizer."""
    hvd.init()
    timing = random.Random(1000 * seed + hvd.rank())

    def delayed(gradient: Any) -> Any:
        if timing.random() < 0.3:
            time.sleep(timing.random() * 0.003)
        return gradient

    @tf.custom_gradient
    def late(x: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        return tf.identity(x), lambda gradient: tf.numpy_function(delayed, [gradient], x.dtype)

    data = np.random.default_rng(hvd.rank())
    inputs = tf.constant(data.normal(size=(STEPS, 5, WIDTH)), tf.float32)

    def loss(weights: list[tf.Variable], batch: tf.Tensor) -> tf.Tensor:
        for weight in weights:
            batch = tf.tanh(batch @ late(weight))
        return tf.reduce_mean(batch**2)

    def with_tape(weights: list[tf.Variable], batch: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            value = loss(weights, batch)
        for weight, gradient in zip(weights, hvd.DistributedGradientTape(tape).gradient(value, weights), strict=True):
            weight.assign_sub(0.1 * tf.ensure_shape(gradient, weight.shape))

    optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), groups=3)

    def with_optimizer(weights: list[tf.Variable], batch: tf.Tensor) -> None:
        optimizer.minimize(lambda: loss(weights, batch), var_list=weights)

    checksums = []
    for step, way in ((with_tape, EAGER), (with_tape, GRAPH), (with_optimizer, GRAPH)):
        fixed = np.random.default_rng(9)
        weights = [tf.Variable(fixed.normal(size=(WIDTH, WIDTH)) / 4, dtype=tf.float32) for _ in range(LAYERS)]
        function = called(lambda batch, step=step, weights=weights: step(weights, batch), way)
        for batch in inputs:
            function(batch)
        checksums.append(zlib.crc32(b"".join(weight.numpy().tobytes() for weight in weights)))
    return checksums


@pytest.mark.soak
def test_bits_do_not_depend_on_timing() -> None:
    runs = [run_ranks(train_with_random_delays, 3, args=(seed,), env=ENVIRONMENT) for seed in range(2)]
    of_all = [of_rank for run in runs for of_rank in run]
    assert all(each == of_all[0] for each in of_all), runs
