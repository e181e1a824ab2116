"""The state of sharded optimizers: what each rank keeps, and how it is saved and loaded."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp

import horovodish.jax as hvd
from support.jax_sharded import (
    OPTIMIZERS,
    WHOLE,
    same,
    trained,
    whole_parameters,
)
from support.on_ranks import on_ranks
from support.ranks import run_ranks


@on_ranks(2)
def test_a_whole_parameter_has_state_on_one_rank() -> None:
    tree = {"large": jnp.zeros((50, 20)), "small": [jnp.zeros(20) for _ in range(10)]}
    state = hvd.DistributedOptimizer(optax.lamb(1e-3), shard="states", shard_by="parameter").init(tree)
    elements = sum(leaf.size for leaf in jax.tree.leaves(state.inner))
    assert elements == (1 + 2 * 1000 if hvd.rank() == 0 else 1 + 2 * 200)


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
