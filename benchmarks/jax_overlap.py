"""How much of a jitted step's communication hides behind its computation, ours beside pmap over gloo:

    python benchmarks/two_hosts.py --gbit 2 1 benchmarks/jax_overlap.py

Runs on two hosts with one rank each, joined by a link of 2 Gbit/s in either direction; `two_hosts.py` makes them of
this machine. Every rank has a core of its own. In turns:

- `alone`, the step without communication, in all ranks at once; of it also the gradients, B.
- for each contender its step, S, and its communication with nothing to hide behind, C: an allreduce of the same
  gradients in the same way.

What a step takes longer than `alone` is exposed; overlap is the share of C that is not: 1 - (S - alone) / C. It is `at
most` B / C. Times are medians of all ranks.
"""

import argparse
import os
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax import numpy as jnp
from jax_step import MODELS, WARM_UP_STEPS, contenders, loss_of, say_setup, start
from rounds import alternate, percentile, say, timed

import horovodish.jax as hvd

OURS, PMAP = "horovodish", "pmap, gloo"


def take_a_core() -> None:
    """Has all threads that this rank starts run on one core, which no other rank takes."""
    os.sched_setaffinity(0, {hvd.rank() % (os.cpu_count() or 1)})


def timed_parts(make: Callable[[], tuple[Any, Any]]) -> dict[str, Callable[[], float]]:
    """What is timed, by name; it has been compiled."""
    parameters, inputs = make()
    steps = contenders(make)
    gradients = jax.jit(jax.grad(loss_of))
    reduce = hvd.DistributedOptimizer(optax.identity())
    state = reduce.init(parameters)
    ours = jax.jit(lambda tree: reduce.update(tree, state)[0], donate_argnums=0)
    mapped = jax.pmap(lambda tree: jax.lax.pmean(tree, "ranks"), axis_name="ranks", donate_argnums=0)
    trees = {OURS: jax.tree.map(jnp.zeros_like, parameters)}
    trees[PMAP] = jax.tree.map(lambda leaf: jnp.zeros_like(leaf)[None], parameters)

    def communication(name: str, program: Callable[[Any], Any]) -> Callable[[], float]:
        def call() -> None:
            trees[name] = jax.block_until_ready(program(trees[name]))

        return timed(call)

    return {
        f"{OURS} step": steps[OURS],
        f"{PMAP} step": steps[PMAP],
        "alone": steps["alone"],
        "gradients": timed(lambda: jax.block_until_ready(gradients(parameters, inputs))),
        f"{OURS} communication": communication(OURS, ours),
        f"{PMAP} communication": communication(PMAP, mapped),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="blocks of everything that is timed")
    parser.add_argument("--steps", type=int, default=2, help="steps of a block")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["mlp"])
    options = parser.parse_args()
    start(before_the_backend=take_a_core)
    say_setup()
    say("milliseconds  contender      step   alone gradients exposed communication  overlap  at most")
    for name in options.models:
        parts = timed_parts(MODELS[name])
        for part in parts.values():
            for _ in range(WARM_UP_STEPS):
                part()
        seconds = alternate(parts, options.rounds, dict.fromkeys(parts, options.steps))
        median = {what: percentile(values, 50) for what, values in seconds.items()}
        for contender in (OURS, PMAP):
            communication = median[f"{contender} communication"]
            exposed = median[f"{contender} step"] - median["alone"]
            say(
                f"{name:<13} {contender:<11} {median[f'{contender} step'] * 1e3:>7.1f} {median['alone'] * 1e3:>7.1f} "
                f"{median['gradients'] * 1e3:>8.1f} {exposed * 1e3:>8.1f} {communication * 1e3:>13.1f} "
                f"{1 - exposed / communication:>8.2f} {min(1.0, median['gradients'] / communication):>8.2f}"
            )
    hvd.shutdown()


if __name__ == "__main__":
    main()
