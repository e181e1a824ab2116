"""How much of a jitted step's communication hides behind its computation:

    python benchmarks/two_hosts.py --gbit 2 1 benchmarks/jax_overlap.py

Runs on two hosts with one rank each, joined by a link of 2 Gbit/s in either direction; `two_hosts.py` makes them of
this machine. Every rank has a core of its own. In turns:

- `alone`, the step without communication, in all ranks at once; of it also the gradients, B.
- our step, S, and the communication with nothing to hide behind, C: the same optimizer on gradients that are there.
- where it is installed, the same of mpi4jax. (JAX's gloo wants names of hosts that can be resolved.)

What a step takes longer than `alone` is exposed; overlap is the share of C that is not: 1 - (S - alone) / C. It is `at
most` B / C. Times are medians of all ranks.
"""

import os
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax import numpy as jnp
from jax_step import (
    HAS_MPI4JAX,
    averaged_by_mpi4jax,
    loss_of,
    mlp,
    say_setup,
    start_alone,
    step_of,
    update_of,
)
from rounds import timed
from training_steps import OURS, compare_overlaps, options_of, warm_up

import horovodish.jax as hvd

ROWS = 512


def mlp_of_many_rows() -> tuple[Any, Any]:
    """The layers of mlp, with enough rows that their computation can hide the transfer of 128 MiB."""
    parameters, _ = mlp()
    return parameters, jnp.ones((ROWS, 2048))


MODELS = {"mlp": mlp, f"mlp{ROWS}": mlp_of_many_rows}


def take_a_core() -> None:
    """Has all threads that this rank starts run on one core, which no other rank takes."""
    os.sched_setaffinity(0, {hvd.rank() % (os.cpu_count() or 1)})


def timed_parts(name: str) -> dict[str, Callable[[], float]]:
    """What is timed."""
    parameters, inputs = MODELS[name]()
    reduce = hvd.DistributedOptimizer(optax.identity())
    reductions = {OURS: lambda tree: reduce.update(tree, reduce.init(tree))[0]}
    if HAS_MPI4JAX:
        reductions["mpi4jax"] = averaged_by_mpi4jax
    gradients = jax.jit(jax.grad(loss_of))

    def step(*reduction: Callable[[Any], Any]) -> Callable[[], float]:
        tx = optax.sgd(1e-3)
        compiled = jax.jit(update_of(tx, *reduction), donate_argnums=(0, 1))
        return step_of(compiled, tx, parameters, inputs, lambda tree: tree)

    def communication(reduction: Callable[[Any], Any]) -> Callable[[], float]:
        program = jax.jit(reduction, donate_argnums=0)
        tree = [jax.tree.map(jnp.zeros_like, parameters)]

        def call() -> None:
            tree[0] = jax.block_until_ready(program(tree[0]))

        return timed(call)

    parts = {"alone": step(), "gradients": timed(lambda: jax.block_until_ready(gradients(parameters, inputs)))}
    for name, reduction in reductions.items():
        parts |= {f"{name} step": step(reduction), f"{name} communication": communication(reduction)}
    warm_up(parts)
    return parts


def main() -> None:
    options = options_of(__doc__, MODELS, rounds=4, steps=2)
    start_alone()
    take_a_core()
    say_setup()
    compare_overlaps(options, "gradients", timed_parts)
    hvd.shutdown()


if __name__ == "__main__":
    main()
