"""What wrapping the optimizer adds to a step of `fit`:  horovodish run -np 2 python benchmarks/keras_fit.py

Every rank trains equal models on digits in turns, one of them with a wrapped optimizer. The others are the same `fit`
without it, on all ranks at once: `unwrapped`, and `waiting`, whose ranks meet at a barrier after each step, as any
data-parallel training makes the faster rank wait. KERAS_BACKEND chooses the backend. Times are of single steps on rank
0, without the first one of each epoch and the first epoch of each turn. What lies between epochs does not count: when
TensorFlow ends the iterator of an epoch, it may wait for its autotuner for as long as the epoch has lasted.
"""

import argparse
import os
import statistics
import time

import keras
import machine
import numpy as np
from sklearn.datasets import load_digits

import horovodish.keras as hvd


class Watch(keras.callbacks.Callback):
    """Records the time of each step, except the first step of each epoch and the whole first epoch of each `fit`."""

    def __init__(self, meets=False):
        super().__init__()
        self.meets = meets
        self.seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.meets:
            hvd.barrier()
        now = time.perf_counter()
        if batch and self.epoch:
            self.seconds.append(now - self.last)
        self.last = now


def network(width):
    """Two convolutions and two linear layers, as in the examples of digits."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(width, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(2 * width, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(4 * width, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def one_thread(backend):
    """Has each rank compute with one thread, as others take the other cores."""
    if backend == "torch":
        import torch

        torch.set_num_threads(1)
    elif backend == "tensorflow":
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    else:
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"


def compiled(width, wrapped):
    keras.utils.set_random_seed(0)
    model = network(width)
    optimizer = keras.optimizers.Adam(1e-3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(hvd.DistributedOptimizer(optimizer) if wrapped else optimizer, loss=loss, metrics=["accuracy"])
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=8, help="of each contender")
    parser.add_argument("--epochs", type=int, default=5, help="of a turn")
    parser.add_argument("--batch", type=int, default=32, help="on each rank")
    parser.add_argument("--width", type=int, default=32, help="channels of the first convolution")
    options = parser.parse_args()
    backend = keras.config.backend()
    one_thread(backend)
    hvd.init()
    images, labels = load_digits(return_X_y=True)
    steps = len(images) // hvd.size() // options.batch
    rows = slice(hvd.rank(), None, hvd.size())
    images = images[rows][: steps * options.batch].reshape(-1, 8, 8, 1).astype(np.float32) / 16
    labels = labels[rows][: steps * options.batch]

    contenders = {name: compiled(options.width, name == "wrapped") for name in ("wrapped", "unwrapped", "waiting")}
    watches = {name: Watch(meets=name == "waiting") for name in contenders}
    for turn in range(options.turns + 1):
        for name, model in contenders.items():
            hvd.barrier()
            model.fit(
                images,
                labels,
                batch_size=options.batch,
                epochs=options.epochs,
                verbose=0,
                callbacks=[watches[name] if turn else Watch(meets=name == "waiting")],  # the first turn compiles
            )
    milliseconds = {name: np.asarray(watch.seconds) * 1e3 for name, watch in watches.items()}
    if hvd.rank() == 0:
        packages = ["keras", {"tensorflow": "tensorflow-cpu"}.get(backend, backend)]
        print(f"KERAS_BACKEND={backend} {machine.command(f'horovodish run -np {hvd.size()} python')}")
        print(f"{machine.machine(packages)}; {hvd.size()} ranks, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS')}")
        parameters = contenders["wrapped"].count_params()
        print(f"{parameters} parameters, {steps} steps an epoch, batches of {options.batch}\n")
        print(f"{'optimizer':<12} {'min ms':>8} {'p50 ms':>8} {'p90 ms':>8}")
        for name, values in milliseconds.items():
            print(f"{name:<12} {min(values):>8.3f} {statistics.median(values):>8.3f} {np.percentile(values, 90):>8.3f}")
        medians = {name: statistics.median(values) for name, values in milliseconds.items()}
        for name in ("wrapped", "waiting"):
            overhead = 100 * (medians[name] / medians["unwrapped"] - 1)
            print(f"{name} over unwrapped, by the medians: {overhead:.1f} %", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
