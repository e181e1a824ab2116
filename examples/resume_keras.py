"""Digits, learned by as many ranks as there are, and resumed by another number of them:

    horovodish run -np 4 python examples/resume_keras.py digits.keras --stop-at 40
    horovodish run -np 3 python examples/resume_keras.py digits.keras

The second job goes on with the learning rate of the first one, and with the samples of the epoch that it has not used.
On as many ranks it has the same bits as a job that never stopped. KERAS_BACKEND says which backend computes.
"""

import argparse
import json
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits

import horovodish.keras as hvd

EPOCHS = 6
GLOBAL_BATCH = 64

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("file", type=Path, help="the checkpoint: read if it is there, and written when training stops")
parser.add_argument("--stop-at", type=int, metavar="STEP", help="the step after which to save and end")
arguments = parser.parse_args()
position_file = arguments.file.with_suffix(".json")

hvd.init()
keras.utils.set_random_seed(hvd.rank())
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")
batch_size = GLOBAL_BATCH // hvd.size()
position = {"step": 0, "epoch": 0, "done": 0}  # samples of the epoch that all ranks together have used

if arguments.file.exists():
    # Wraps the optimizer anew, among the ranks of today.
    model = hvd.load_model(arguments.file)
    saved = json.loads(position_file.read_text())
    position, random = saved["position"], saved["random"]
    print(f"rank {hvd.rank()} of {hvd.size()} goes on after step {position['step']}", flush=True)
else:
    layers = [keras.layers.Dense(128, "relu"), keras.layers.Dropout(0.1, seed=hvd.rank()), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    rate = keras.optimizers.schedules.CosineDecay(3e-3, EPOCHS * len(images) // GLOBAL_BATCH)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.AdamW(rate))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    random = []
# The seeds of dropout. Each rank has its own, and a file of Keras has only rank 0's.
seeds = [variable for variable in model.non_trainable_variables if variable.name == "seed_generator_state"]
for index, seed in enumerate(seeds):
    as_before = len(random) == hvd.size()
    seed.assign(random[hvd.rank()][index] if as_before else [position["step"], hvd.rank()])


class Stop(keras.callbacks.Callback):
    """Counts, and ends training after a step."""

    def on_train_batch_end(self, batch, logs=None):
        position["step"] += 1
        position["done"] += batch_size * hvd.size()
        if position["step"] == arguments.stop_at:
            self.model.stop_training = True


def save():
    """Rank 0 writes the model with its optimizer, and what Keras does not save."""
    random = hvd.allgather_object([np.asarray(keras.ops.convert_to_numpy(seed)).tolist() for seed in seeds])
    if hvd.rank() == 0:
        model.save(arguments.file)
        position_file.write_text(json.dumps({"position": position, "random": random}))


callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), Stop()]
for epoch in range(position["epoch"], EPOCHS):
    order = np.random.default_rng(epoch).permutation(len(images))[position["done"] :]  # the same on every rank
    own = order[: len(order) // (batch_size * hvd.size()) * batch_size * hvd.size()][hvd.rank() :: hvd.size()]
    model.fit(images[own], labels[own], batch_size, shuffle=False, callbacks=callbacks, verbose=0)
    if position["step"] == arguments.stop_at:
        save()
        raise SystemExit
    position.update(epoch=epoch + 1, done=0)

loss, accuracy = model.evaluate(images, labels, verbose=0)
if hvd.rank() == 0:
    print(f"{hvd.size()} ranks, {position['step']} steps: loss {loss}, {accuracy:.2%} of the digits are recognized")
