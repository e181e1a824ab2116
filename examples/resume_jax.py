"""Digits, learned by as many ranks as there are, and resumed by another number of them:

    horovodish run -np 4 python examples/resume_jax.py digits.pickle --stop-at 40
    horovodish run -np 3 python examples/resume_jax.py digits.pickle

The optimizer's state is sharded, and the file has all of it. The second job goes on with the learning rate of the first
one, and with the samples of the epoch that it has not used. On as many ranks it has the same bits as a job that never
stopped.
"""

import argparse
import pickle
from pathlib import Path

import jax
import numpy as np
import optax
from jax import numpy as jnp
from sklearn.datasets import load_digits

import horovodish.jax as hvd

EPOCHS = 6
GLOBAL_BATCH = 64

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("file", type=Path, help="the checkpoint: read if it is there, and written when training stops")
parser.add_argument("--stop-at", type=int, metavar="STEP", help="the step after which to save and end")
arguments = parser.parse_args()

hvd.init()
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)
batch_size = GLOBAL_BATCH // hvd.size()


def logits_of(parameters, images, dropped=None):
    hidden = jax.nn.relu(images @ parameters["hidden"]["kernel"] + parameters["hidden"]["bias"])
    if dropped is not None:
        hidden = hidden * jax.random.bernoulli(dropped, 0.9, hidden.shape) / 0.9
    return hidden @ parameters["last"]["kernel"] + parameters["last"]["bias"]


def loss_of(parameters, images, labels, dropped=None):
    logits = logits_of(parameters, images, dropped)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def layer(key, rows, columns):
    return {"kernel": jax.random.normal(key, (rows, columns)) * (2 / rows) ** 0.5, "bias": jnp.zeros(columns)}


@jax.jit
def trained(parameters, state, step, images, labels):
    # So dropout does not depend on where training resumed.
    dropped = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), step), hvd.rank())
    gradients = jax.grad(loss_of)(parameters, images, labels, dropped)
    updates, state = optimizer.update(gradients, state, parameters)
    return optax.apply_updates(parameters, updates), state


keys = jax.random.split(jax.random.key(0))
parameters = {"hidden": layer(keys[0], 64, 128), "last": layer(keys[1], 128, 10)}
parameters = hvd.broadcast_parameters(parameters, root_rank=0)
rate = optax.cosine_decay_schedule(3e-3, EPOCHS * len(images) // GLOBAL_BATCH)
optimizer = optax.chain(hvd.clip_by_global_norm(1.0), optax.adamw(rate))
optimizer = hvd.DistributedOptimizer(optimizer, shard="states")
state = optimizer.init(parameters)
step, first_epoch, done = 0, 0, 0  # done: samples of the epoch that all ranks together have used

if arguments.file.exists():
    parameters, full, (step, first_epoch, done) = pickle.loads(arguments.file.read_bytes())
    state = hvd.load_full_state(state, full)
    print(f"rank {hvd.rank()} of {hvd.size()} goes on after step {step}", flush=True)
for epoch in range(first_epoch, EPOCHS):
    order = np.random.default_rng(epoch).permutation(len(images))[done:]  # the same on every rank
    for begin in range(0, len(order) - batch_size * hvd.size() + 1, batch_size * hvd.size()):
        own = order[begin + hvd.rank() :][: batch_size * hvd.size() : hvd.size()]
        parameters, state = trained(parameters, state, step, images[own], labels[own])
        step, done = step + 1, done + batch_size * hvd.size()
        if step == arguments.stop_at:
            whole = hvd.full_state((parameters, state, (step, epoch, done)))  # on every rank; None but on rank 0
            if hvd.rank() == 0:
                arguments.file.write_bytes(pickle.dumps(jax.device_get(whole)))
            raise SystemExit
    done = 0

loss, right = loss_of(parameters, images, labels), jnp.argmax(logits_of(parameters, images), axis=1) == labels
if hvd.rank() == 0:
    print(f"{hvd.size()} ranks, {step} steps: loss {float(loss)}, {right.mean():.2%} of the digits are recognized")
