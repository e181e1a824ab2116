"""Optimizers of JAX that are trained with and without shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax import numpy as jnp

import horovodish.jax as hvd

RATE = optax.cosine_decay_schedule(1e-2, 100)


def of_kernels(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)


LABELS = {"first": "adam", "second": "sgd"}

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(RATE, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(RATE, mask=of_kernels),
    "rmsprop": lambda: optax.rmsprop(1e-3, momentum=0.9, centered=True),
    "adagrad": lambda: optax.adagrad(1e-2),
    "lion": lambda: optax.lion(1e-3),
    "radam": lambda: optax.radam(1e-2),
    "adan": lambda: optax.adan(1e-3),
    "amsgrad": lambda: optax.amsgrad(1e-3),
    "small moments": lambda: optax.adam(1e-3, mu_dtype=jnp.bfloat16),
    "by label": lambda: optax.multi_transform({"adam": optax.adam(1e-3), "sgd": optax.sgd(0.1, 0.9)}, LABELS),
    "frozen": lambda: optax.multi_transform({"adam": optax.adam(1e-3), "sgd": optax.set_to_zero()}, LABELS),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=RATE),
    "steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
}

FEW = ("sgd", "adamw", "by label")


def parameters() -> Any:
    """With shapes that no number of ranks divides, of no dimensions, without elements, in two dtypes, and None."""
    one, other = jax.random.split(jax.random.key(0))
    first = {"kernel": jax.random.normal(one, (5, 21)), "bias": jnp.zeros(21), "none": None}
    second = {"kernel": jax.random.normal(other, (21, 3)).astype(jnp.bfloat16), "scale": jnp.float32(1.5)}
    return {"first": first, "second": {**second, "empty": jnp.zeros((0, 3))}}


def loss_of(tree: Any, inputs: Any) -> Any:
    hidden = jnp.tanh(inputs @ tree["first"]["kernel"] + tree["first"]["bias"])
    return jnp.square(hidden @ tree["second"]["kernel"].astype(jnp.float32) * tree["second"]["scale"]).mean()


def trained(
    tx: Any, steps: int = 3, begin: Any = None, rank: int | None = None, compiled: bool = False, salt: int = 0
) -> Any:
    values, state = begin or (parameters(), tx.init(parameters()))
    key = jax.random.fold_in(jax.random.key(7 + salt), hvd.rank() if rank is None else rank)

    def step(values: Any, state: Any, inputs: Any) -> Any:
        updates, state = tx.update(jax.grad(loss_of)(values, inputs), state, values)
        return optax.apply_updates(values, updates), state

    run = jax.jit(step, donate_argnums=(0, 1)) if compiled else step
    for number in range(steps):
        values, state = run(values, state, jax.random.normal(jax.random.fold_in(key, number), (8, 5)))
    return values, state


def same(one: Any, other: Any, rounding: float = 0.0) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=rounding, atol=rounding)


def check_alike(tx: optax.GradientTransformation, compiled: bool = False, **options: Any) -> None:
    """The same training with and without shards: the same bits outside of jit, and within rounding inside."""
    values, state = trained(hvd.DistributedOptimizer(tx, **options), compiled=compiled)
    own, part = trained(hvd.DistributedOptimizer(tx, shard="states", **options), compiled=compiled)
    rounding = 1e-2 if compiled else 0.0
    same(own, values, rounding)
    full = hvd.full_state(part, root=hvd.size() - 1)
    if hvd.rank() == hvd.size() - 1:
        same(full, state, rounding)
    else:
        assert full is None


WHOLE: dict[str, tuple[Callable[[], optax.GradientTransformation], float]] = {
    "lars": (lambda: optax.lars(1e-2), 0.0),
    "adafactor": (lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4), 0.0),
    "sm3": (lambda: optax.sm3(1e-2), 0.0),
    # optax compiles the bias correction of all leaves at once, so XLA rounds the leaves of a rank otherwise.
    "lamb": (lambda: optax.lamb(1e-2), 1e-5),
    "muon": (lambda: optax.contrib.muon(1e-2), 1e-5),
    "clipped": (lambda: optax.chain(hvd.clip_by_global_norm(0.1), optax.lars(1e-2)), 1e-5),
}
"""Optimizers that look at whole parameters, and how close they come to training without shards outside of jit."""


def whole_parameters() -> Any:
    """Without what some of these optimizers do not take: parameters without elements, and of no dimensions."""
    tree = parameters()
    return {"first": tree["first"], "second": {"kernel": tree["second"]["kernel"], "scale": jnp.full(1, 1.5)}}


def check_by_parameter(name: str, compiled: bool = False, **options: Any) -> None:
    make, rounding = WHOLE[name]
    rounding = 1e-2 if compiled else rounding
    tx, last = hvd.DistributedOptimizer(make(), **options), hvd.size() - 1
    values, state = trained(tx, begin=(whole_parameters(), tx.init(whole_parameters())), compiled=compiled)
    tx = hvd.DistributedOptimizer(make(), shard="gradients", shard_by="parameter", **options)
    own, part = trained(tx, begin=(whole_parameters(), tx.init(whole_parameters())), compiled=compiled)
    same(own, values, rounding)
    full = hvd.full_state(part, root=last)
    if hvd.rank() == last:
        same(full, state, rounding)


def normed() -> optax.GradientTransformationExtraArgs:
    def update(updates: Any, state: Any, params: Any = None, normed: bool = False, **_: Any) -> tuple[Any, Any]:
        return jax.tree.map(lambda leaf: leaf / jnp.linalg.norm(leaf), updates) if normed else updates, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
