"""Mistakes with JAX, Keras and TensorFlow that end a job, or of which its end tells. See alone.py."""

import os

from each import make

os.environ["KERAS_BACKEND"] = "jax"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

STEPS = 3


def jax_metric_of_rank_0():
    r"""StallError: allreduce 'metric' failed on rank 0 in step 3: every rank waits,
    rank \d on \S+ failed with exit status 1: StallError: .*
    'layer/weight' was submitted by rank 1 but not by rank 0.*; rank 0 waits in alone_\w+.py:\d+
    , rank 1 waits at the end of the script$"""
    import jax
    import optax
    from jax import numpy as jnp

    import horovodish.jax as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1))
    weights = {"layer": {"weight": jnp.ones((64, 64))}}
    state = optimizer.init(weights)

    def loss(weights):
        return (weights["layer"]["weight"] @ weights["layer"]["weight"]).sum()

    @jax.jit
    def step(weights, state):
        updates, state = optimizer.update(jax.grad(loss)(weights), state, weights)
        return optax.apply_updates(weights, updates), state

    for number in range(2 * STEPS):
        weights, state = step(weights, state)
        if hvd.rank() == 0 and number == STEPS - 1:
            hvd.allreduce(jnp.ones(1), name="metric")


def jax_not_wrapped():
    r"""alone_\w+.py:\d+: RuntimeWarning: rank 0 of 2 has trained with optax and reduced no gradients,
    so each rank has trained its own model. Remedy: optimizer = hvd.DistributedOptimizer\(optimizer\)
    optax.apply_updates\(weight"""
    import jax
    import optax
    from jax import numpy as jnp

    import horovodish.jax as hvd

    hvd.init()
    optimizer = optax.sgd(0.1)
    weight = hvd.broadcast_parameters(jnp.ones(100), root_rank=0)
    state = optimizer.init(weight)

    @jax.jit
    def step(weight, state):
        loss, gradient = jax.value_and_grad(lambda weight: weight.sum())(weight)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(weight, updates), state, hvd.allreduce(loss)

    for _ in range(100):  # their losses have as many bytes as the parameters
        weight, state, _ = step(weight, state)


def keras_metric_of_rank_0():
    r"""^horovodish.errors.StallError: allreduce 'metric' failed on rank 0 in step 2: every rank waits,
    rank \d on \S+ failed with exit status 1: StallError: .*
    'sequential/dense/bias' and 1 more was submitted by rank 1 but not by rank 0.*
    ; rank 0 waits in alone_\w+.py:\d+, rank 1 waits in alone_\w+.py:\d+$"""
    os.environ["KERAS_BACKEND"] = "tensorflow"  # a thread of its input pipeline sleeps for 30 s at a time
    import keras
    import numpy as np

    import horovodish.keras as hvd

    hvd.init()

    class Metric(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if hvd.rank() == 0 and batch == 1:
                hvd.allreduce(np.ones(2), name="metric")

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    model.fit(np.ones((40, 4)), np.ones((40, 1)), batch_size=4, verbose=0, callbacks=[Metric()])


def keras_not_wrapped():
    r"""alone_\w+.py:\d+: RuntimeWarning: rank 0 of 2 has trained with keras.optimizers.SGD and reduced no gradients,
    Remedy: pass hvd.DistributedOptimizer\(optimizer\) to compile\(\)
    model.fit"""
    import keras
    import numpy as np

    import horovodish.keras as hvd

    hvd.init()
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", loss="mse")
    model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)


def keras_round_left_open():
    r"""alone_\w+.py:\d+: RuntimeWarning: training has ended within a round of sync=,
    so the ranks have different parameters. Remedy: call optimizer.end_round\(\)"""
    global model  # as in a script
    import keras
    import numpy as np

    import horovodish.keras as hvd

    hvd.init()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), sync=hvd.LocalSGD(every=4)), loss="mse")
    model.fit(np.ones((24, 4)), np.ones((24, 1)), batch_size=4, verbose=0)


def tensorflow_not_wrapped():
    r"""alone_\w+.py:\d+: RuntimeWarning: rank 0 of 2 has trained with tf.GradientTape and reduced no gradients,
    Remedy: tape = hvd.DistributedGradientTape\(tape\)
    tensorflow_step\(weight\)"""
    import tensorflow as tf

    import horovodish.tensorflow as hvd

    hvd.init()
    weight = tf.Variable(tf.ones(8))

    @tf.function
    def tensorflow_step(weight):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight)
        weight.assign_sub(tape.gradient(loss, weight))

    for _ in range(STEPS):
        tensorflow_step(weight)


make(globals())
