"""Handwritten digits, learned by several ranks together:  horovodish run -np 2 python examples/mlx_digits.py

A small network in MLX on scikit-learn's digits (1797 images of 8 x 8 pixels). Every rank computes on its own shard of
each batch; the ranks train one model. The same script runs alone, too: python examples/mlx_digits.py
"""

import mlx.core as mx
import numpy as np
from mlx import nn, optimizers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import horovodish.mlx as hvd

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


def main():
    hvd.init()
    (images, labels), (test_images, test_labels) = digits()
    mx.random.seed(hvd.rank())
    model = nn.Sequential(nn.Linear(64, 128), nn.relu, nn.Linear(128, 64), nn.relu, nn.Linear(64, 10))
    optimizer = hvd.DistributedOptimizer(optimizers.Adam(2e-3))
    # Every rank starts with rank 0's weights, whatever its own were.
    hvd.broadcast_parameters(model, root_rank=0)

    def loss_of(images, labels):
        return nn.losses.cross_entropy(model(images), labels, reduction="mean")

    loss_and_gradients = nn.value_and_grad(model, loss_of)
    share = GLOBAL_BATCH // hvd.size()
    for epoch in range(EPOCHS):
        order = np.random.default_rng(epoch).permutation(len(images))  # the same on every rank
        for begin in range(0, len(order) - GLOBAL_BATCH + 1, GLOBAL_BATCH):
            own = order[begin + hvd.rank() * share :][:share]
            loss, gradients = loss_and_gradients(mx.array(images[own]), mx.array(labels[own]))
            optimizer.update(model, gradients)  # averages over the ranks
            mx.eval(model.parameters(), optimizer.state)
        loss = hvd.allreduce(loss, name="loss")
        if hvd.rank() == 0 and epoch % 5 == 4:
            print(f"epoch {epoch + 1:>2}: loss {loss.item():.4f}", flush=True)
    right = mx.argmax(model(mx.array(test_images)), axis=1) == mx.array(test_labels)
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks: {right.mean().item():.1%} of the test images are recognized")


if __name__ == "__main__":
    main()
