"""A world of two frameworks: a rank of JAX and a rank of PyTorch reduce one tensor."""

from __future__ import annotations

import numpy as np
import pytest

from support.ranks import run_ranks


def of_jax(rank: int) -> list[np.ndarray]:
    import jax
    from jax import numpy as jnp

    import horovodish.jax as hvd

    assert hvd.rank() == rank
    inside = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum, name="inside"))(jnp.full((2, 3), 1.0))
    outside = hvd.allreduce(jnp.full(2, 0.5, jnp.bfloat16), op=hvd.Sum, name="outside")
    group = jax.jit(lambda x: hvd.grouped_allreduce(x, name="group"))([jnp.zeros(2), jnp.arange(3)])
    rows = hvd.allgather(jnp.full((1, 2), 7.0), name="rows")
    with pytest.raises(
        (jax.errors.JaxRuntimeError, ValueError), match=r"'shape'.* rank 0 has \(2,\), rank 1 has \(3,\)"
    ):
        jax.jit(lambda x: hvd.allreduce(x, name="shape"))(jnp.zeros(2)).block_until_ready()
    return [np.asarray(array, np.float64) for array in (inside, outside, *group, rows)]


def of_torch(rank: int) -> list[np.ndarray]:
    import torch

    import horovodish.torch as hvd

    assert hvd.rank() == rank
    # In another order: names decide what belongs together.
    outside = hvd.allreduce_async(torch.full((2,), 1.5, dtype=torch.bfloat16), op=hvd.Sum, name="outside")
    inside = hvd.allreduce(torch.full((2, 3), 2.0), op=hvd.Sum, name="inside")
    group = hvd.grouped_allreduce([torch.full((2,), 2.0), torch.arange(3, dtype=torch.int32)], name="group")
    rows = hvd.allgather(torch.full((2, 2), 8.0), name="rows")
    with pytest.raises(hvd.MismatchError, match=r"'shape'.* rank 0 has \(2,\), rank 1 has \(3,\)"):
        hvd.allreduce(torch.zeros(3), name="shape")
    return [array.double().numpy() for array in (inside, hvd.synchronize(outside), *group, rows)]


def work() -> list[np.ndarray]:
    import horovodish

    horovodish.init()
    rank = horovodish.rank()
    return (of_torch if rank else of_jax)(rank)


@pytest.mark.soak
def test_one_tensor_of_two_frameworks() -> None:
    jax_rank, torch_rank = run_ranks(work, 2, fresh=True)
    for one, other in zip(jax_rank, torch_rank, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(jax_rank[0], np.full((2, 3), 3.0))
    np.testing.assert_array_equal(jax_rank[1], [2.0, 2.0])
    np.testing.assert_array_equal(jax_rank[4], [[7, 7], [8, 8], [8, 8]])
