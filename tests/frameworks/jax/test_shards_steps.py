"""Optimizers whose state the ranks share: they step as without shards."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp

import horovodish.jax as hvd
from horovodish.jax.shards.state import ShardedState
from support.jax_sharded import (
    FEW,
    OPTIMIZERS,
    WHOLE,
    check_alike,
    check_by_parameter,
    parameters,
    same,
    trained,
)
from support.on_ranks import on_ranks


@on_ranks(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.soak) for name in OPTIMIZERS]
)
def test_the_same_bits_as_without_shards(name: str) -> None:
    check_alike(OPTIMIZERS[name]())


@pytest.mark.soak
@on_ranks(3, 4)
def test_on_any_number_of_ranks() -> None:
    for name in FEW:
        check_alike(OPTIMIZERS[name]())


@pytest.mark.soak
@on_ranks(3)
def test_in_compiled_programs() -> None:
    for name in FEW:
        check_alike(OPTIMIZERS[name](), compiled=True)


@pytest.mark.soak
@on_ranks((3, "mpi_ring"))
def test_the_same_numbers_where_every_rank_is_a_host() -> None:
    adam = optax.adam(1e-2)
    values, _ = trained(hvd.DistributedOptimizer(adam))
    for way in ("element", "parameter"):
        own, _ = trained(hvd.DistributedOptimizer(adam, shard="gradients", shard_by=way))
        same(own, values, 1e-2)
        assert len(set(hvd.allgather_object(np.asarray(own["first"]["kernel"]).tobytes()))) == 1


@pytest.mark.soak
@on_ranks(2)
def test_with_what_the_wrapper_has() -> None:
    adam = optax.adam(1e-2)
    for compiled in (False, True):
        check_alike(adam, compiled, backward_passes_per_step=2)
        check_alike(adam, compiled, compression=hvd.Compression.bf16)
    check_alike(adam, op=hvd.Sum)
    check_alike(adam, gradient_predivide_factor=2.0)
    tx = hvd.DistributedOptimizer(optax.inject_hyperparams(optax.sgd)(learning_rate=1.0), shard="states")
    state = tx.init(jnp.ones(3))
    state.inner.hyperparams["learning_rate"] = jnp.float32(0.5)
    np.testing.assert_array_equal(tx.update(jnp.ones(3), state)[0], -0.5)

    def of_the_value(updates: Any, state: Any, params: Any = None, *, value: Any) -> Any:
        return jax.tree.map(lambda update: update * value, updates), state

    takes_more = optax.GradientTransformationExtraArgs(lambda params: (), of_the_value)
    tx = hvd.DistributedOptimizer(takes_more, shard="states")
    for value in (3.0, jnp.float32(3.0)):
        for update in (tx.update, jax.jit(tx.update)):
            np.testing.assert_array_equal(update(jnp.ones(3), tx.init(jnp.ones(3)), value=value)[0], 3.0)


@pytest.mark.soak
@on_ranks(2)
def test_whole_parameters() -> None:
    for name in WHOLE:
        check_by_parameter(name)


@pytest.mark.soak
@on_ranks(3, 4)
def test_whole_parameters_on_any_number_of_ranks() -> None:
    for name in WHOLE:
        check_by_parameter(name)


@pytest.mark.soak
@on_ranks(3)
def test_whole_parameters_with_what_the_wrapper_has() -> None:
    check_by_parameter("clipped", compiled=True)
    check_by_parameter("clipped", backward_passes_per_step=2)
    check_by_parameter("adafactor", compression=hvd.Compression.bf16)
    pair = hvd.add_process_set([0, 2])
    tx = hvd.DistributedOptimizer(optax.lars(0.1), shard="states", shard_by="parameter", process_set=pair)
    own = [jnp.ones((2, 3)) * (hvd.rank() + 1), jnp.ones(2) * (hvd.rank() + 1)]
    mean = [jnp.ones((2, 3)) * 2, jnp.ones(2) * 2] if pair.included() else own
    update, _ = tx.update(own, tx.init(mean), mean)
    same(update, optax.lars(0.1).update(mean, optax.lars(0.1).init(mean), mean)[0])
    hvd.remove_process_set(pair)


@on_ranks(2)
def test_a_rank_whose_parameters_are_all_frozen() -> None:
    for shard_by, length in ("parameter", 5), ("element", 4):
        for frozen in 0, 1:
            labels = ["sgd", "frozen"] if frozen else ["frozen", "sgd"]
            tx = optax.multi_transform({"sgd": optax.sgd(1.0), "frozen": optax.set_to_zero()}, labels)
            tx = hvd.DistributedOptimizer(tx, shard="states", shard_by=shard_by)
            values = [jnp.ones(length), jnp.ones(8 - length)]
            expected = [jnp.zeros(each.size) if index == frozen else -each for index, each in enumerate(values)]
            same(jax.jit(tx.update)(values, tx.init(values), values)[0], expected)


@on_ranks(3)
def test_ranks_without_an_element_in_compiled_programs() -> None:
    """Their updates and their part of a norm are constants, which they must not send before they reduce."""
    values = {"one": jnp.ones(1), "empty": jnp.zeros((0, 3)), "number": jnp.float32(1.0)}
    tx = optax.chain(hvd.clip_by_global_norm(0.5), optax.sgd(1.0))
    tx = hvd.DistributedOptimizer(tx, shard="states")
    update, _ = jax.jit(tx.update)(values, tx.init(values), values)
    same(update, jax.tree.map(lambda leaf: -leaf * 0.5 / jnp.sqrt(2.0), values), 1e-6)


@on_ranks(2)
def test_the_norm_of_parameters_that_some_rank_does_not_step() -> None:
    values = {"first": jnp.ones(5), "second": jnp.ones(3)}
    for clipped, length in ("first", 5), ("second", 3):
        labels = {name: "clipped" if name == clipped else "plain" for name in values}
        clips = optax.chain(hvd.clip_by_global_norm(0.5), optax.sgd(1.0))
        tx = optax.multi_transform({"clipped": clips, "plain": optax.sgd(1.0)}, labels)
        tx = hvd.DistributedOptimizer(tx, shard="states", shard_by="parameter")
        expected = {**jax.tree.map(jnp.negative, values), clipped: jnp.full(length, -0.5 / jnp.sqrt(length))}
        same(jax.jit(tx.update)(values, tx.init(values), values)[0], expected, 1e-6)


@on_ranks(2)
def test_optimizers_that_one_line_makes_in_one_program() -> None:
    pair = [hvd.DistributedOptimizer(optax.adam(rate), shard="states") for rate in (0.1, 0.2)]
    gradients = jnp.ones(3)
    states = [tx.init(gradients) for tx in pair]
    step = jax.jit(lambda states: [tx.update(gradients, own)[0] for tx, own in zip(pair, states, strict=True)])
    np.testing.assert_allclose(step(states), [[-0.1] * 3, [-0.2] * 3], rtol=1e-5)


@pytest.mark.soak
@on_ranks(3)
def test_process_sets() -> None:
    adam = optax.adam(1e-2)
    pair = hvd.add_process_set([0, 2])
    values, state = trained(hvd.DistributedOptimizer(adam, process_set=pair))
    own, part = trained(hvd.DistributedOptimizer(adam, process_set=pair, shard="states"))
    same(own, values)
    assert isinstance(part, ShardedState) == pair.included()
    if pair.included():
        full = hvd.full_state(part, root=2)
        if hvd.rank() == 2:
            same(full, state)
        with pytest.raises(ValueError, match="root_rank=1"):
            hvd.full_state(part, root=1)
        with pytest.raises(ValueError, match=r"JaxState takes no sharded.*leave process_set= and shard_set= out"):
            hvd.elastic.JaxState(moments=part)
    else:
        same(hvd.full_state(part), state)
    hvd.remove_process_set(pair)


@pytest.mark.soak
@on_ranks(4)
def test_sets_that_have_the_whole_state_each() -> None:
    sets = [hvd.add_process_set([low, low + 2]) for low in (0, 1)]
    own = sets[hvd.rank() % 2]
    adam, bf16 = optax.adamw(1e-2), hvd.Compression.bf16
    clipped = optax.chain(hvd.clip_by_global_norm(0.1), optax.sgd(0.1, 0.9))
    for tx, compiled, options in (
        (clipped, True, {"op": hvd.Sum}),
        (adam, True, {"shard_by": "parameter", "compression": bf16, "gradient_predivide_factor": 2.0}),
    ):
        plain = {key: value for key, value in options.items() if key != "shard_by"}
        values, state = trained(hvd.DistributedOptimizer(tx, **plain), compiled=compiled)
        given, part = trained(hvd.DistributedOptimizer(tx, shard="states", shard_set=own, **options), compiled=compiled)
        same(given, values, 1e-2)
        assert len(set(hvd.allgather_object(np.asarray(given["first"]["kernel"]).tobytes()))) == 1
        elements, of_all = (sum(leaf.size for leaf in jax.tree.leaves(its)) for its in (part, state))
        assert elements < 0.9 * of_all
        full = hvd.full_state(part, root=1)
        assert (full is None) == (hvd.rank() != 1)
        if full is not None:
            same(full, state, 1e-2)
    with pytest.raises(ValueError, match=r"JaxState takes no sharded.*leave process_set= and shard_set= out"):
        hvd.elastic.JaxState(state=part)
    with pytest.raises(ValueError, match=r"shard_set: rank 1 is not in its set of ranks \[0, 2\]"):
        hvd.DistributedOptimizer(optax.adam(1e-2), shard="states", shard_set=sets[0]).init(parameters())


@pytest.mark.soak
@on_ranks(2)
def test_clipping_by_the_norm_of_all_pieces() -> None:
    for max_norm in (0.5, 100.0):
        plain, ours = (
            optax.chain(clip(max_norm), optax.sgd(0.1)) for clip in (optax.clip_by_global_norm, hvd.clip_by_global_norm)
        )
        for compiled in (False, True):
            expected, _ = trained(hvd.DistributedOptimizer(plain), compiled=compiled)
            same(trained(hvd.DistributedOptimizer(ours, shard="states"), compiled=compiled)[0], expected, 1e-2)
            same(trained(hvd.DistributedOptimizer(ours), compiled=compiled)[0], expected)


@pytest.mark.soak
@on_ranks(2)
def test_parameters_of_several_types() -> None:
    """Without `hyperparam_dtype`, hyperparameters have the widest type of the parameters that there are."""
    values = {"large": jnp.ones((4, 9), jnp.bfloat16), **{name: jnp.ones((2, 3)) for name in "abc"}}
    options = {"learning_rate": optax.linear_schedule(1e-2, 0.0, 9)}

    def made(**types: Any) -> optax.GradientTransformationExtraArgs:
        tx = optax.inject_hyperparams(optax.lamb, **types)(**options)
        return hvd.DistributedOptimizer(tx, shard="states", shard_by="parameter")

    with pytest.raises(ValueError, match=r"\['b1'\] depends on which parameters there are.*pass hyperparam_dtype="):
        made().init(values)
    tx = made(hyperparam_dtype=jnp.float32)
    _, state = tx.update(values, tx.init(values), values)
    full = hvd.broadcast_object(jax.device_get(hvd.full_state(state)))
    assert np.dtype("float32") in {leaf.dtype for leaf in jax.tree.leaves(full) if leaf.shape == (4, 9)}
    again = hvd.full_state(hvd.load_full_state(tx.init(values), full))
    if hvd.rank() == 0:
        same(again, full)


@on_ranks(2)
def test_several_models_by_vmap() -> None:
    adam, values = optax.adam(0.1), {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(2)}
    tx = hvd.DistributedOptimizer(adam, shard="states")
    states = jax.vmap(tx.init)(values)
    updates, states = jax.jit(jax.vmap(tx.update))(values, states, values)
    with pytest.raises(ValueError, match=r"full_state\(\) got the state of several models.*Remedy"):
        hvd.full_state(states)
    for number in range(2):
        one = jax.tree.map(lambda leaf, number=number: leaf[number], (values, updates, states))
        expected, plain = adam.update(one[0], adam.init(one[0]), one[0])
        same(one[1], expected, 1e-6)
        full = hvd.full_state(one[2])
        if hvd.rank() == 0:
            same(full, plain, 1e-6)
