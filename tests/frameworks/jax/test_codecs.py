"""Codecs inside and outside of jit: every rank gets the same bits, and nothing is lost."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np
import optax
from jax import numpy as jnp

import horovodish.jax as hvd
from support.coded import ELEMENTS, Floats, encode_or_refuse, loses_nothing
from support.on_ranks import on_ranks


def everything(name: str, shape: tuple[int, ...]) -> bool:
    assert (name, shape) == ("layer/kernel", (ELEMENTS, 1))
    return True


@on_ranks((3, "mpi_ring"))
def test_an_optimizer_loses_nothing() -> None:
    parameters = {"layer": {"kernel": jnp.zeros((ELEMENTS, 1))}}
    for name in (None, "named"):
        for compiled in (False, True):
            codec = hvd.Compression.int8(where=everything)
            optimizer = hvd.DistributedOptimizer(optax.sgd(1.0), name=name and f"{name} {compiled}", compression=codec)
            update: Any = jax.jit(optimizer.update) if compiled else optimizer.update
            state = optimizer.init(parameters)

            def step(gradient: Floats, update: Any = update, state: Any = state) -> object:
                return -update({"layer": {"kernel": jnp.asarray(gradient)}}, state, parameters)[0]["layer"]["kernel"]

            loses_nothing(step)


@on_ranks((2, "mpi_ring"))
def test_a_compiled_program_has_auto() -> None:
    codec = hvd.Compression.auto(where=lambda name, shape: True)
    optimizer = hvd.DistributedOptimizer(optax.sgd(1.0), name="auto", compression=codec)
    ones = jnp.ones(ELEMENTS)
    for _ in range(3):
        given = ones * (1 + hvd.rank())
        update = jax.jit(optimizer.update)(given, optimizer.init(ones), ones)[0]
        np.testing.assert_allclose(-update, 1.5, rtol=0.01)
    chosen = [(one.codec, one.steps) for one in hvd.compression_report().tensors if one.owner.startswith("auto")]
    assert chosen in ([], [("int8", 3)])
    assert len({*map(str, hvd.allgather_object(chosen))}) == 1


@on_ranks((2, "mpi_ring"))
def test_two_optimizers_of_one_line_are_told_to_have_names() -> None:
    codec = hvd.Compression.int8(where=lambda name, shape: True)
    for names in ("actor", "critic"), (None, None):
        pair = [hvd.DistributedOptimizer(optax.sgd(1.0), name=name, compression=codec) for name in names]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for optimizer in pair:
                optimizer.update(jnp.ones(8), optimizer.init(jnp.ones(8)), jnp.ones(8))
        said = [str(each.message) for each in caught if "two calls on one line use a codec" in str(each.message)]
        assert [each.partition(".py:")[0] for each in said] == ([] if names[0] else ["optimizer.test_codecs"]), said


@on_ranks((2, "mpi_ring"))
def test_allreduce() -> None:
    own = np.random.default_rng(hvd.rank()).standard_normal((300, 3), np.float32)
    exact = np.mean([np.random.default_rng(rank).standard_normal((300, 3), np.float32) for rank in range(2)], 0)

    def reduced(tree: Any) -> Any:
        return hvd.allreduce(tree, compression=hvd.Compression.int8)

    for result in (
        reduced([own, 1])[0],
        jax.jit(reduced)([own, 1])[0],
        hvd.grouped_allreduce([own], compression=hvd.Compression.int8)[0],
    ):
        assert 1e-4 < np.abs(result - exact).max() < 0.1
    gradient = jax.grad(lambda its: jnp.vdot(reduced(its), own))(jnp.zeros_like(own))
    assert 1e-4 < np.abs(gradient - exact).max() < 0.1
    # In the second turn the programs come from the persistent cache.
    for _ in range(2):
        exactly = jax.jit(hvd.allreduce)(own)
        np.testing.assert_allclose(exactly, exact, rtol=1e-6)
        assert np.abs(jax.jit(reduced)([own, 1])[0] - exactly).max() > 1e-4
        jax.clear_caches()


@on_ranks((2, "mpi_ring"))
def test_every_function_that_takes_a_compression() -> None:
    array = jnp.ones((300, 300))

    def step(**options: Any) -> None:
        optimizer = hvd.DistributedOptimizer(optax.sgd(1.0), **options)
        jax.block_until_ready(optimizer.update(array, optimizer.init(array), array))

    encode_or_refuse(
        hvd,
        {
            "allreduce": lambda its: hvd.allreduce(array, compression=its),
            "grouped_allreduce": lambda its: hvd.grouped_allreduce([array], compression=its),
            "DistributedOptimizer": lambda its: step(compression=its),
            "DiLoCo": lambda its: step(sync=hvd.DiLoCo(1, compression=its)),
            "Sync": lambda its: step(sync=hvd.Sync(1, compression=its)),
            "grad": lambda its: hvd.grad(jnp.sum, compression=its)(array),
            "value_and_grad": lambda its: hvd.value_and_grad(jnp.sum, compression=its)(array),
        },
        {"reducescatter": lambda its: hvd.reducescatter(array, compression=its)},
    )
