"""Optimizers whose state the ranks share: they step as without shards, and refuse what would not."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp

import horovodish.jax as hvd
from horovodish.errors import MismatchError, UnsupportedTensorError
from horovodish.jax.shards.state import ShardedState
from support.on_ranks import on_ranks
from support.ranks import run_ranks

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
def test_a_whole_parameter_has_state_on_one_rank() -> None:
    tree = {"large": jnp.zeros((50, 20)), "small": [jnp.zeros(20) for _ in range(10)]}
    state = hvd.DistributedOptimizer(optax.lamb(1e-3), shard="states", shard_by="parameter").init(tree)
    elements = sum(leaf.size for leaf in jax.tree.leaves(state.inner))
    assert elements == (1 + 2 * 1000 if hvd.rank() == 0 else 1 + 2 * 200)


@on_ranks(2)
def test_optimizers_that_look_at_several_parameters_are_refused() -> None:
    values = {"bias": jnp.ones(64), "kernel": jnp.ones((8, 16))}
    for make, text in {
        lambda: optax.chain(
            optax.clip_by_global_norm(1.0), optax.lamb(1.0)
        ): r"of \['bias'\] follows from \['kernel'\]",
        lambda: optax.contrib.prodigy(): "what becomes of .* follows from",
        lambda: optax.flatten(optax.adam(1.0)): "depends on which parameters there are",
        lambda: optax.add_noise(0.1, 0.5, key=1): "it draws noise",
        lambda: optax.apply_if_finite(optax.sgd(1.0), 3): "follows from",
    }.items():
        tx = hvd.DistributedOptimizer(make(), shard="states", shard_by="parameter")
        with pytest.raises(ValueError, match=rf'shard_by="parameter" cannot be used .*{text}.*Remedy'):
            tx.update(values, tx.init(values), values)
    tx = hvd.DistributedOptimizer(optax.lars(1.0), shard="states", shard_by="parameter")
    with pytest.raises(ValueError, match=r"there are 1 with elements for 2 ranks. Remedy: leave shard= out"):
        tx.init([jnp.ones(3), jnp.ones(0)])
    state = tx.init(values)
    with pytest.raises(NotImplementedError, match=r'shard_by="parameter" has no derivative.*Remedy'):
        jax.grad(lambda gradients: tx.update(gradients, state, values)[0]["bias"].sum())(values)
    with pytest.raises(NotImplementedError, match=r'vmap of an optimizer with shard_by="parameter".*Remedy'):
        jax.vmap(lambda scale: tx.update(jax.tree.map(lambda leaf: leaf * scale, values), state, values)[0])(
            jnp.ones(2)
        )


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


@on_ranks(3)
def test_state_is_shared_out_also_of_one_large_tensor() -> None:
    tree = {"large": jnp.zeros((500, 200)), "small": [jnp.zeros(20) for _ in range(20)]}
    tx = optax.adam(1e-3)
    own, everything = hvd.DistributedOptimizer(tx, shard="states").init(tree), tx.init(tree)
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(state)) for state in (own, everything)]
    assert sizes[0] <= sizes[1] * (1 / hvd.size() + 0.005)


def resident_bytes(what: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) << 10


@on_ranks(2)
def test_full_state_takes_memory_on_the_root_alone() -> None:
    count = 4_000_000
    state = hvd.DistributedOptimizer(optax.adam(1e-3), shard="states").init([jnp.zeros(count), jnp.zeros(count)])
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident_bytes("VmRSS")
    full = hvd.full_state(state)
    more = resident_bytes("VmHWM") - before
    assert more > 12 * count if full is not None else more < count


def saved_tx(way: str, **options: Any) -> optax.GradientTransformationExtraArgs:
    tx = OPTIMIZERS["adamw"]() if way == "element" else WHOLE["adafactor"][0]()
    return hvd.DistributedOptimizer(tx, **options)


def save(path: Path, way: str) -> None:
    tx = saved_tx(way, shard="states", shard_by=way)
    values, state = trained(tx, begin=(whole_parameters(), tx.init(whole_parameters())))
    whole = hvd.full_state((values, state, 3))
    if hvd.rank() == 0:
        with path.open("wb") as file:
            pickle.dump(jax.device_get(whole), file)


def go_on(path: Path, way: str) -> None:
    values, full, steps = pickle.loads(path.read_bytes())
    assert steps == 3
    values, as_arrays = jax.tree.map(jnp.asarray, (values, full))  # NumPy's rounds otherwise
    expected, _ = trained(saved_tx(way), begin=(values, as_arrays), salt=1)
    tx = saved_tx(way, shard="states", shard_by=way)
    loaded = hvd.load_full_state((values, tx.init(values), 0), (values, full, steps))
    assert loaded[2] == 3
    same(trained(tx, begin=loaded[:2], salt=1)[0], expected)


@pytest.mark.soak
def test_four_ranks_save_and_fewer_go_on(tmp_path: Path) -> None:
    for way, fewer in {"element": (3, 2, 1), "parameter": (3, 1)}.items():
        args = tmp_path / way, way
        run_ranks(save, 4, args=args, begin=True)
        for ranks in fewer:
            run_ranks(go_on, ranks, args=args, begin=True)


@on_ranks(2)
def test_orbax_takes_the_full_state_and_no_part(tmp_path: Path) -> None:
    orbax = pytest.importorskip("orbax.checkpoint")
    plain, values = optax.adam(1e-3), {"kernel": jnp.arange(8.0).reshape(2, 4)}
    tx = hvd.DistributedOptimizer(plain, shard="states")
    _, state = tx.update(values, tx.init(values), values)
    full = hvd.full_state(state)
    path = hvd.broadcast_object(tmp_path, 0)
    checkpointer = orbax.StandardCheckpointer()
    if hvd.rank() == 0:
        checkpointer.save(path / "full", full)
        checkpointer.save(path / "part", state)
        checkpointer.wait_until_finished()
    hvd.barrier()
    restored = checkpointer.restore(path / "full", jax.eval_shape(plain.init, values))
    same(hvd.load_full_state(tx.init(values), restored), state)
    if hvd.rank() == 1:
        with pytest.raises(ValueError, match="shape"):
            checkpointer.restore(path / "part", state)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "clip": (lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), "reduce_sum does not compute each"),
    "lamb": (lambda: optax.lamb(1e-3), "does not compute each element of"),
    "lars": (lambda: optax.lars(1e-3), "does not compute each element of"),
    "adafactor": (lambda: optax.adafactor(1e-3), "does not compute each element of"),
    "muon": (lambda: optax.contrib.muon(1e-3), "depends on the shape of a parameter"),
    "sm3": (lambda: optax.sm3(1e-3), "its state depends on the shape of a parameter"),
    "lbfgs": (lambda: optax.scale_by_lbfgs(), "has no number for each element of one parameter"),
    "noise": (lambda: optax.add_noise(0.1, 0.5, key=1), "a number of its own, such as noise"),
    "finite": (lambda: optax.apply_if_finite(optax.sgd(1.0), 3), "reduce_and does not compute each element"),
    "large": (
        lambda: optax.masked(optax.sgd(1.0, 0.9), lambda tree: jax.tree.map(lambda leaf: leaf.size > 60, tree)),
        "depends on the shape of a parameter",
    ),
    "others": (
        lambda: optax.stateless(lambda updates, _: jax.tree.map(lambda leaf: leaf + updates["scale"], updates)),
        r"add combines \['bias'\] with \['scale'\]",
    ),
    "counting": (
        lambda: optax.stateless(lambda u, _: jax.tree.map(lambda leaf: leaf / jnp.ones_like(leaf).sum(), u)),
        "depends on the shape of a parameter",
    ),
    "positions": (
        lambda: optax.stateless(
            lambda u, _: jax.tree.map(lambda leaf: leaf * jnp.arange(leaf.size).reshape(leaf.shape), u)
        ),
        "a number of its own",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_do_not_work_by_element_are_refused(name: str) -> None:
    make, text = REFUSED[name]
    values = {"bias": jnp.ones(64), "scale": jnp.float32(1.0)}
    if name == "others":
        values["scale"] = jnp.ones(64)
    else:
        values["kernel"] = jnp.ones((8, 16))
    tx = hvd.DistributedOptimizer(make(), shard="states")
    with pytest.raises(
        ValueError, match=f'shard= cannot be used with this optimizer: .*{text}.*Remedy.*pass shard_by="parameter"'
    ):
        tx.update(values, tx.init(values), values)


def normed() -> optax.GradientTransformationExtraArgs:
    def update(updates: Any, state: Any, params: Any = None, normed: bool = False, **_: Any) -> tuple[Any, Any]:
        return jax.tree.map(lambda leaf: leaf / jnp.linalg.norm(leaf), updates) if normed else updates, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


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
def test_each_way_of_an_update_is_checked() -> None:
    """Also one that an argument switches on later."""
    tx = hvd.DistributedOptimizer(normed(), shard="states")
    values = {"kernel": jnp.ones((2, 3))}
    state = tx.init(values)
    for _ in range(2):
        _, state = tx.update(values, state, values, normed=False, value=1.5)
    with pytest.raises(ValueError, match="reduce_sum does not compute each element"):
        tx.update(values, state, values, normed=True, value=1.5)


@on_ranks(2)
def test_a_part_is_nobody_elses() -> None:
    tx = hvd.DistributedOptimizer(optax.adam(1e-3), shard="states")
    values = {"kernel": jnp.ones((2, 4))}
    state = tx.init(values)
    for action in (lambda: pickle.dumps(jax.device_get(state)), lambda: copy.deepcopy(state)):
        with pytest.raises(ValueError, match=rf"part of rank {hvd.rank()} of 2. Remedy: pickle what hvd.full_state"):
            action()
    with pytest.raises(ValueError, match=r"each rank has a part of its own .* call hvd.load_full_state"):
        hvd.broadcast_optimizer_state(state, root_rank=0)
    with pytest.raises(ValueError, match=r"the state of a plain one\. Remedy: state = hvd.load_full_state"):
        tx.update(values, optax.adam(1e-3).init(values), values)
    # As files do that have arrays only: the shapes are the same but for those that say whose part it is.
    of_the_first = hvd.broadcast_object([np.asarray(leaf) for leaf in jax.tree.leaves(state)], 0)
    taken = jax.tree.unflatten(jax.tree.structure(state), map(jnp.asarray, of_the_first))
    if hvd.rank() == 1:
        with pytest.raises(ValueError, match=r"got the part of rank 0 of 2 .* but this is rank 1 of 2\. Remedy: save"):
            jax.jit(tx.update)(values, taken, values)


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


@on_ranks(2)
def test_a_rank_that_joins_is_an_error() -> None:
    tx = hvd.DistributedOptimizer(optax.sgd(1.0), shard="states")
    values = jnp.ones(5)
    tx.update(values, tx.init(values))
    if hvd.rank() == 0:
        with pytest.raises(MismatchError, match=r"join\(\), and its part of the parameters"):
            tx.update(values, tx.init(values))
        with pytest.raises((ValueError, RuntimeError), match="the ranks gave 12 bytes, but the program was compiled"):
            jax.block_until_ready(jax.jit(tx.update)(values, tx.init(values)))
    hvd.join()


@on_ranks(2)
def test_what_is_refused() -> None:
    adam = optax.adam(1e-3)
    with pytest.raises(ValueError, match="op=Adasum reduces steps of whole parameters"):
        hvd.DistributedOptimizer(adam, op=hvd.Adasum, shard="states")
    with pytest.raises(ValueError, match=r"shard='all' is not known"):
        hvd.DistributedOptimizer(adam, shard="all")
    tx = hvd.DistributedOptimizer(adam, shard="states")
    with pytest.raises(
        UnsupportedTensorError, match=r"parameter \['count'\]: .* not int32. Remedy: give the optimizer"
    ):
        tx.init({"count": jnp.arange(3), "kernel": jnp.ones(3)})
    values = {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}
    state = tx.init(values)
    with pytest.raises(ValueError, match=r"gradients of the shapes \[\(2, 3\)\], but init\(\) got"):
        tx.update({"kernel": values["kernel"], "bias": None}, state, values)
    with pytest.raises(ValueError, match="full_state works outside of jit only"):
        jax.jit(hvd.full_state)(state)
    load = hvd.load_full_state
    with pytest.raises(ValueError, match=r"the state has float32\[4, 3\] where the optimizer has float32\[2, 3\]"):
        load(state, adam.init({**values, "kernel": jnp.ones((4, 3))}))
    with pytest.raises(ValueError, match=r"load_full_state: the state is PyTreeDef.*pass the shapes of jax.eval_shape"):
        load(state, optax.sgd(1.0, 0.9).init(values))
    with pytest.raises(ValueError, match="load_full_state: each rank has a part of its own"):
        load(state, state)
    assert hvd.full_state(values) is values
