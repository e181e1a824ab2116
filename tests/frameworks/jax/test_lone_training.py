"""Ranks that begin to train with different parameters are warned, inside and outside of jit."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp

import horovodish.jax as hvd
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from support.threads import await_comparison

STEPS = 5


def parameters(seed: int) -> Any:
    return {"layer": {"bias": jnp.ones(3), "kernel": jax.random.normal(jax.random.key(seed), (4, 3))}}


def said_by(train: Callable[[], object]) -> list[str]:
    """What this rank was warned of from init() to shutdown()."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hvd.init()
        train()
        await_comparison()
        hvd.barrier()
        hvd.shutdown()
    return [str(each.message) for each in caught if issubclass(each.category, RuntimeWarning)]


def trained(
    compiled: Callable[[Any], Any] = jax.jit,
    wrap: Callable[[Any], Any] = hvd.DistributedOptimizer,
    begin: Callable[[], Any] = lambda: parameters(hvd.rank()),
    given: Callable[[Any], Any] = lambda values: values,
    gradient: Callable[[Any], Any] = jax.grad,
) -> None:
    """Takes steps.

    Args:
        compiled: the step.
        wrap: the optimizer.
        begin: the parameters.
        given: what `update` gets of them.
        gradient: a function of the loss.
    """
    tx = wrap(optax.sgd(0.1))

    def loss_of(values: Any) -> Any:
        return sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(values))

    def step(values: Any, state: Any) -> Any:
        updates, state = tx.update(gradient(loss_of)(values), state, given(values))
        return optax.apply_updates(values, updates), state

    run, values = compiled(step), begin()
    state = tx.init(values)
    for _ in range(STEPS):
        values, state = run(values, state)
    jax.block_until_ready(values)


def as_a_loop(step: Any) -> Any:
    def run(values: Any, state: Any) -> Any:
        return jax.lax.scan(lambda carry, _: (step(*carry), None), (values, state), None, length=4)[0]

    return jax.jit(run)


def donating(step: Any) -> Any:
    return jax.jit(step, donate_argnums=(0, 1))


def unwrapped(tx: Any) -> Any:
    return tx


def two_passes(tx: Any) -> Any:
    return hvd.DistributedOptimizer(tx, backward_passes_per_step=2)


def adasum(tx: Any) -> Any:
    return hvd.DistributedOptimizer(tx, op=hvd.Adasum)


def uncompiled(step: Any) -> Any:
    return step


def begin_apart() -> list[list[str]]:
    return [
        said_by(train)
        for train in (
            trained,
            lambda: trained(uncompiled),
            lambda: trained(donating),
            lambda: trained(as_a_loop),
            lambda: trained(wrap=two_passes),
            lambda: trained(wrap=lambda tx: optax.MultiSteps(hvd.DistributedOptimizer(tx), 2)),
            lambda: trained(wrap=adasum),
            lambda: trained(wrap=unwrapped, gradient=hvd.grad),
            lambda: trained(uncompiled, wrap=unwrapped, gradient=hvd.grad),
        )
    ]


@pytest.mark.soak
def test_ranks_that_begin_with_different_parameters_are_warned_once() -> None:
    first, second = run_ranks(begin_apart, 2)
    assert second == [[]] * 9
    for said in first:
        (text,) = said
        assert "different parameters: parameter ['layer']['kernel'] differs: rank 0 has float32 of shape (4, 3)" in text
        assert "; rank 1 has float32 of shape (4, 3) with checksum" in text
        assert "Remedy: parameters = hvd.broadcast_parameters(" in text


def begin_alike() -> list[list[str]]:
    def broadcast() -> Any:
        return hvd.broadcast_parameters(parameters(hvd.rank()), root_rank=0)

    def of_two() -> None:
        two = hvd.add_process_set([0, 1])
        begin = parameters(hvd.rank() // 2)
        trained(wrap=lambda tx: hvd.DistributedOptimizer(tx, process_set=two), begin=lambda: begin)

    def of_inputs() -> None:
        hvd.grad(jnp.sum)(jnp.full(3, float(hvd.rank())))
        jax.jit(hvd.grad(jnp.sum))(jnp.full(3, float(hvd.rank())))

    return [
        said_by(train)
        for train in (
            lambda: trained(begin=broadcast),
            lambda: trained(donating, begin=broadcast),
            lambda: trained(uncompiled, begin=broadcast),
            of_two,
            of_inputs,
            # Rank 1 does not say what its parameters are.
            lambda: trained(given=lambda values: None if hvd.rank() == 1 else values),
            lambda: trained(uncompiled, given=lambda values: None if hvd.rank() == 1 else values),
        )
    ]


@pytest.mark.soak
def test_ranks_that_begin_alike_and_ranks_that_cannot_tell_are_not_warned() -> None:
    assert run_ranks(begin_alike, 3) == [[[]] * 7] * 3


def keep_one_program() -> list[list[str]]:
    """The ranks differ, then they don't, then they do."""
    tx = hvd.DistributedOptimizer(optax.sgd(0.1))
    update = jax.jit(lambda values: tx.update(values, tx.init(values), values))
    return [said_by(lambda factor=factor: update(parameters(factor * hvd.rank()))) for factor in (1, 0, 1)]


def test_a_program_compares_again_after_another_init() -> None:
    first, second = run_ranks(keep_one_program, 2)
    assert [len(said) for said in first] == [1, 0, 1]
    assert second == [[]] * 3


def differ_in_one(name: str) -> list[str]:
    def train() -> None:
        odd = {
            "bfloat16": jnp.full(3, hvd.rank(), jnp.bfloat16),
            "float8": jnp.full(3, hvd.rank(), jnp.float8_e4m3fn),
            "int8": jnp.full(3, hvd.rank(), jnp.int8),
            "bool": jnp.array(hvd.rank() == 0),
            "complex64": jnp.full(3, hvd.rank() * 1j),
            "NumPy": np.full(3, hvd.rank()),
            "NumPy scalar": np.float32(hvd.rank()),
            "number": 1.0 + hvd.rank(),
        }
        ignored = {"key": jax.random.key(hvd.rank()), "int4": jnp.full(3, hvd.rank(), jnp.int4), "text": "", "no": None}
        ignored |= {"NumPy text": np.str_(hvd.rank()), "too long": 10**30 + hvd.rank()} if "umber" in name else {}
        more = {"empty": jnp.zeros((0, 3)), "odd": odd.get(name), **ignored}
        compiled = uncompiled if name in ("NumPy", "NumPy scalar", "number") else jax.jit
        trained(compiled, begin=lambda: parameters(0), given=lambda values: {**values, **more})

    return said_by(train)


@pytest.mark.parametrize("name", ["bfloat16", "float8", "int8", "bool", "complex64", "NumPy", "NumPy scalar", "number"])
def test_parameters_of_unusual_kinds_are_compared(name: str) -> None:
    first, second = run_ranks(differ_in_one, 2, args=(name,))
    (text,) = first
    assert "parameter ['odd'] differs" in text
    assert "more differ" not in text
    assert second == []


def two_optimizers_of_one_line() -> list[str]:
    def train() -> None:
        first, second = [hvd.DistributedOptimizer(optax.sgd(0.1)) for _ in range(2)]

        @jax.jit
        def step(one: Any, other: Any) -> Any:
            return first.update(one, first.init(one), one)[0], second.update(other, second.init(other), other)[0]

        step(parameters(0), {"weight": jnp.full(3, hvd.rank())})

    return said_by(train)


def test_two_optimizers_in_one_program_are_compared() -> None:
    first, second = run_ranks(two_optimizers_of_one_line, 2)
    (text,) = first
    assert "parameter ['weight'] differs" in text
    assert second == []


def part_later_on_one_line() -> list[list[str]]:
    """The second of two optimizers parts after its second step; then as `hvd.grad` that is made anew in each step."""

    def of_optimizers() -> None:
        pairs = [(hvd.DistributedOptimizer(optax.sgd(0.1)), {name: jnp.ones(3)}) for name in ("one", "other")]
        for step in range(STEPS):
            for index, (tx, values) in enumerate(pairs):
                updates, _ = tx.update(values, tx.init(values), values)
                rate = 1.0 + hvd.rank() if (step, index) == (1, 1) else 1.0
                pairs[index] = tx, jax.tree.map(lambda value, update, rate=rate: value + rate * update, values, updates)

    def of_gradients() -> None:
        trained(
            uncompiled,
            lambda tx: optax.chain(tx, optax.scale(1.0 + hvd.rank())),
            lambda: parameters(0),
            gradient=hvd.grad,
        )

    return [said_by(of_optimizers), said_by(of_gradients)]


def test_optimizers_of_one_line_count_their_own_steps() -> None:
    first, second = run_ranks(part_later_on_one_line, 2)
    assert second == [[], []]
    assert [len(said) for said in first] == [1, 1], first
    for (text,), name in zip(first, ("other", "layer"), strict=True):
        assert text.startswith(f"the ranks train different parameters at step 4: parameter ['{name}']"), text


def begin_after_a_join() -> list[str]:
    """Rank 1 has joined when rank 0 reduces for the first time."""

    def train() -> None:
        if hvd.rank() == 0:
            trained()
        hvd.join()
        trained()

    return said_by(train)


def test_a_rank_that_has_joined_is_not_compared() -> None:
    first, (text,) = run_ranks(begin_after_a_join, 2)
    assert first == []
    assert "rank 1 has joined before its first step" in text


def part_later() -> list[list[str]]:
    def at_own_rate(compiled: Callable[[Any], Any], wrap: Callable[[Any], Any]) -> list[str]:
        return said_by(
            lambda: trained(
                compiled,
                lambda tx: wrap(optax.chain(tx, optax.scale(1.0 + hvd.rank()))),
                lambda: parameters(0),
            )
        )

    return [
        at_own_rate(jax.jit, hvd.DistributedOptimizer),
        at_own_rate(uncompiled, hvd.DistributedOptimizer),
        at_own_rate(as_a_loop, hvd.DistributedOptimizer),
    ]


def test_ranks_that_part_later_are_warned_once() -> None:
    first, second = run_ranks(part_later, 2)
    assert second == [[], [], []]
    for texts in first:
        (text,) = texts
        assert text.startswith("the ranks train different parameters at step 4: parameter ['layer']['bias'] differs"), (
            text
        )


def train_after_joins() -> list[str]:
    """Each rank runs one program, more often than the other until it joins, and then as often."""
    tx = hvd.DistributedOptimizer(optax.sgd(0.1))
    update = jax.jit(lambda values: tx.update(values, tx.init(values), values))

    def train() -> None:
        for steps in (5, 3), (2, 9):
            for _ in range(steps[hvd.rank()]):
                jax.block_until_ready(update(parameters(0)))
            hvd.join()
        for _ in range(4):  # the 15th to the 18th
            update(parameters(0))

    return said_by(train)


def test_after_a_join_the_ranks_compare_at_the_same_step() -> None:
    assert run_ranks(train_after_joins, 2) == [[], []]


@on_ranks(2)
def test_a_donated_parameter_is_not_copied() -> None:
    """It is updated in place, although the comparison reads it."""
    tx, values = hvd.DistributedOptimizer(optax.sgd(0.1)), parameters(0)

    def step(values: Any) -> Any:
        updates, _ = tx.update(jax.tree.map(jnp.sin, values), tx.init(values), values)
        return optax.apply_updates(values, updates)

    text = jax.jit(step, donate_argnums=0).lower(values).compile().as_text()
    assert "horovodish_compare" in text
    assert not re.findall(r"f32\[4,3\]\S* copy\(.*", text)


@on_ranks(2)
def test_transformations_of_an_update() -> None:
    def updated(gradients: Any, values: Any) -> Any:
        tx = hvd.DistributedOptimizer(optax.sgd(1.0))
        return tx.update(gradients, tx.init(values), values)[0]["layer"]["bias"]

    def squared(values: Any) -> Any:
        return jnp.sum(updated(jax.tree.map(jnp.square, values), values))

    values = parameters(0)
    several = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), values)
    for compiled in (jax.jit, uncompiled):
        np.testing.assert_array_equal(compiled(jax.vmap(updated))(several, several), [[-1] * 3, [-2] * 3])
        tangent = compiled(lambda: jax.jvp(lambda given: updated(given, values), (values,), (values,))[1])()
        np.testing.assert_array_equal(tangent, [-1] * 3)
        for function in (squared, jax.checkpoint(squared)):
            np.testing.assert_array_equal(compiled(jax.grad(function))(values)["layer"]["bias"], [-2] * 3)
