"""Training loops of the user's own with horovodish.keras."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import horovodish.keras as hvd
from support.keras_models import BATCH, CLOSE, EPOCHS, adam, data, fit, mlp, only_on, three_ranks_too
from support.on_ranks import on_ranks

pytestmark = pytest.mark.usefixtures("backend")

Step = Callable[[Any, Any], None]
"""Trains on a batch of inputs and targets."""


@on_ranks()
@three_ranks_too
def test_a_loop_trains_as_one_process() -> None:
    """As Keras's own `fit` of the joined batches: with clipping, which must see reduced gradients."""
    keras.utils.set_random_seed(7)
    expected = fit(mlp(), adam(global_clipnorm=0.1), slice(None), BATCH * hvd.size())
    keras.utils.set_random_seed(7 if hvd.rank() == 0 else 100 + hvd.rank())
    model, optimizer = mlp(), hvd.DistributedOptimizer(adam(global_clipnorm=0.1))
    optimizer.build(model.trainable_variables)
    hvd.broadcast_global_variables(0, model)
    step = {"tensorflow": step_of_tensorflow, "torch": step_of_torch, "jax": step_of_jax}[keras.config.backend()]
    trains = step(model, optimizer)
    x, y = (array[:, hvd.rank()] for array in data())
    for _ in range(EPOCHS):
        for inputs, targets in zip(x, y, strict=True):
            trains(keras.ops.convert_to_tensor(inputs), keras.ops.convert_to_tensor(targets))
    for weight, other in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(weight, other, **CLOSE)
    everyones = hvd.allgather_object(model.get_weights())
    assert all(np.array_equal(*pair) for pair in zip(everyones[0], everyones[-1], strict=True))


def step_of_tensorflow(model: Any, optimizer: Any) -> Step:
    import tensorflow as tf

    @tf.function
    def step(inputs: Any, targets: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(inputs, training=True) - targets) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return step


def step_of_torch(model: Any, optimizer: Any) -> Step:
    import torch

    def step(inputs: Any, targets: Any) -> None:
        model.zero_grad()
        torch.mean((model(inputs, training=True) - targets) ** 2).backward()
        gradients = [variable.value.grad for variable in model.trainable_variables]
        with torch.no_grad():
            optimizer.apply(gradients, model.trainable_variables)

    return step


def step_of_jax(model: Any, optimizer: Any) -> Step:
    import jax

    def loss(trainable: Any, rest: Any, inputs: Any, targets: Any) -> Any:
        outputs, rest = model.stateless_call(trainable, rest, inputs, training=True)
        return jax.numpy.mean((outputs - targets) ** 2), rest

    @jax.jit
    def updated(trainable: Any, rest: Any, state: Any, inputs: Any, targets: Any) -> Any:
        gradients, rest = jax.grad(loss, has_aux=True)(trainable, rest, inputs, targets)
        trainable, state = optimizer.stateless_apply(state, gradients, trainable)
        return trainable, rest, state

    def step(inputs: Any, targets: Any) -> None:
        kept = model.trainable_variables, model.non_trainable_variables, optimizer.variables
        values = updated(*([variable.value for variable in variables] for variables in kept), inputs, targets)
        for variables, those in zip(kept, values, strict=True):
            for variable, value in zip(variables, those, strict=True):
                variable.assign(value)

    return step


@pytest.mark.soak
@on_ranks(2)
@only_on("tensorflow")
def test_an_optimizer_may_be_applied_twice_in_a_step() -> None:
    """To gradients that on the first rank are ready in the opposite order; TensorFlow heeds no other."""
    import tensorflow as tf

    rank, second_is_applied = hvd.rank(), threading.Event()
    first, second = (keras.Variable(np.zeros(2, "float32"), name=name) for name in ("first", "second"))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([first, second])

    def late(gradient: Any) -> Any:
        second_is_applied.wait(timeout=10)
        return gradient

    def tell(value: Any) -> Any:
        second_is_applied.set()
        return value

    @tf.function
    def step(gradient: Any) -> Any:
        # What has a state would run in the order of the program.
        waits = tf.numpy_function(late, [gradient], tf.float32, stateful=False) if rank == 0 else gradient
        optimizer.apply([tf.ensure_shape(waits, [2])], [first])
        optimizer.apply([10 * gradient], [second])
        return tf.numpy_function(tell, [second.value], tf.float32, stateful=False)

    for number in range(1, 3):
        second_is_applied.clear()
        step(tf.fill([2], rank + 1.0))
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(first), np.full(2, -1.5 * number))
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(second), np.full(2, -15.0 * number))
