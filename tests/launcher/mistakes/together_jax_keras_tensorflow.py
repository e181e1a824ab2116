"""Mistakes with JAX, with Keras on JAX and with TensorFlow after which the ranks can go on. See together_torch.py."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
import optax
import tensorflow as tf
from each import make
from jax import numpy as jnp

import horovodish.jax as hvd
import horovodish.keras as hvd_keras
import horovodish.tensorflow as hvd_tensorflow

hvd.init()
rank = hvd.rank()


def trained(optimizer, parameters, steps=2):
    state = optimizer.init(parameters)

    @jax.jit
    def step(parameters, state):
        gradients = jax.grad(lambda tree: tree["weight"].sum())(parameters)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    for _ in range(steps):
        parameters, state = step(parameters, state)
    jax.block_until_ready(parameters)


def fit(optimizer, callbacks=(), seed=1, **options):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile(optimizer, loss="mse")
    model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0, callbacks=list(callbacks), **options)


def jax_forgotten_broadcast():
    r"""RuntimeWarning: the ranks begin to train with different parameters: parameter \['weight'\] differs: rank 0 has
    Remedy: parameters = hvd.broadcast_parameters\(parameters, root_rank=0\) before the first step"""
    trained(hvd.DistributedOptimizer(optax.sgd(0.1)), {"weight": jnp.ones(3) * rank})


def jax_learning_rate_of_each_rank():
    r"""together_\w+.py:\d+: RuntimeWarning: the ranks train different parameters at step 4:
    parameter \['weight'\] differs: rank 0 has
    Remedy: every rank must take the same steps with the same learning rates"""
    trained(hvd.DistributedOptimizer(optax.sgd(0.1 * (1 + rank))), {"weight": jnp.ones(3)}, steps=4)


def jax_other_shape():
    r"""allreduce 'loss' failed on rank \d: the ranks disagree about its shape: rank 0 has \(3,\),
    rank 1 has \(4,\)
    Remedy: pass a tensor of the same shape on every rank"""
    jax.jit(lambda x: hvd.allreduce(x, name="loss"))(jnp.ones(3 + rank)).block_until_ready()


def jax_optimizer_by_name():
    r"""TypeError: DistributedOptimizer wraps an optax.GradientTransformation, not str"""
    hvd.DistributedOptimizer("sgd")


def jax_other_layers():
    r"""allreduce of 'weight' failed on rank \d: .*together_\w+.py:\d+.* tree: rank 0 has 1 leaves, rank 1 has 2 leaves
    Remedy: pass a tree of the same structure on every rank"""
    tree = {"weight": jnp.ones(3)} | ({"bias": jnp.ones(3)} if rank else {})
    trained(hvd.DistributedOptimizer(optax.sgd(0.1)), tree)


def keras_optimizer_by_name():
    r"""TypeError: DistributedOptimizer wraps a keras.optimizers.Optimizer, not str"""
    fit(hvd_keras.DistributedOptimizer("sgd"))


def keras_forgotten_broadcast():
    r"""RuntimeWarning: the ranks begin to train with different parameters:
    variable 0 \(.*dense/kernel\) differs: rank 0 has
    Remedy: pass hvd.callbacks.BroadcastGlobalVariablesCallback\(0\) to fit\(\)"""
    fit(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), seed=rank)


def keras_not_wrapped():
    r"""ValueError: the optimizer of \w+ is not wrapped, so each rank would train alone:
    pass hvd.DistributedOptimizer"""
    fit("sgd", [hvd_keras.callbacks.MetricAverageCallback()], seed=rank)


def tensorflow_forgotten_broadcast():
    r"""together_\w+.py:\d+: RuntimeWarning: the ranks begin to train with different parameters:
    .*weight.* differs: rank 0 has
    Remedy: call hvd.broadcast_variables\(model.variables, root_rank=0\) before the first step"""
    weight = tf.Variable([1.0 + rank], name="weight")
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight)
        hvd_tensorflow.DistributedGradientTape(tape).gradient(loss, [weight])


def tensorflow_other_width():
    r"""MismatchError: .*the ranks' models differ: variable 0 \(kernel\) is of shape \(2,\) on rank 0
    and of shape \(3,\) on rank 1. Remedy: build the same model on every rank"""
    kernel = tf.Variable(tf.ones(2 + rank), name="kernel")

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(kernel)
        return hvd_tensorflow.DistributedGradientTape(tape).gradient(loss, [kernel])

    step()


def tensorflow_other_shape():
    r"""allreduce 'loss' failed on rank \d: the ranks disagree about its shape: rank 0 has \(3,\),
    rank 1 has \(4,\)
    Remedy: pass a tensor of the same shape on every rank"""
    tf.function(lambda value: hvd_tensorflow.allreduce(value, name="loss"))(tf.ones(3 + rank))


make(globals())
