"""Handwritten digits, learned by several ranks together:  horovodish run -np 2 python examples/jax_digits.py

A small network in plain JAX and optax on scikit-learn's digits (1797 images of 8 x 8 pixels). Every rank computes on
its own shard of each batch; the ranks train one model. The same script runs alone, too: python examples/jax_digits.py
"""

import jax
import numpy as np
import optax
from jax import numpy as jnp
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import horovodish.jax as hvd

EPOCHS = 20
GLOBAL_BATCH = 64


def digits():
    """The images and labels to train on, and those to test with."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=0.2, random_state=0, stratify=labels
    )
    return (train_images, train_labels), (test_images, test_labels)


def network(key, widths=(64, 128, 64, 10)):
    """The parameters of a few linear layers."""
    keys = jax.random.split(key, len(widths) - 1)
    pairs = zip(keys, widths[:-1], widths[1:], strict=True)
    return [
        {"kernel": jax.random.normal(key, (rows, columns)) * (2 / rows) ** 0.5, "bias": jnp.zeros(columns)}
        for key, rows, columns in pairs
    ]


def logits_of(parameters, images):
    *hidden, last = parameters
    for layer in hidden:
        images = jax.nn.relu(images @ layer["kernel"] + layer["bias"])
    return images @ last["kernel"] + last["bias"]


def loss_of(parameters, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(parameters, images), labels).mean()


def main():
    hvd.init()
    (images, labels), (test_images, test_labels) = digits()
    optimizer = hvd.DistributedOptimizer(optax.adam(2e-3))
    # Every rank starts with rank 0's weights, whatever its own were.
    parameters = hvd.broadcast_parameters(network(jax.random.key(hvd.rank())), root_rank=0)
    state = optimizer.init(parameters)

    @jax.jit
    def step(parameters, state, images, labels):
        loss, gradients = jax.value_and_grad(loss_of)(parameters, images, labels)
        updates, state = optimizer.update(gradients, state, parameters)  # averages over the ranks
        return optax.apply_updates(parameters, updates), state, hvd.allreduce(loss, name="loss")

    share = GLOBAL_BATCH // hvd.size()
    for epoch in range(EPOCHS):
        order = np.random.default_rng(epoch).permutation(len(images))  # the same on every rank
        for begin in range(0, len(order) - GLOBAL_BATCH + 1, GLOBAL_BATCH):
            own = order[begin + hvd.rank() * share :][:share]
            parameters, state, loss = step(parameters, state, images[own], labels[own])
        if hvd.rank() == 0 and epoch % 5 == 4:
            print(f"epoch {epoch + 1:>2}: loss {float(loss):.4f}", flush=True)
    right = jnp.argmax(logits_of(parameters, test_images), axis=1) == test_labels
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks: {float(right.mean()):.1%} of the test images are recognized")


if __name__ == "__main__":
    main()
