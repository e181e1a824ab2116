"""Handwritten digits, learned by several ranks together:  horovodish run -np 2 python examples/keras_digits.py

A small convolutional network on scikit-learn's digits (1797 images of 8 x 8 pixels), trained by Keras's `fit`. Every
rank trains on its own shard of the data; the ranks train one model. KERAS_BACKEND says which of Keras's backends
computes: tensorflow, torch or jax. The same script runs alone, too: python examples/keras_digits.py
"""

import argparse
import hashlib
import sys
import time

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import horovodish.keras as hvd

GLOBAL_BATCH = 64


def digits():
    """The images and labels to train on, and those to test with."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
    parts = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    train_images, test_images, train_labels, test_labels = parts
    return (train_images, train_labels), (test_images, test_labels)


def network():
    """Two convolutions and two linear layers."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dropout(0.25),
            keras.layers.Dense(10),
        ]
    )


def of_this_rank(images, labels):
    """Every size()-th example."""
    return images[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()]


def same_weights_everywhere(model):
    """Whether all ranks hold the same bits, and the hash of this rank's."""
    digest = hashlib.sha256()
    for weight in model.get_weights():
        digest.update(weight.tobytes())
    return len(set(hvd.allgather_object(digest.hexdigest()))) == 1, digest.hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--save", metavar="FILE.keras", help="where rank 0 saves the model that was best in validation")
    options = parser.parse_args()

    hvd.init()
    keras.utils.set_random_seed(hvd.rank())  # ranks may start with different weights: rank 0's are broadcast below
    train, test = digits()
    images, labels = of_this_rank(*train)

    model = network()
    # The batch grows with the number of ranks, and so may the learning rate.
    learning_rate = 2e-3 * hvd.size() ** 0.5
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(learning_rate))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, metrics=["accuracy"])
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(learning_rate, warmup_epochs=2),
        keras.callbacks.EarlyStopping("val_loss", patience=4, restore_best_weights=True),
    ]
    if options.save:
        callbacks.append(hvd.callbacks.BestModelCheckpoint(options.save))

    started = time.perf_counter()
    history = model.fit(
        images,
        labels,
        batch_size=max(1, GLOBAL_BATCH // hvd.size()),
        epochs=options.epochs,
        validation_data=of_this_rank(*test),
        callbacks=callbacks,
        verbose=2 if hvd.rank() == 0 else 0,
    )
    seconds = time.perf_counter() - started
    _, accuracy = model.evaluate(*of_this_rank(*test), verbose=0)
    accuracy = hvd.allreduce(accuracy)

    same, digest = same_weights_everywhere(model)
    if not same:
        sys.exit(f"rank {hvd.rank()}: the ranks hold different weights; this one's have sha256 {digest}")
    if hvd.rank() == 0:
        print(f"{keras.config.backend()}: {len(history.epoch)} epochs in {seconds:.1f} s, test accuracy {accuracy:.4f}")
        print(f"all {hvd.size()} ranks hold bit-identical weights, sha256 {digest}", flush=True)


if __name__ == "__main__":
    main()
