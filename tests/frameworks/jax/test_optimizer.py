"""horovodish.jax.DistributedOptimizer and the gradient functions: N ranks train as one does on all of the data."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp

import horovodish.jax as hvd
from horovodish.errors import NotInitializedError
from support.autotuned import autotune_warnings, run_with_autotune
from support.documents import python_blocks
from support.on_ranks import on_ranks

STEPS = 6


def batch(rank: int, step: int) -> Any:
    inputs = jax.random.normal(jax.random.fold_in(jax.random.key(7), step * 10 + rank), (8, 4))
    return inputs, (inputs @ jnp.arange(4.0))[:, None]


def whole_batch(step: int) -> Any:
    batches = [batch(rank, step) for rank in range(hvd.size())]
    return tuple(jnp.concatenate(parts) for parts in zip(*batches, strict=True))


def own_batch(step: int) -> Any:
    return batch(hvd.rank(), step)


def parameters() -> Any:
    one, other = jax.random.split(jax.random.key(0))
    first = {"kernel": jax.random.normal(one, (4, 5)), "bias": jnp.zeros(5)}
    return {"layer_0": first, "layer_1": {"kernel": jax.random.normal(other, (5, 1))}}


def loss_of(tree: Any, data: Any) -> Any:
    inputs, targets = data
    hidden = jnp.tanh(inputs @ tree["layer_0"]["kernel"] + tree["layer_0"]["bias"])
    return jnp.square(hidden @ tree["layer_1"]["kernel"] - targets).mean()


def trained(tx: Any, data: Any = own_batch, gradient: Any = None, compiled: bool = True) -> Any:
    values = parameters()
    state = tx.init(values)

    def step(values: Any, state: Any, data: Any) -> Any:
        gradients = (gradient or jax.grad(loss_of))(values, data)
        updates, state = tx.update(gradients, state, values)
        return optax.apply_updates(values, updates), state

    run = jax.jit(step, donate_argnums=(0, 1)) if compiled else step
    for number in range(STEPS):
        values, state = run(values, state, data(number))
    return values


def alike(one: Any, other: Any, tolerance: float = 1e-5) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@on_ranks(2)
def test_one_process_with_all_of_the_data() -> None:
    adam = optax.adam(0.05)
    expected = trained(adam, whole_batch)
    wrap = hvd.DistributedOptimizer
    for tx in (
        wrap(adam),
        wrap(optax.chain(optax.clip_by_global_norm(1e9), adam)),
        optax.chain(optax.identity(), wrap(adam)),
        wrap(optax.inject_hyperparams(optax.adam)(learning_rate=0.05)),
        optax.inject_hyperparams(lambda learning_rate: wrap(optax.adam(learning_rate)))(learning_rate=0.05),
        wrap(adam, gradient_predivide_factor=4.0),
    ):
        assert isinstance(tx, optax.GradientTransformation)
        alike(trained(tx), expected)
    alike(trained(wrap(adam), compiled=False), expected)
    alike(trained(wrap(adam, compression=hvd.Compression.bf16)), expected, 0.01)
    alike(trained(wrap(adam, compression=hvd.Compression.fp16)), expected, 0.01)
    alike(trained(adam, gradient=hvd.grad(loss_of)), expected)
    alike(trained(adam, gradient=lambda *a: hvd.value_and_grad(loss_of)(*a)[1], compiled=False), expected)
    alike(trained(wrap(optax.sgd(0.05), op=hvd.Sum)), trained(optax.sgd(0.05 * hvd.size()), whole_batch))
    clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))
    alike(trained(wrap(clipped)), trained(clipped, whole_batch))
    jax.tree.map(np.testing.assert_array_equal, wrap(adam).init(parameters()), adam.init(parameters()))


@on_ranks(2)
def test_transformations_of_optax() -> None:
    """Transformations that keep parts of a tree, look at whole matrices, or decide by values."""
    adam, sgd = optax.adam(0.05), optax.sgd(0.1)
    first, second = {"layer_0": True, "layer_1": False}, {"layer_0": False, "layer_1": True}
    for build in (
        lambda wrap: optax.chain(optax.masked(wrap(adam), first), optax.masked(wrap(sgd), second)),
        lambda wrap: wrap(optax.chain(optax.apply_if_finite(optax.adafactor(0.05), 3))),
    ):
        alike(trained(build(hvd.DistributedOptimizer)), trained(build(lambda tx: tx), whole_batch))
    # A value that one rank alone sees is decided about by all.
    tx = hvd.DistributedOptimizer(optax.apply_if_finite(optax.sgd(1.0), 3))
    update, state = jax.jit(tx.update)(jnp.full(2, jnp.nan if hvd.rank() == 0 else 1.0), tx.init(jnp.zeros(2)))
    assert (update.tolist(), int(state.total_notfinite)) == ([0, 0], 1)

    def of_the_value(updates: Any, state: Any, params: Any = None, *, value: Any) -> Any:
        return jax.tree.map(lambda update: update * value, updates), state

    takes_more = optax.GradientTransformationExtraArgs(lambda params: (), of_the_value)
    for passes in (1, 2):
        tx = hvd.DistributedOptimizer(takes_more, op=hvd.Sum, backward_passes_per_step=passes)
        state = tx.init(jnp.zeros(2))
        for _ in range(passes):
            update, state = jax.jit(tx.update)(jnp.ones(2), state, value=3.0)
        np.testing.assert_array_equal(update, 3.0 * hvd.size() * passes)


@pytest.mark.soak
@on_ranks(2)
def test_ways_to_run_a_step() -> None:
    """Compiled ahead of time, as a loop in one program, with micro-batches, and without any compilation."""
    adam = optax.adam(0.05)
    tx, expected = hvd.DistributedOptimizer(adam), trained(adam, whole_batch)

    def applied(carry: Any, gradients: Any) -> Any:
        values, state = carry
        updates, state = tx.update(gradients, state, values)
        return optax.apply_updates(values, updates), state

    def step(carry: Any, data: Any) -> Any:
        return applied(carry, jax.grad(loss_of)(carry[0], data)), None

    def step_of_micro_batches(carry: Any, data: Any) -> Any:
        def add(total: Any, half: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.grad(loss_of)(carry[0], half)), None

        halves = jax.tree.map(lambda part: part.reshape(2, -1, *part.shape[1:]), data)
        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, carry[0]), halves)
        return applied(carry, jax.tree.map(lambda leaf: leaf / 2, total)), None

    def start() -> Any:
        return parameters(), tx.init(parameters())

    batches = [own_batch(number) for number in range(STEPS)]
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *batches)
    (values, _), _ = jax.jit(lambda carry: jax.lax.scan(step, carry, stacked))(start())
    alike(values, expected)
    ahead_of_time = jax.jit(step, donate_argnums=0).lower(start(), batches[0]).compile()
    for run in (ahead_of_time, jax.jit(step_of_micro_batches, donate_argnums=0)):
        carry = start()
        for data in batches:
            carry, _ = run(carry, data)
        alike(carry[0], expected)
    with jax.disable_jit():
        carry, _ = step(start(), batches[0])
    alike(carry[0], ahead_of_time(start(), batches[0])[0][0])


@pytest.mark.soak
@on_ranks(2)
def test_accumulation() -> None:
    expected = trained(optax.MultiSteps(optax.adam(0.05), 2), whole_batch)
    wrap = hvd.DistributedOptimizer
    alike(trained(optax.MultiSteps(wrap(optax.adam(0.05)), 2)), expected)
    alike(trained(wrap(optax.MultiSteps(optax.adam(0.05), 2).gradient_transformation())), expected)
    halved = optax.chain(optax.scale(0.5), optax.adam(0.05))  # sums, where MultiSteps has means
    alike(trained(wrap(halved, backward_passes_per_step=2)), expected)
    alike(trained(wrap(halved, backward_passes_per_step=2), compiled=False), expected)
    tx = wrap(optax.sgd(1.0), backward_passes_per_step=3)
    state = tx.init(jnp.zeros(2))
    seen = []
    for value in (1.0, 2.0, 4.0, 8.0):
        update, state = jax.jit(tx.update)(jnp.full(2, value * (1 + hvd.rank())), state)
        seen.append(float(update[0]))
    mean = sum(range(1, hvd.size() + 1)) / hvd.size()
    np.testing.assert_allclose(seen, [0, 0, -7 * mean, 0])
    assert int(state.passes) == 1
    # What each gradient adds to a large sum is kept, and the state keeps its types, as a loop wants it.
    tx = wrap(optax.sgd(1.0), backward_passes_per_step=3)
    state = tx.init(jnp.zeros(1, jnp.bfloat16))
    for dtype in (jnp.bfloat16, jnp.float32):
        gradients = jnp.array([[256], [1], [1]], dtype)
        _, updates = jax.jit(lambda rows: jax.lax.scan(lambda s, row: tx.update(row, s)[::-1], state, rows))(gradients)
        assert updates.dtype == dtype
        np.testing.assert_array_equal(np.asarray(updates, np.float32)[:, 0], [0, 0, -258])
    # As Equinox gives it, there may be no gradient where there is a parameter.
    tx = wrap(optax.sgd(1.0), backward_passes_per_step=2)
    state = tx.init({"trained": jnp.zeros(2), "fixed": jnp.zeros(3)})
    for passes in range(2):
        gradients = {"trained": jnp.full(2, 1.0 + hvd.rank()), "fixed": None}
        updates, state = jax.jit(tx.update)(gradients, state)
        assert updates["fixed"] is None
        np.testing.assert_allclose(updates["trained"], -2 * mean * passes)


@on_ranks(2)
def test_adasum_of_the_steps() -> None:
    step = hvd.DistributedOptimizer(optax.sgd(0.5), op=hvd.Adasum)
    same, _ = jax.jit(step.update)(jnp.ones(3), step.init(jnp.ones(3)))
    np.testing.assert_allclose(same, -0.5, rtol=1e-6)
    own = jnp.zeros(hvd.size()).at[hvd.rank()].set(1.0)
    orthogonal, _ = jax.jit(step.update)(own, step.init(own))
    np.testing.assert_allclose(orthogonal, -0.5, rtol=1e-6)


@on_ranks(2)
def test_values_stay_this_ranks_own() -> None:
    def with_aux(x: Any, factor: Any) -> Any:
        return (x * factor).sum(), factor

    factor = 1.0 + hvd.rank()
    mean = sum(range(1, hvd.size() + 1)) / hvd.size()
    (value, aux), gradients = jax.jit(hvd.value_and_grad(with_aux, has_aux=True))(jnp.ones(2), factor)
    assert (float(value), float(aux)) == (2 * factor, factor)
    np.testing.assert_allclose(gradients, mean)
    gradients, aux = hvd.grad(with_aux, has_aux=True)(jnp.ones(2), factor)
    np.testing.assert_allclose(gradients, mean)
    by_both = hvd.grad(lambda x, y: (x * y).sum(), argnums=(0, 1), op=hvd.Sum)(jnp.ones(2), jnp.full(2, factor))
    np.testing.assert_allclose(by_both[0], mean * hvd.size())
    np.testing.assert_allclose(by_both[1], hvd.size())


@pytest.mark.soak
@on_ranks(2)
def test_complex_parameters_and_gradients_of_integers() -> None:
    """Complex gradients are averaged in JAX's convention. A gradient of integers, of dtype float0, stays."""
    rank, w = hvd.rank(), jnp.array([1j, 2 + 1j])

    def loss(tree: Any, scale: Any = 1.5) -> Any:  # 1.5 is the mean of the ranks' scales
        return jnp.sum(jnp.abs(tree["w"] * jnp.array([1 + 2j, 3 - 1j])) ** 2) * scale

    tree = {"count": jnp.arange(3), "w": w}
    expected = jax.grad(loss, allow_int=True)(tree)
    for compiled in (lambda function: function, jax.jit):
        got = compiled(hvd.grad(loss, allow_int=True))(tree, rank + 1)
        alike(got["w"], expected["w"])
        assert got["count"].dtype == jax.dtypes.float0 and got["count"].shape == (3,)
        tx = hvd.DistributedOptimizer(optax.sgd(0.1), compression=hvd.Compression.bf16)
        alike(compiled(tx.update)({"w": w * rank}, tx.init({"w": w}))[0]["w"], -0.05 * w, 1e-2)
        assert compiled(hvd.allreduce)(jnp.complex64(rank * 2j)) == 1j
        alike(
            jax.grad(lambda z: jnp.abs(hvd.allreduce(z * (rank + 1))).sum())(w),
            jax.grad(lambda z: jnp.abs(1.5 * z).sum())(w) * (rank + 1) / 1.5,
        )


@on_ranks(2)
def test_process_sets() -> None:
    last = hvd.add_process_set([hvd.size() - 1])
    tx = hvd.DistributedOptimizer(optax.sgd(1.0), process_set=last)
    update, _ = jax.jit(tx.update)(jnp.full(2, float(hvd.rank())), tx.init(jnp.zeros(2)))
    np.testing.assert_allclose(update, -float(hvd.rank()))
    hvd.remove_process_set(last)


@on_ranks(2)
def test_buckets() -> None:
    """Layers that backward finishes first come first, in the order of their numbers."""
    tree = {f"layer_{number}": jnp.zeros(400_000) for number in range(12)}
    tx = hvd.DistributedOptimizer(optax.sgd(1.0), name="fused")
    text = jax.jit(tx.update).lower(tree, tx.init(tree)).as_text()
    order = [int(number) for number in re.findall(r"fused\['layer_(\d+)'\]", text)]
    assert order == list(reversed(range(12)))
    assert 2 < text.count("@horovodish_start") < 12
    with mock.patch.object(jax, "default_backend", return_value="gpu"):
        text = jax.jit(lambda *given: tx.update(*given)).lower(tree, tx.init(tree)).as_text()
    assert text.count("@horovodish_start") == 2, "the first bucket is small, and the next one has 32 MiB"


@on_ranks(2)
def test_the_guide() -> None:
    """Its code runs as it stands, and trains as one process does."""
    scope: dict[str, Any] = {"parameters": parameters(), "loss_of": loss_of}
    exec(python_blocks("docs/jax.md")[0], scope)
    values, state = scope["parameters"], scope["state"]
    for number in range(STEPS):
        values, state, loss = scope["step"](values, state, own_batch(number))
    alike(values, trained(optax.adamw(1e-3), whole_batch))
    assert hvd.allgather_object(float(loss)) == [float(loss)] * hvd.size()

    def search(updates: Any, state: Any, params: Any, *, value: Any, grad: Any, value_fn: Any) -> Any:
        return jax.tree.map(lambda *slopes: -value * sum(slopes), updates, grad, jax.grad(value_fn)(params)), state

    # What asks for a loss and its gradient as a line search does, and is compiled sooner.
    code = python_blocks("docs/jax.md")[1].replace("optax.lbfgs()", "searching")
    searching = optax.GradientTransformationExtraArgs(lambda params: (), search)
    searched = []
    for text, data in ((code, own_batch(0)), (code.replace("hvd.allreduce", ""), whole_batch(0))):
        scope = {"hvd": hvd, "jax": jax, "searching": searching}
        scope |= {"loss_of": loss_of, "parameters": parameters(), "batch": data}
        exec(text, scope)
        searched.append(scope["updates"])
    alike(*searched)


@on_ranks(2)
def test_what_is_wrong() -> None:
    for arguments, text in [
        ({"op": "mean"}, "op='mean' is not a reduce op"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, r"gradient_predivide_factor=2\.0 needs op=Average"),
        ({"gradient_predivide_factor": -1.0}, r"gradient_predivide_factor=-1\.0 is not positive"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step=0 must be a whole number"),
        ({"compression": "fp16"}, "compression='fp16' is not a compression"),
    ]:
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(optax.sgd(0.1), **arguments)
    with pytest.raises(TypeError, match=r"wraps an optax\.GradientTransformation, not function"):
        hvd.DistributedOptimizer(optax.sgd)
    with pytest.raises(TypeError, match=r"not MultiSteps; pass its gradient_transformation\(\)"):
        hvd.DistributedOptimizer(optax.MultiSteps(optax.sgd(0.1), 2))


def test_before_init() -> None:
    tx = hvd.DistributedOptimizer(optax.sgd(0.1), backward_passes_per_step=2)
    for function in (hvd.DistributedOptimizer(optax.sgd(0.1)).update, tx.update, hvd.grad(lambda x, state: x.sum())):
        for run in (function, jax.jit(function)):
            with pytest.raises(NotInitializedError):
                run(jnp.ones(2), tx.init(jnp.ones(2)))
    with pytest.raises(NotInitializedError):
        hvd.broadcast_parameters(jnp.ones(2))


def test_a_world_of_one() -> None:
    hvd.init()
    try:
        alike(trained(hvd.DistributedOptimizer(optax.adam(0.05))), trained(optax.adam(0.05)))
        tx = hvd.DistributedOptimizer(optax.sgd(0.1))
        assert "horovodish" not in jax.jit(tx.update).lower(jnp.ones(2), tx.init(jnp.ones(2))).as_text()
        np.testing.assert_array_equal(jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))(jnp.ones(2)), 1)
    finally:
        hvd.shutdown()


def train_with_autotune() -> tuple[list[str], list[str]]:
    return trained_with_autotune(lambda update: update)


def train_in_jit_with_autotune() -> tuple[list[str], list[str]]:
    return trained_with_autotune(jax.jit)


def trained_with_autotune(compiled: Callable[[Any], Any]) -> tuple[list[str], list[str]]:
    with autotune_warnings() as warned:
        hvd.init()
        optimizer = hvd.DistributedOptimizer(optax.sgd(0.1))
        weights = jnp.ones(3)
        state = optimizer.init(weights)
        update = compiled(optimizer.update)
        for _ in range(20):
            _, state = update(weights, state)
    return warned, []


def test_autotune_tries_settings(tmp_path: Path) -> None:
    run_with_autotune(train_with_autotune, tmp_path).check_search()


def test_autotune_warns_that_it_has_no_effect_in_jit(tmp_path: Path) -> None:
    run_with_autotune(train_in_jit_with_autotune, tmp_path).check_no_search()
