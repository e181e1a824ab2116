"""horovodish.jax: every operation on every dtype, inside and outside of jit, and what is wrong in one sentence."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import ml_dtypes
import numpy as np
import optax
import pytest
from jax import lax
from jax import numpy as jnp
from jax.experimental import sparse

import horovodish.jax as hvd
from horovodish.errors import NotInitializedError
from support.expect import mismatch
from support.on_ranks import on_ranks

# The class depends on whether the program fails while JAX dispatches it.
FAILED = (jax.errors.JaxRuntimeError, ValueError)

DTYPES = ["uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


def both(function: Any) -> list[Any]:
    """The function outside and inside of jit."""
    return [function, jax.jit(function)]


@contextmanager
def x64() -> Iterator[None]:
    """JAX keeps int64, uint64 and float64 as they are."""
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)


def ours(rank: int, dtype: str, shape: tuple[int, ...] = (4, 3)) -> np.ndarray:
    """Small whole numbers, which every dtype holds, different on every rank."""
    values = (np.arange(np.prod(shape)) * 2 + 3 * rank) % 7
    return values.reshape(shape).astype(getattr(ml_dtypes, dtype, dtype))


def equal(got: Any, expected: Any) -> None:
    assert isinstance(got, jax.Array)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(np.asarray(got), expected)


@on_ranks(2)
def test_what_is_only_moved() -> None:
    with x64():
        for dtype in ("bool", "uint16", "uint32", "uint64"):
            all_ranks = [ours(other, dtype) for other in range(hvd.size())]
            own = jnp.asarray(all_ranks[hvd.rank()])
            for run in both(lambda x: hvd.allgather(x)):
                equal(run(own), np.concatenate(all_ranks))
            for run in both(lambda x: hvd.broadcast(x, root_rank=1)):
                equal(run(own), all_ranks[1])


@on_ranks(2)
def test_the_operations() -> None:
    with x64():
        rank, size = hvd.rank(), hvd.size()
        for dtype in DTYPES:
            all_ranks = [ours(other, dtype) for other in range(size)]
            own = jnp.asarray(all_ranks[rank])
            total = sum(array.astype(np.float64) for array in all_ranks).astype(own.dtype)
            rows = np.array_split(total, size)[rank]
            largest = np.max([array.astype(np.float64) for array in all_ranks], 0).astype(own.dtype)
            whole = np.concatenate(all_ranks)
            parts = np.concatenate([np.array_split(array, 2)[rank] for array in all_ranks[:2]]) if size == 2 else None
            for run in both(lambda x: hvd.allreduce(x, op=hvd.Sum)):
                equal(run(own), total)
            for run in both(lambda x: hvd.allreduce(x, op=hvd.Max, name="largest")):
                equal(run(own), largest)
            for run in both(lambda x: hvd.allgather(x)):
                equal(run(own), whole)
            for run in both(lambda x: hvd.broadcast(x, root_rank=1)):
                equal(run(own), all_ranks[1])
            for run in both(lambda x: hvd.reducescatter(x, op=hvd.Sum)):
                equal(run(own), rows)
            for run in both(lambda x: hvd.alltoall(x)) if parts is not None else []:
                equal(run(own), parts)
        for run in both(lambda x: hvd.allgather(x)):
            equal(run(jnp.array([rank == 0])), np.arange(size) == 0)
            equal(run(jnp.float32(rank)), np.arange(size, dtype=np.float32))


@on_ranks(2)
def test_the_scales() -> None:
    for run in both(lambda x: hvd.allreduce(x, op=hvd.Average, prescale_factor=4, postscale_factor=0.5)):
        equal(
            run(jnp.full(3, hvd.rank() + 1.0)), np.full(3, sum(range(1, hvd.size() + 1)) / hvd.size() * 2, np.float32)
        )
    for run in both(lambda x: hvd.allreduce(x, average=False, compression=hvd.Compression.bf16)):
        equal(run(jnp.full(3, 1.5)), np.full(3, 1.5 * hvd.size(), np.float32))
    denormal = 2.0**-20  # in float16; XLA's own threads would take it for zero
    for run in both(lambda x: hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16)):
        equal(run(jnp.full(5000, denormal)), np.full(5000, denormal * hvd.size(), np.float32))


@on_ranks(2)
def test_trees() -> None:
    tree = {"a": [jnp.full((2, 2), hvd.rank() + 0.0), jnp.arange(3)], "b": {"c": jnp.ones((), jnp.bfloat16)}, "d": None}
    for run in both(lambda tree: hvd.allreduce(tree, op=hvd.Sum)):
        total = run(tree)
        assert jax.tree.structure(total) == jax.tree.structure(tree)
        equal(total["a"][0], np.full((2, 2), sum(range(hvd.size())), np.float32))
        equal(total["a"][1], np.arange(3, dtype=np.int32) * hvd.size())
        equal(total["b"]["c"], np.array(hvd.size(), ml_dtypes.bfloat16))
    for run in both(lambda tree: hvd.broadcast(tree, 1)):
        equal(run(tree)["a"][0], np.ones((2, 2), np.float32))
        equal(run(tree)["b"]["c"], np.ones((), ml_dtypes.bfloat16))
    for run in both(lambda tree: hvd.allgather(tree)):
        equal(run(tree)["a"][0], np.repeat(np.arange(hvd.size(), dtype=np.float32), 4).reshape(-1, 2))
        equal(run(tree)["a"][1], np.tile(np.arange(3, dtype=np.int32), hvd.size()))
    for run in both(lambda tree: hvd.reducescatter(tree, op=hvd.Sum)):
        first, second = run([jnp.ones((hvd.size(), 2)), jnp.ones(2 * hvd.size())])
        equal(first, np.full((1, 2), hvd.size(), np.float32))
        equal(second, np.full(2, hvd.size(), np.float32))
    for run in both(lambda tree: hvd.barrier(tree)):
        equal(run(tree)["a"][0], np.asarray(tree["a"][0]))
    for run in both(lambda x: hvd.grouped_allreduce(x, op=hvd.Sum)):
        first, second = run([jnp.ones(2), jnp.ones(3, jnp.int32)])
        equal(first, np.full(2, hvd.size(), np.float32))
        equal(second, np.full(3, hvd.size(), np.int32))
    # On one rank alone it would be too large to share a bucket.
    first, second = hvd.allgather([jnp.ones(1 + 1_500_000 * hvd.rank()), jnp.ones(1)])
    equal(first, np.ones(sum(1 + 1_500_000 * rank for rank in range(hvd.size())), np.float32))
    equal(second, np.ones(hvd.size(), np.float32))
    for function in (hvd.allreduce, hvd.allgather, lambda tree: hvd.broadcast(tree, 0), hvd.grad(lambda tree: 1.0)):
        for run in both(function):
            assert run({"nothing": []}) == {"nothing": []}
    assert hvd.barrier({}) == {}
    for count in (0, 1):
        for run in both(lambda x: hvd.allreduce(x, op=hvd.Sum)):
            equal(run(jnp.ones((count, 2))), np.full((count, 2), hvd.size(), np.float32))


@on_ranks(2)
def test_rows_that_differ() -> None:
    rank, size = hvd.rank(), hvd.size()
    equal(hvd.allgather(jnp.full(rank, rank)), np.repeat(np.arange(size), np.arange(size)).astype(np.int32))
    rows, counts = hvd.alltoall(jnp.full(size, rank), splits=[size] + [0] * (size - 1))
    equal(counts, np.full(size, size if rank == 0 else 0, np.int32))
    equal(rows, np.repeat(np.arange(size), size if rank == 0 else 0).astype(np.int32))
    gather = jax.jit(lambda x: hvd.allgather(x, name="uneven"))
    with pytest.raises(FAILED, match=r"'uneven': the ranks gave 12 bytes.*outside of the compiled program"):
        gather(jnp.zeros(rank + 1)).block_until_ready()
    gather = jax.jit(lambda x: hvd.allgather({"a": x[:1], "b": x}, name="leaf"))
    with pytest.raises(FAILED, match=r"'leaf.bucket0', tensor 'leaf\['b'\]': the ranks gave 12 bytes"):
        jax.block_until_ready(gather(jnp.zeros(rank + 1)))
    hvd.barrier()

    def loss(x: Any) -> Any:
        return hvd.allgather({"even": x, "uneven": jnp.ones(2 + rank)}, name="half")["even"].sum()

    equal(jax.grad(loss)(jnp.ones(3)), np.full(3, size, np.float32))


@on_ranks(2)
def test_process_sets() -> None:
    odd = hvd.add_process_set(range(1, hvd.size(), 2))
    if odd.included():
        for run in both(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=odd)):
            equal(run(jnp.ones(2)), np.full(2, odd.size(), np.float32))
        for run in both(lambda x: hvd.allgather(x, process_set=odd)):
            assert run(jnp.ones(2)).shape == (2 * odd.size(),)
    else:
        for run in both(lambda x: hvd.allreduce(x, process_set=odd)):
            with pytest.raises(ValueError, match="rank 0 is not in process set"):
                run(jnp.ones(2))
    hvd.remove_process_set(odd)
    for run in both(lambda x: hvd.allreduce(x, process_set=odd)):
        with pytest.raises(ValueError, match="not in use"):
            run(jnp.ones(2))


@on_ranks(2)
def test_what_is_wrong() -> None:
    for run in both(lambda x: hvd.allreduce(x, name="wrong")):
        for values, text in [
            (jnp.ones(2, jnp.float8_e4m3fn), "dtype float8_e4m3fn is not supported"),
            ([sparse.BCOO.fromdense(jnp.eye(2))], r"wrong\[0\]: sparse arrays are not reduced; pass array.todense"),
            (jnp.ones(2, jnp.uint32), "uint32 arrays cannot be reduced; pass array.astype"),
            (jnp.ones(2, bool), "bool arrays cannot be reduced"),
            ({"key": jax.random.key(0)}, r"wrong\['key'\]: dtype key<fry> is not supported; pass jax.random.key_data"),
        ]:
            with pytest.raises(hvd.UnsupportedTensorError, match=text):
                run(values)
    with pytest.raises(
        hvd.UnsupportedTensorError, match="wrong: expected an array of JAX or NumPy or a number, got str"
    ):
        hvd.allreduce("text", name="wrong")
    with pytest.raises(hvd.UnsupportedTensorError, match=r"dtype complex64 is for .*pass array.real and array.imag"):
        hvd.allgather(jnp.ones(2, jnp.complex64), name="wrong")
    with pytest.raises(hvd.UnsupportedTensorError, match=r"wrong: expected an array .* or a number, got dict"):
        hvd.alltoall({"a": jnp.ones(2)}, name="wrong")
    for call, text in [
        (lambda x: hvd.allreduce(x, average=True, op=hvd.Sum), "both given"),
        (lambda x: hvd.broadcast(x, 9), "root_rank=9 does not exist"),
        (lambda x: hvd.reducescatter(x, op=hvd.Adasum), "op=Adasum is for allreduce"),
        (lambda x: hvd.alltoall(x, name="a"), "3 rows cannot be divided evenly by 2 ranks"),
        (lambda x: hvd.allreduce(x, name=""), "must be one line of text"),
        (lambda x: hvd.allreduce(x, name=5), "name=5 must be one line of text"),
        (lambda x: hvd.allreduce(x, compression="bf16"), "compression='bf16' is not a compression"),
        (lambda x: hvd.grouped_allreduce([]), "the group is empty"),
    ]:
        for run in both(call):
            with pytest.raises(ValueError, match=text):
                run(jnp.zeros(3))
    with pytest.raises(ValueError, match="alltoall with splits works outside of jit only"):
        jax.jit(lambda x: hvd.alltoall(x, splits=[1, 2]))(jnp.zeros(3))
    with pytest.raises(ValueError, match="inside of jit a barrier needs values"):
        jax.jit(lambda x: (hvd.barrier(), x))(jnp.zeros(3))
    with pytest.raises(TypeError, match=r"pass \[array\]"):
        hvd.grouped_allreduce(jnp.zeros(3))


@on_ranks(2)
def test_ranks_that_disagree() -> None:
    """Outside of jit the error has its class; inside it is JAX's, with the same text. The names can be used again."""
    rank = hvd.rank()
    parts = ("'shape' failed", "the ranks disagree about its shape:", "rank 0 has (2,)", "rank 1 has (3,)", "Remedy:")
    with mismatch(*parts):
        hvd.allreduce(jnp.zeros(2 + rank), name="shape")
    with pytest.raises(FAILED) as raised:
        jax.jit(lambda x: hvd.allreduce(x, name="shape"))(jnp.zeros(2 + rank)).block_until_ready()
    for part in (*parts, f"allreduce 'shape' failed on rank {rank}", "INVALID_ARGUMENT"):
        assert part in str(raised.value)
    equal(jax.jit(lambda x: hvd.allreduce(x, name="shape"))(jnp.ones(2)), np.ones(2, np.float32))
    halves = {"a": jnp.zeros(2), "b": jnp.zeros(2, jnp.int32 if rank else jnp.float32)}
    for collective in (hvd.allgather, lambda tree, name: hvd.broadcast(tree, 0, name)):
        with mismatch("tensor 'other['b']': the ranks disagree about its dtype: rank 0 has float32, rank 1 has int32"):
            collective(halves, name="other")
    # The larger tree has a bucket that no other rank will ever have. Of the others, either is seen to differ first.
    tree = {
        "w": jnp.zeros(2_000_000),
        **({"x": jnp.zeros(2_000_000), "b": jnp.zeros(3)} if rank else {"b": jnp.zeros(2)}),
    }
    with pytest.raises(
        FAILED,
        match=r"the ranks disagree about its tensors: rank 0 has 'tree\['[wb]'\]', rank 1 has 'tree\['[xw]'\]'",
    ):
        jax.block_until_ready(jax.jit(lambda tree: hvd.allreduce(tree, name="tree"))(tree))


def test_before_init() -> None:
    for run in both(lambda x: hvd.allreduce(x)):
        with pytest.raises(NotInitializedError):
            run(jnp.ones(2))


@on_ranks(2)
def test_left_from_an_engine_that_was_stopped() -> None:
    run = jax.jit(lambda x: hvd.allreduce(x, name="later"))
    run(jnp.ones(2)).block_until_ready()
    gc.collect()  # tracebacks of the errors before hold handles, which hold the engine
    hvd.shutdown()
    with pytest.raises(FAILED, match="allreduce 'later': horovodish is not initialized"):
        run(jnp.ones(2)).block_until_ready()
    hvd.init()
    equal(run(jnp.ones(2)), np.ones(2, np.float32))


@on_ranks(3)
def test_sets_of_three_ranks() -> None:
    """Sets that have ranks in common and sets that have none, in one program; and rows in numbers that all differ."""
    rank = hvd.rank()
    first, last, overlapping = (hvd.add_process_set(ranks) for ranks in ([0, 1], [2], [1, 2]))
    mine = first if first.included() else last

    def program(x: Any) -> Any:
        of_set = hvd.allreduce(x, op=hvd.Sum, name="of set", process_set=mine)
        # One name in two sets, of which rank 0 knows one.
        others = hvd.allreduce(x, op=hvd.Sum, name="sum", process_set=overlapping) if overlapping.included() else x
        return jnp.stack([of_set, others, hvd.allreduce(x, op=hvd.Sum, name="sum")])

    expected = [[3, 1, 6], [3, 5, 6], [3, 5, 6]][rank]
    for run in both(program):
        for _ in range(5):
            equal(run(jnp.float32(rank + 1)), np.array(expected, np.float32))
    for run in both(jax.grad(lambda x: hvd.allreduce(x, name="slope", process_set=mine) * (rank + 1))):
        equal(run(jnp.float32(1)), np.array([1.5, 1.5, 3][rank], np.float32))
    tx = hvd.DistributedOptimizer(optax.sgd(1.0), process_set=first)
    for run in both(lambda x: tx.update(x, tx.init(x))[0]):
        equal(run(jnp.full(2, rank + 1.0)), np.full(2, -[1.5, 1.5, 3][rank], np.float32))
    for run in both(hvd.grad(lambda x: x * (rank + 1), process_set=overlapping)):
        equal(run(jnp.float32(1)), np.array([1, 2.5, 2.5][rank], np.float32))
    if overlapping.included():
        equal(hvd.allgather(jnp.full(rank, rank), process_set=overlapping), np.array([1, 2, 2], np.int32))
        for run in both(lambda x: hvd.broadcast(x, 2, process_set=overlapping)):
            equal(run(jnp.float32(rank)), np.array(2, np.float32))
    # Rank r sends r + 1 rows to rank 0, one more to rank 1, and another one to rank 2.
    splits = [rank + 1, rank + 2, rank + 3]
    for given in (splits, np.array(splits), jnp.array(splits)):
        rows, counts = hvd.alltoall(jnp.repeat(jnp.arange(3) + 10 * rank, np.array(splits)), splits=given)
        equal(counts, np.arange(3, dtype=np.int32) + rank + 1)
        equal(rows, np.repeat(np.arange(3) * 10 + rank, np.arange(3) + rank + 1).astype(np.int32))
    for process_set in (first, last, overlapping):
        hvd.remove_process_set(process_set)


@on_ranks(2)
def test_ranks_that_run_out_of_data() -> None:
    """A program that rank 1 has started, but that has not come to its collective, belongs before the join."""

    def step(values: Any) -> Any:
        busy = lax.fori_loop(0, 40, lambda _, matrix: matrix @ matrix / 300, jnp.ones((300, 300)))
        return hvd.allreduce(values + busy[0, 0], op=hvd.Sum, name="step")

    program, values = jax.jit(step), jnp.zeros(3)
    program.lower(values).compile()
    hvd.barrier()
    for _ in range(1 if hvd.rank() == 1 else 3):
        values = program(values)
    failed = mock.Mock(block_until_ready=mock.Mock(side_effect=FloatingPointError))  # of an old program
    with mock.patch.object(jax, "live_arrays", return_value=[failed, *jax.live_arrays()]):
        assert hvd.join() == 0
    equal(hvd.broadcast_parameters(values, root_rank=0), np.full(3, 4, np.float32))
