"""A training loop of one's own, by several ranks:  horovodish run -np 2 python examples/tensorflow_custom_loop.py

Two layers learn scikit-learn's digits (1797 images of 8 x 8 pixels). A step is a tf.function that computes gradients on
this rank's batch, averages them over all ranks while it goes on, and applies them. The same script runs alone, too.
"""

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import horovodish.tensorflow as hvd

EPOCHS = 15
GLOBAL_BATCH = 64


class Network(tf.Module):
    """64 pixels, 64 hidden values, 10 digits."""

    def __init__(self):
        self.hidden = tf.Variable(tf.random.normal([64, 64]) / 8.0)
        self.hidden_bias = tf.Variable(tf.zeros([64]))
        self.output = tf.Variable(tf.random.normal([64, 10]) / 8.0)
        self.output_bias = tf.Variable(tf.zeros([10]))

    def __call__(self, images):
        return tf.nn.relu(images @ self.hidden + self.hidden_bias) @ self.output + self.output_bias


class Momentum:
    """Stochastic gradient descent with momentum."""

    def __init__(self, variables, rate):
        self.rate = rate
        self.pairs = [(variable, tf.Variable(tf.zeros_like(variable))) for variable in variables]

    def apply(self, gradients):
        for (variable, velocity), gradient in zip(self.pairs, gradients, strict=True):
            velocity.assign(0.9 * velocity + gradient)
            variable.assign_sub(self.rate * velocity)


def digits():
    """The images and labels to train on, and those to test with."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    return train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)


def main():
    hvd.init()
    tf.random.set_seed(hvd.rank())  # ranks may start with different weights: rank 0's are broadcast below
    train_images, test_images, train_labels, test_labels = digits()
    network = Network()
    variables = network.trainable_variables
    optimizer = Momentum(variables, rate=0.1)
    hvd.broadcast_variables(variables, root_rank=0)

    @tf.function
    def step(images, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, network(images)))
        tape = hvd.DistributedGradientTape(tape)
        optimizer.apply(tape.gradient(loss, variables))
        return loss

    batch = GLOBAL_BATCH // hvd.size()
    for epoch in range(1, EPOCHS + 1):
        order = np.random.default_rng(epoch).permutation(len(train_images))  # the same on every rank
        losses = []
        for begin in range(0, len(order) - GLOBAL_BATCH + 1, GLOBAL_BATCH):
            own = order[begin + hvd.rank() * batch :][:batch]
            losses.append(step(train_images[own], train_labels[own]))
        mean = hvd.allreduce(tf.reduce_mean(losses), name="loss")
        if hvd.rank() == 0:
            print(f"epoch {epoch:2}/{EPOCHS}  loss {mean.numpy():.4f}", flush=True)

    own = slice(hvd.rank(), None, hvd.size())  # every rank looks at its part of the test set
    right = tf.reduce_sum(tf.cast(tf.argmax(network(test_images[own]), 1) == test_labels[own], tf.int64))
    accuracy = hvd.allreduce(right, op=hvd.Sum, name="right").numpy() / len(test_labels)
    weights = tf.concat([tf.reshape(variable, [-1]) for variable in variables], 0)
    same = bool(tf.reduce_all(hvd.allreduce(weights, op=hvd.Max) == hvd.allreduce(weights, op=hvd.Min)))
    if hvd.rank() == 0:
        print(f"test accuracy {accuracy:.4f}, weights {'equal' if same else 'DIFFERENT'} on {hvd.size()} ranks")


if __name__ == "__main__":
    main()
