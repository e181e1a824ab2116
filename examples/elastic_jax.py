"""Digits, learned by ranks that may be lost:  horovodish run -np 4 --min-np 2 python examples/elastic_jax.py

End a rank with `kill -9`: the others go on with the step that it has missed.
"""

import jax
import numpy as np
import optax
from jax import numpy as jnp
from sklearn.datasets import load_digits

import horovodish.jax as hvd

EPOCHS = 10
GLOBAL_BATCH = 64

hvd.init()
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)
held_out = np.arange(len(images)) % 5 == 0
train_images, train_labels = images[~held_out], labels[~held_out]

first, second = jax.random.split(jax.random.key(0))
parameters = {
    "hidden": jax.random.normal(first, (64, 128)) / 8,
    "output": jax.random.normal(second, (128, 10)) / 8,
}
optimizer = hvd.DistributedOptimizer(optax.adam(3e-3))


def logits_of(parameters, images):
    return jax.nn.relu(images @ parameters["hidden"]) @ parameters["output"]


def loss_of(parameters, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(parameters, images), labels).mean()


@jax.jit
def step(parameters, moments, images, labels):
    gradients = jax.grad(loss_of)(parameters, images, labels)
    updates, moments = optimizer.update(gradients, moments, parameters)  # averages over the ranks
    return optax.apply_updates(parameters, updates), moments


@hvd.elastic.run
def train(state):
    """Called again when the ranks have changed, so it begins where the state says."""
    while state.epoch < EPOCHS:
        order = np.random.default_rng(state.epoch).permutation(len(train_images))  # the same on every rank
        while state.begin + GLOBAL_BATCH <= len(order):
            own = order[state.begin : state.begin + GLOBAL_BATCH][hvd.rank() :: hvd.size()]
            state.parameters, state.moments = step(
                state.parameters, state.moments, train_images[own], train_labels[own]
            )
            state.begin += GLOBAL_BATCH
            state.commit()
        state.epoch, state.begin = state.epoch + 1, 0


state = hvd.elastic.JaxState(parameters=parameters, moments=optimizer.init(parameters), epoch=0, begin=0)
train(state)
right = (jnp.argmax(logits_of(state.parameters, images[held_out]), axis=1) == labels[held_out]).mean()
if hvd.rank() == 0:
    print(f"test accuracy {float(right):.4f} on {hvd.size()} ranks")
