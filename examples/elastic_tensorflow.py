"""Digits, learned by ranks that may be lost:  horovodish run -np 4 --min-np 2 python examples/elastic_tensorflow.py

End a rank with `kill -9`: the others go on with the step that it has missed.
"""

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import horovodish.tensorflow as hvd

EPOCHS = 15
GLOBAL_BATCH = 64

hvd.init()
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)
held_out = np.arange(len(images)) % 5 == 0
train_images, train_labels = images[~held_out], labels[~held_out]

hidden = tf.Variable(tf.random.normal([64, 128]) / 8.0)
output = tf.Variable(tf.random.normal([128, 10]) / 8.0)
weights = [hidden, output]
velocities = [tf.Variable(tf.zeros_like(weight)) for weight in weights]


def logits_of(images):
    return tf.nn.relu(images @ hidden) @ output


@tf.function(reduce_retracing=True)
def step(images, labels):
    """A step that fails because a rank is lost changes no variable."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits_of(images)))
    gradients = hvd.DistributedGradientTape(tape).gradient(loss, weights)  # averages over the ranks
    for weight, velocity, gradient in zip(weights, velocities, gradients, strict=True):
        velocity.assign(0.9 * velocity + gradient)
        weight.assign_sub(0.1 * velocity)


@hvd.elastic.run
def train(state):
    """Called again when the ranks have changed, so it begins where the state says."""
    while state.epoch < EPOCHS:
        order = np.random.default_rng(state.epoch).permutation(len(train_images))  # the same on every rank
        while state.begin + GLOBAL_BATCH <= len(order):
            own = order[state.begin : state.begin + GLOBAL_BATCH][hvd.rank() :: hvd.size()]
            step(tf.constant(train_images[own]), tf.constant(train_labels[own]))
            state.begin += GLOBAL_BATCH
            state.commit()
        state.epoch, state.begin = state.epoch + 1, 0


train(hvd.elastic.TensorFlowState([*weights, *velocities], epoch=0, begin=0))
right = np.mean(np.argmax(logits_of(images[held_out]), axis=1) == labels[held_out])
if hvd.rank() == 0:
    print(f"test accuracy {right:.4f} on {hvd.size()} ranks")
