"""TensorFlow training steps, ours beside TensorFlow's own:  horovodish run -np 2 python benchmarks/tensorflow_step.py

Two models with SGD. A step is one tf.function. Several contenders train each model in turns:
DistributedGradientTape, MultiWorkerMirroredStrategy with its ring (MWMS), and the same step without communication, in
all ranks at once: `alone`, which is what a step costs at least, and `waiting`, whose ranks meet at a barrier after it.
Times are of single steps, on all ranks; a ratio below 1 means that ours takes less time.
"""

import json
import os
import socket
from collections.abc import Callable
from typing import Any

import machine
import tensorflow as tf
from rounds import say, timed
from training_steps import OURS, compare_steps, options_of

import horovodish.tensorflow as hvd

MODELS = {"mlp": [2048] * 9, "manysmall": [32] * 501 + [10]}
"""The widths of linear layers with a ReLU between them: 128 MiB of gradients in 16 tensors, 2 MiB in 1002."""

BATCH = 16


def ring() -> tf.distribute.Strategy:
    """TensorFlow's strategy over all ranks, connected by gRPC over the loopback device."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        workers = hvd.allgather_object(address)
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": workers}, "task": {"type": "worker", "index": hvd.rank()}}
    )
    implementation = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def weights_of(name: str) -> list[tf.Variable]:
    pairs = zip(MODELS[name], MODELS[name][1:], strict=False)
    made = [(tf.random.stateless_normal(pair, [1, layer]) / pair[0] ** 0.5, pair) for layer, pair in enumerate(pairs)]
    return [tf.Variable(value) for kernel, (_, out) in made for value in (kernel, tf.zeros([out]))]


def gradients_of(tape: tf.GradientTape, weights: list[tf.Variable]) -> list[tf.Tensor]:
    with tape as recorded:
        values = tf.random.stateless_normal([BATCH, weights[0].shape[0]], [0, 0])
        for layer in range(0, len(weights), 2):
            values = tf.nn.bias_add(values @ weights[layer], weights[layer + 1])
            values = values if layer + 2 == len(weights) else tf.nn.relu(values)
        loss = tf.reduce_mean(tf.square(values))
    return recorded.gradient(loss, weights)


def descend(weights: list[tf.Variable], gradients: list[tf.Tensor]) -> None:
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.assign_sub(1e-3 * gradient)


def contenders(name: str, strategy: tf.distribute.Strategy) -> dict[str, Callable[[], float]]:
    with strategy.scope():
        mirrored = weights_of(name)

    def replica() -> None:
        gradients = gradients_of(tf.GradientTape(), mirrored)
        context = tf.distribute.get_replica_context()
        descend(mirrored, context.all_reduce(tf.distribute.ReduceOp.MEAN, gradients))

    def step_of(wrap: Callable[[tf.GradientTape], Any]) -> Callable[[], None]:
        weights = weights_of(name)
        return tf.function(lambda: descend(weights, gradients_of(wrap(tf.GradientTape()), weights)))

    return {
        OURS: timed(step_of(hvd.DistributedGradientTape)),
        "MWMS": timed(tf.function(lambda: strategy.run(replica))),
        "alone": timed(step_of(lambda tape: tape)),
    }


def main() -> None:
    options = options_of(__doc__, MODELS)
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    strategy = ring()
    say(machine.command(f"horovodish run -np {hvd.size()} python"))
    say(f"{machine.machine(['tensorflow-cpu'])}; {hvd.size()} ranks\n")
    compare_steps(options, lambda name: contenders(name, strategy))


if __name__ == "__main__":
    main()
