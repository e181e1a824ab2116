"""Training steps in jit, ours beside pmap and psum over gloo:  horovodish run -np 2 python benchmarks/jax_step.py

Two models with SGD, each trained by several contenders in turns: DistributedOptimizer, `jax.pmap` with `jax.lax.pmean`
over JAX's gloo collectives, mpi4jax where it is installed (one allreduce for each gradient), and the same step without
communication, in all ranks at once: `alone`, which is what a step costs at least, and `waiting`, whose ranks meet at a
barrier after it. Every rank has one device and one thread for its arithmetic. Times are of single steps, on all ranks;
a ratio below 1 means that ours takes less time.
"""

import importlib.util
import itertools
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import jax
import machine
import optax
import psutil
from jax import numpy as jnp
from mpi4py import MPI
from rounds import say
from training_steps import OURS, compare_steps, options_of

import horovodish.jax as hvd

HAS_MPI4JAX = importlib.util.find_spec("mpi4jax") is not None
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"
Step = Callable[[], float]


def mlp() -> tuple[Any, Any]:
    """8 x (2048, 2048): 128 MiB of gradients in 16 arrays."""
    return layers([2048] * 9), jnp.ones((16, 2048))


def manysmall() -> tuple[Any, Any]:
    """501 small layers: 2 MiB of gradients in 1002 arrays."""
    return layers([32] * 501 + [10]), jnp.ones((16, 32))


MODELS = {make.__name__: make for make in (mlp, manysmall)}


def layers(widths: list[int]) -> Any:
    keys = jax.random.split(jax.random.key(0), len(widths))
    pairs = itertools.pairwise(widths)
    return [
        {"kernel": jax.random.normal(key, (rows, columns)) / rows**0.5, "bias": jnp.zeros(columns)}
        for key, (rows, columns) in zip(keys, pairs, strict=False)
    ]


def loss_of(parameters: Any, inputs: Any) -> Any:
    for layer in parameters:
        inputs = jax.nn.relu(inputs @ layer["kernel"] + layer["bias"])
    return jnp.square(inputs).mean()


def step_of(compiled: Callable[[Any, Any, Any], Any], tx: Any, parameters: Any, inputs: Any, prepare: Any) -> Step:
    """One training step with donated parameters and state, timed until its result is there."""
    values = jax.tree.map(jnp.array, (parameters, tx.init(parameters)))
    state = [prepare(values), prepare(inputs)]

    def step() -> float:
        started = time.perf_counter()
        state[0] = jax.block_until_ready(compiled(*state[0], state[1]))
        return time.perf_counter() - started

    return step


def update_of(tx: Any, reduce: Callable[[Any], Any] = lambda gradients: gradients) -> Callable[[Any, Any, Any], Any]:
    def update(parameters: Any, state: Any, inputs: Any) -> Any:
        gradients = reduce(jax.grad(loss_of)(parameters, inputs))
        changes, state = tx.update(gradients, state, parameters)
        return optax.apply_updates(parameters, changes), state

    return update


def contenders(name: str) -> dict[str, Step]:
    parameters, inputs = MODELS[name]()
    tx = optax.sgd(1e-3)
    device = jax.local_devices()[0]

    def on_device(tree: Any) -> Any:
        return jax.device_put(tree, device)

    def stacked(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[None], tree)

    def jitted(update: Any) -> Any:
        return jax.jit(update, donate_argnums=(0, 1))

    mean = update_of(tx, lambda gradients: jax.lax.pmean(gradients, "ranks"))
    mapped = jax.pmap(mean, axis_name="ranks", donate_argnums=(0, 1))
    distributed = hvd.DistributedOptimizer(tx)
    steps = {
        OURS: step_of(jitted(update_of(distributed)), distributed, parameters, inputs, on_device),
        "pmap, gloo": step_of(mapped, tx, parameters, inputs, stacked),
        "alone": step_of(jitted(update_of(tx)), tx, parameters, inputs, on_device),
    }
    if HAS_MPI4JAX:
        steps["mpi4jax"] = step_of(jitted(update_of(tx, averaged_by_mpi4jax)), tx, parameters, inputs, on_device)
    return steps


def averaged_by_mpi4jax(gradients: Any) -> Any:
    import mpi4jax

    return jax.tree.map(lambda leaf: mpi4jax.allreduce(leaf, op=MPI.SUM, comm=MPI.COMM_WORLD) / hvd.size(), gradients)


def start_alone() -> None:
    """Starts our engine; XLA will have one thread for its arithmetic."""
    hvd.init()
    os.environ["XLA_FLAGS"] = ONE_THREAD


def start() -> None:
    """Starts our engine, and JAX's distributed runtime with gloo, in every rank."""
    start_alone()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    addresses = psutil.net_if_addrs()[interface]
    address = next(entry.address for entry in addresses if entry.family == socket.AF_INET)
    with socket.socket() as free:
        free.bind((address, 0))
        port = free.getsockname()[1]
    where = hvd.broadcast_object(f"{address}:{port}")
    jax.distributed.initialize(where, hvd.size(), hvd.rank())


def say_setup() -> None:
    """How this was started, the machine and the versions."""
    packages = ["numpy", "jax", "jaxlib", "optax", *(["mpi4jax"] if HAS_MPI4JAX else [])]
    library = MPI.Get_library_version().split(",")[0].splitlines()[0]
    hosts = f" on {hvd.cross_size()} hosts" if hvd.cross_size() > 1 else ""
    say(machine.command(f"horovodish run -np {hvd.size()} python" if hvd.cross_size() == 1 else "python"))
    say(f"{machine.machine(packages)}, {library}; {hvd.size()} ranks{hosts}\n")


def main() -> None:
    options = options_of(__doc__, MODELS)
    start()
    say_setup()
    compare_steps(options, contenders)
    hvd.shutdown()


if __name__ == "__main__":
    main()
