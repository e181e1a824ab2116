"""A small transformer that learns to write text:  horovodish run -np 2 python examples/jax_transformer.py

One jitted step with donated parameters. Gradients are accumulated over two passes before they are averaged over the
ranks, in bfloat16, while the rest of the backward pass is computed; then they are clipped, and AdamW takes a step.
"""

import argparse
import functools
from pathlib import Path

import jax
import numpy as np
import optax
from jax import numpy as jnp

import horovodish.jax as hvd

CONTEXT = 64
WIDTH = 64
HEADS = 4
BLOCKS = 2
PASSES = 2
BATCH = 8
VOCABULARY = 256


def initial(key):
    """The parameters of embeddings, blocks and an output layer."""

    def matrix(*shape):
        nonlocal key
        key, own = jax.random.split(key)
        return jax.random.normal(own, shape) * shape[0] ** -0.5

    def block():
        return {
            "attention": matrix(WIDTH, 3 * WIDTH),
            "join": matrix(WIDTH, WIDTH),
            "up": matrix(WIDTH, 4 * WIDTH),
            "down": matrix(4 * WIDTH, WIDTH),
        }

    return {
        "embedding": matrix(VOCABULARY, WIDTH),
        "position": matrix(CONTEXT, WIDTH),
        "blocks": [block() for _ in range(BLOCKS)],
        "output": matrix(WIDTH, VOCABULARY),
    }


def normalized(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


@jax.checkpoint  # computes a block again in the backward pass instead of keeping what is in it
def through_block(block, x):
    queries, keys, values = (
        part.reshape(*x.shape[:-1], HEADS, -1) for part in jnp.split(normalized(x) @ block["attention"], 3, axis=-1)
    )
    x = x + jax.nn.dot_product_attention(queries, keys, values, is_causal=True).reshape(x.shape) @ block["join"]
    return x + jax.nn.gelu(normalized(x) @ block["up"]) @ block["down"]


def loss_of(parameters, text):
    """Nats per character, for text of one character more than the context."""
    x = parameters["embedding"][text[:, :-1]] + parameters["position"]
    for block in parameters["blocks"]:
        x = through_block(block, x)
    return optax.softmax_cross_entropy_with_integer_labels(normalized(x) @ parameters["output"], text[:, 1:]).mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="steps of the optimizer")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "LICENSE", help="what to learn")
    options = parser.parse_args()

    hvd.init()
    text = np.frombuffer(options.text.read_bytes(), np.uint8).astype(np.int32)
    draw = np.random.default_rng(hvd.rank())  # each rank has its own part of every batch
    optimizer = hvd.DistributedOptimizer(
        optax.chain(optax.scale(1 / PASSES), optax.clip_by_global_norm(1.0), optax.adamw(3e-3)),
        backward_passes_per_step=PASSES,
        compression=hvd.Compression.bf16,
    )
    parameters = hvd.broadcast_parameters(initial(jax.random.key(hvd.rank())))
    state = optimizer.init(parameters)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def one_pass(parameters, state, batch):
        loss, gradients = jax.value_and_grad(loss_of)(parameters, batch)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    for step in range(options.steps):
        for _ in range(PASSES):
            starts = draw.integers(0, len(text) - CONTEXT, BATCH)
            batch = np.stack([text[start : start + CONTEXT + 1] for start in starts])
            parameters, state, loss = one_pass(parameters, state, batch)
        if step % 20 == 0 or step == options.steps - 1:
            mean = hvd.allreduce(loss, name="loss")
            if hvd.rank() == 0:
                print(f"step {step + 1:>4}: {float(mean):.3f} nats per character", flush=True)
    sums = hvd.allgather_object([float(leaf.sum()) for leaf in jax.tree.leaves(parameters)])
    if hvd.rank() == 0:
        print("the ranks have one model" if all(other == sums[0] for other in sums) else "the ranks have parted")


if __name__ == "__main__":
    main()
