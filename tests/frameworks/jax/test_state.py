"""horovodish.jax: the same start on every rank, for trees of optax, Flax and Equinox; and objects."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp

import horovodish.jax as hvd
from horovodish.errors import UnsupportedTensorError
from support.expect import mismatch, one_rank_is_wrong
from support.on_ranks import on_ranks

ROOT = 1


@on_ranks(2)
def test_leaves_of_all_kinds() -> None:
    rank = hvd.rank()
    tree = {
        "bfloat16": jnp.full(2, rank, jnp.bfloat16),
        "bytes": str(rank).encode(),
        "empty": jnp.zeros((0, 3)),
        "float": rank + 0.5,
        "float64 of NumPy": np.full(2, rank + 0.1),
        "function": print,
        "int": rank,
        "key": jax.random.key(rank),
        "none": None,
        "old key": jax.random.PRNGKey(rank),
        "scalar": jnp.float32(rank),
        "switch": rank == ROOT,
        "text": f"of rank {rank}",
        "weak": jnp.full(2, 1.5) if rank == ROOT else jnp.float32([0, 0]),
    }
    got = hvd.broadcast_parameters(tree, ROOT)
    assert jax.tree.structure(got) == jax.tree.structure(tree)
    sent = [got[name] for name in ("bytes", "float", "int", "switch", "text")]
    assert sent == [b"1", ROOT + 0.5, ROOT, True, "of rank 1"]
    assert got["function"] is print
    np.testing.assert_array_equal(got["bfloat16"].astype(float), ROOT)
    assert got["float64 of NumPy"].dtype == np.float64 and got["float64 of NumPy"][1] == ROOT + 0.1
    np.testing.assert_array_equal(got["old key"], jax.random.PRNGKey(ROOT))
    assert jax.random.bits(got["key"]) == jax.random.bits(jax.random.key(ROOT))
    assert got["weak"].weak_type and got["weak"][1] == 1.5 and not got["scalar"].weak_type
    assert isinstance(hvd.broadcast_parameters(np.float32(rank), ROOT), np.float32)
    assert (tree["int"], float(tree["scalar"]), float(got["scalar"])) == (rank, rank, ROOT)
    assert hvd.broadcast_parameters({}) == {}


@jax.tree_util.register_dataclass
@dataclass
class Module:
    weight: Any
    rate: float = field(default=1.0, metadata={"static": True})
    activation: Any = field(default=jax.nn.gelu, metadata={"static": True})


@on_ranks(2)
def test_what_is_not_sent() -> None:
    """Functions and static fields stay. A rank where they differ from the root's warns, and only there."""
    rank, weight = hvd.rank(), jnp.full(2, hvd.rank())
    numbers, changed = np.arange(5000.0), np.arange(5000.0)
    changed[2500] += 1e-12 * 2500
    others = [
        (Module(weight, activation=numbers), Module(weight, activation=changed)),
        (Module(weight), Module(weight, rate=0.5)),
        (Module(weight), Module(weight, activation=jax.nn.relu)),
        ([weight], (weight,)),
        ([len], [print]),
    ]
    for roots, other in others:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hvd.broadcast_parameters((Module(weight), lambda x: x, {"a", "set", "of", "strings"}), ROOT)
            got = hvd.broadcast_parameters(roots if rank == ROOT else other, ROOT)
        assert type(got) is type(roots if rank == ROOT else other)
        texts = [str(warning.message) for warning in caught]
        assert len(texts) == (rank != ROOT) and all(f"between rank {rank} and rank {ROOT}: " in text for text in texts)


@on_ranks(2)
def test_what_cannot_be_sent() -> None:
    donated = jnp.ones(2)
    donated.delete()
    one_rank_is_wrong(
        ValueError,
        "['w'] was donated to a program",
        lambda: hvd.broadcast_parameters({"w": jnp.ones(2)}),
        lambda: hvd.broadcast_parameters({"w": donated}),
    )
    with pytest.raises(UnsupportedTensorError, match="the array is an array of Python objects"):
        hvd.broadcast_parameters(np.array([None]))


@on_ranks(2)
def test_states_of_optimizers() -> None:
    tx = hvd.DistributedOptimizer(optax.inject_hyperparams(optax.adam)(learning_rate=0.1 * (hvd.rank() + 1)))
    state = tx.init({"w": jnp.ones(3)})
    if hvd.rank() == ROOT:
        _, state = optax.inject_hyperparams(optax.adam)(learning_rate=0.2).update({"w": jnp.arange(3.0)}, state)
    got = hvd.broadcast_optimizer_state(state, ROOT)
    assert float(got.hyperparams["learning_rate"]) == np.float32(0.2)
    assert int(got.inner_state[0].count) == 1
    np.testing.assert_allclose(got.inner_state[0].mu["w"], 0.1 * np.arange(3), rtol=1e-6)


@on_ranks(2)
def test_process_sets() -> None:
    """Rank 1 is a set by itself: rank 0 need not call, and is no root."""
    alone = hvd.add_process_set([ROOT])
    tree = {"array": jnp.full(2, hvd.rank()), "number": hvd.rank()}
    for broadcast in (hvd.broadcast_parameters, hvd.broadcast_optimizer_state):
        if alone.included():
            got = broadcast(tree, ROOT, process_set=alone)
            assert (got["array"].tolist(), got["number"]) == ([ROOT, ROOT], ROOT)
            with pytest.raises(ValueError, match="root_rank=0 is not in the process set"):
                broadcast(tree, 0, process_set=alone)
        else:
            with pytest.raises(ValueError, match="process set"):
                broadcast(tree, ROOT, process_set=alone)
    hvd.barrier()
    hvd.remove_process_set(alone)


@on_ranks(2)
def test_linen() -> None:
    nn = pytest.importorskip("flax.linen")
    from flax.training import train_state

    model = nn.Dense(3)
    variables = model.init(jax.random.key(hvd.rank()), jnp.ones((1, 2)))
    same_everywhere(hvd.broadcast_parameters(variables, ROOT), model.init(jax.random.key(ROOT), jnp.ones((1, 2))))
    tx = hvd.DistributedOptimizer(optax.adam(0.1))
    gradients = jax.tree.map(lambda leaf: jnp.full_like(leaf, hvd.rank()), variables)
    updates, _ = jax.jit(tx.update)(gradients, tx.init(variables))
    assert jax.tree.structure(updates) == jax.tree.structure(variables)
    state = train_state.TrainState.create(apply_fn=model.apply, params=variables, tx=tx)
    state = hvd.broadcast_parameters(state.replace(step=hvd.rank()), ROOT)
    assert state.step == ROOT
    state = jax.jit(lambda state: state.apply_gradients(grads=gradients))(state)
    assert (int(state.step), hvd.allgather_object(float(state.params["params"]["bias"][0]))) == (
        ROOT + 1,
        [float(state.params["params"]["bias"][0])] * hvd.size(),
    )


@on_ranks(2)
def test_nnx() -> None:
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(hvd.rank()))
    nnx.update(model, hvd.broadcast_parameters(nnx.state(model), ROOT))
    np.testing.assert_array_equal(model.kernel[...], nnx.Linear(2, 3, rngs=nnx.Rngs(ROOT)).kernel[...])
    optimizer = nnx.Optimizer(model, hvd.DistributedOptimizer(optax.sgd(1.0)), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, weight: Any) -> None:
        optimizer.update(model, nnx.grad(lambda model: (model(jnp.ones((1, 2))) * weight).sum())(model))

    before = model.kernel[...]
    step(model, optimizer, 1.0 + hvd.rank())
    mean = sum(range(1, hvd.size() + 1)) / hvd.size()
    np.testing.assert_allclose(model.kernel[...], before - mean, rtol=1e-5)


@on_ranks(2)
def test_equinox() -> None:
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(hvd.rank()))
    got = hvd.broadcast_parameters(model, ROOT)
    expected = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(ROOT))
    same_everywhere(eqx.filter(got, eqx.is_array), eqx.filter(expected, eqx.is_array))
    assert got.activation is model.activation
    tx = hvd.DistributedOptimizer(optax.sgd(1.0))
    gradients = eqx.filter_grad(lambda model: model(jnp.ones(2)).sum() * (1 + hvd.rank()))(got)
    updates, _ = eqx.filter_jit(tx.update)(gradients, tx.init(eqx.filter(got, eqx.is_array)))
    own = eqx.filter_grad(lambda model: model(jnp.ones(2)).sum())(got)
    mean = sum(range(1, hvd.size() + 1)) / hvd.size()
    np.testing.assert_allclose(updates.layers[0].weight, -mean * own.layers[0].weight, rtol=1e-5)


def same_everywhere(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


@on_ranks(2)
def test_a_rank_may_have_arrays_of_numpy_where_others_have_those_of_jax() -> None:
    tree = {"w": jnp.full(3, hvd.rank() + 1.0), "n": jnp.int32(hvd.rank() + 1)}
    tree = jax.device_get(tree) if hvd.rank() == 0 else tree  # as one that has loaded a file
    sent = hvd.broadcast_parameters(tree, root_rank=0)
    assert [type(sent["w"]), type(sent["n"])] == [type(tree["w"]), type(tree["n"])]
    assert (sent["w"].tolist(), int(sent["n"])) == ([1.0] * 3, 1)


@on_ranks(2)
def test_what_is_wrong() -> None:
    rank = hvd.rank()
    with mismatch(
        "broadcast_parameters: the trees differ: ['w'] is of float32[2] on rank 0 and of float32[3] on rank 1"
    ):
        hvd.broadcast_parameters({"w": jnp.zeros(2 + rank)})
    with mismatch("the trees differ: only rank 1 has ['x'] of float32[1]"):
        hvd.broadcast_parameters({"w": jnp.zeros(2), **({"x": jnp.zeros(1)} if rank else {})})
    with pytest.raises(ValueError, match="root_rank=7 does not exist"):
        hvd.broadcast_parameters({"w": jnp.zeros(2)}, 7)
    with pytest.raises(ValueError, match="broadcast_parameters works outside of jit only"):
        jax.jit(hvd.broadcast_parameters)({"w": jnp.zeros(2)})
    one_rank_is_wrong(
        ValueError,
        "root_rank=7 does not exist",
        lambda: hvd.broadcast_optimizer_state({"w": jnp.zeros(2)}, 0),
        lambda: hvd.broadcast_optimizer_state({"w": jnp.zeros(2)}, 7),
    )


@on_ranks(2)
def test_objects() -> None:
    assert hvd.broadcast_object({"epoch": hvd.rank()}, ROOT) == {"epoch": ROOT}
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
