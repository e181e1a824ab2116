"""The collectives on arrays and trees of arrays, inside and outside of jit.

`horovodish.collectives` documents the operations. Its rules for errors, process sets and collective calls hold here,
too. In addition:

- An array is an array of JAX or NumPy or a number, of dtype uint8, int8, int16, int32, int64, float16, bfloat16,
  float32 or float64; and of bool, uint16, uint32 or uint64 where nothing is reduced. An `allreduce` with Average or Sum
  takes complex64 and complex128, too, and leaves gradients of integers, of dtype float0, unchanged. A tree is any
  pytree of arrays, the same on every rank.
- A tree is one operation for the user. Its leaves travel in buckets. Each rank begins all buckets before it waits for
  one, so the order of the buckets may differ between ranks.
- Inside jit a call is part of the program: it begins when its array is computed, and computations that do not need
  the result go on meanwhile. XLA neither drops, merges, repeats nor hoists it. Every rank must run the same program, as
  far as collectives go; put arrays whose order differs between ranks into one call on a tree.
- Without a name, calls outside of jit are counted, and a call in a compiled program is named after the file and line of
  its source. A name that a program uses several times, for example in a loop, gets a number. Two calls of one name at
  the same time are refused: from two threads, or from a separately jitted function that a program calls twice.
- Inside jit the shapes of the trace hold: every rank must give the same number of rows to an allgather, and alltoall
  has no splits.
- Outside of jit, errors are the classes of `horovodish.errors`. A compiled program that fails raises
  jax.errors.JaxRuntimeError with the same text when its result is waited for, or ValueError where it fails at once.
- `grad` and `jvp` work with sums, averages and operations that move values; `vmap` makes one call of a batch. Gradients
  are gradients of the sum of the losses of all ranks, unless the setting collective_gradients says otherwise. pmap,
  shard_map and arrays over several devices of a process are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
from jax import numpy as jnp

from horovodish import collectives
from horovodish.collectives.adapter import check_has_rows, checked_group
from horovodish.collectives.documentation import documented_as
from horovodish.collectives.operation import Operation
from horovodish.collectives.process_sets import ProcessSet, checked_id, global_process_set
from horovodish.collectives.reduce_ops import Average, ReduceOp
from horovodish.gradients.compression import Compressor
from horovodish.jax.compression import Compression
from horovodish.jax.eager import exchange
from horovodish.jax.primitive import run
from horovodish.jax.trees import Leaves, checked_array, coded, decompressed, named, run_fused

__all__ = ["allgather", "allreduce", "alltoall", "barrier", "broadcast", "grouped_allreduce", "join", "reducescatter"]

Tree = TypeVar("Tree")


@documented_as(collectives.allreduce)
def allreduce(
    tree: Tree,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tree:
    """Inside jit it does not block. Differentiable where `op` is `Average` or `Sum`: its gradient is the allreduce of
    the gradients, in the same way.

    Args:
        tree: the rank's values: an array or a tree of arrays, the same shapes and dtypes on every rank.
        name: the operation's name, the same on every rank. The module says what a call without one is called.
        compression: a cast or a codec for the values; see `Compression`.

    Returns:
        A tree of new arrays.

    Example:
        >>> step = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))
        >>> step(jnp.full(2, hvd.rank()))  # on 4 ranks
        Array([6, 6], dtype=int32)
    """
    template = named(Operation("allreduce", name, process_set, op, average, prescale_factor, postscale_factor))
    template, compression = coded(template, compression)
    leaves = Leaves.of(tree, template.name, template.operation.op, takes_complex=True)
    leaves, contexts = leaves.compressed(compression)
    result: Tree = leaves.rebuilt(decompressed(run_fused(leaves, template), contexts, compression))
    return result


@documented_as(collectives.grouped_allreduce)
def grouped_allreduce(
    arrays: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[jax.Array]:
    """Blocks and is differentiable as `allreduce`.

    Args:
        arrays: at least one, of any shapes and dtypes; each the same on every rank.
        compression: as for `allreduce`, of all arrays.

    Returns:
        New arrays, in the order of `arrays`.

    Raises:
        TypeError: `arrays` is one array or has trees.
    """
    arrays = checked_group(arrays, "allreduce", "array")
    template = named(Operation("allreduce", name, process_set, op, average, prescale_factor, postscale_factor))
    template, compression = coded(template, compression)
    leaves, contexts = Leaves.of(arrays, template.name, template.operation.op).compressed(compression)
    members = tuple(leaves.suffixes) if len(arrays) > 1 else ("",)
    if len(leaves.arrays) != len(arrays):
        raise TypeError("grouped_allreduce: expected arrays, not trees of them; use allreduce")
    return decompressed(run([replace(template, members=members)], leaves.arrays), contexts, compression)


@documented_as(collectives.allgather)
def allgather(tree: Tree, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tree:
    """Inside jit it does not block. Differentiable where every rank gives as many rows: the gradient is the sum over
    the ranks of the gradients of this rank's rows.

    Args:
        tree: the rank's rows, an array or a tree of arrays. Outside of jit the first dimension may differ between ranks
            and may be 0. An array of zero dimensions counts as one row.
        name: as for `allreduce`.

    Returns:
        A tree of new arrays whose first dimension is the sum of the ranks' first dimensions.

    Example:
        >>> hvd.allgather(jnp.full(hvd.rank() + 1, hvd.rank()))  # on 3 ranks
        Array([0, 1, 1, 2, 2, 2], dtype=int32)
    """
    template = named(Operation("allgather", name, process_set))
    leaves = Leaves.of(tree, template.name, None)
    leaves = leaves.replaced([array.reshape(1) if array.ndim == 0 else array for array in leaves.arrays])
    result: Tree = leaves.rebuilt(run_fused(leaves, template))
    return result


@documented_as(collectives.broadcast)
def broadcast(
    tree: Tree, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tree:
    """Inside jit it does not block. Differentiable: on the root the gradient is the sum of the gradients of all ranks,
    on the others it is zero.

    Args:
        tree: on the root the values to send; on the others a tree of the same shapes and dtypes.
        name: as for `allreduce`.

    Returns:
        A tree of new arrays with the root's values.

    Example:
        >>> hvd.broadcast(jnp.full(2, hvd.rank()), root_rank=1)  # on any rank
        Array([1, 1], dtype=int32)
    """
    checked_id(process_set)
    template = named(Operation("broadcast", name, process_set, root_rank=root_rank))
    leaves = Leaves.of(tree, template.name, None)
    result: Tree = leaves.rebuilt(run_fused(leaves, template))
    return result


@documented_as(collectives.alltoall)
def alltoall(
    array: Any,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Inside jit it does not block, and has no splits. Differentiable without `splits`: the gradients of the rows go
    back the way that the rows came.

    Args:
        array: the rank's rows, those for rank 0 first. Only their number may differ between ranks.
        name: as for `allreduce`.

    Returns:
        A new array of the rows that came, in the order of the ranks. With `splits` a pair: that array, and how many
        rows came from each rank (int32).

    Raises:
        ValueError: splits inside of jit.

    Example:
        >>> rows, counts = hvd.alltoall(jnp.arange(3), splits=[1, 2])  # on 2 ranks; on rank 1
        (Array([1, 2, 1, 2], dtype=int32), Array([2, 2], dtype=int32))
    """
    template = named(Operation("alltoall", name, process_set))
    rows = checked_array(array, template.name, None)
    check_has_rows("alltoall", template.name, rows.ndim, "array")
    if splits is None:
        return run([template], [rows])[0]
    if isinstance(rows, jax.core.Tracer):
        raise ValueError(f"{template.name}: alltoall with splits works outside of jit only, where shapes may differ")
    return exchange(template, rows, splits)


@documented_as(collectives.reducescatter)
def reducescatter(
    tree: Tree,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tree:
    """Inside jit it does not block. Differentiable where `op` is `Average` or `Sum`: the gradient is made of the
    gradients of the rows, from the ranks that have them.

    Args:
        tree: the rank's values, of one dimension or more; the same shapes and dtypes on every rank.
        name: as for `allreduce`.
        compression: a cast for the values; see `Compression`.

    Returns:
        A tree of new arrays. Their rows are dealt out in the order of the ranks, as evenly as possible: where the first
        dimension cannot be divided by the number of ranks, the first ranks get one row more.

    Example:
        >>> hvd.reducescatter(jnp.arange(3), op=hvd.Sum)  # on 2 ranks; on rank 0
        Array([0, 2], dtype=int32)
    """
    template = named(Operation("reducescatter", name, process_set, op, None, prescale_factor, postscale_factor))
    template, compression = coded(template, compression)
    leaves, contexts = Leaves.of(tree, template.name, template.operation.op).compressed(compression)
    for array in leaves.arrays:
        check_has_rows("reducescatter", template.name, array.ndim, "array")
    result: Tree = leaves.rebuilt(decompressed(run_fused(leaves, template), contexts, compression))
    return result


@documented_as(collectives.barrier)
def barrier(tree: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Inside jit, pass a tree. The barrier comes after its arrays are computed, and before any use of the result.

    A compiled program orders operations only by the values that they use.

    Args:
        tree: an array or a tree of arrays to pass; needed inside of jit.
        name: as for `allreduce`.

    Returns:
        `tree`.

    Raises:
        ValueError: inside of jit without `tree`.

    Example:
        >>> gradients = hvd.barrier(gradients)
    """
    template = named(Operation("barrier", name, process_set))
    leaves = Leaves.of(tree, template.name, None)
    if leaves.arrays:
        return leaves.rebuilt(run([replace(template, members=tuple(leaves.suffixes))], leaves.arrays))
    nothing = jnp.zeros(())
    if isinstance(nothing, jax.core.Tracer):
        raise ValueError("inside of jit a barrier needs values to pass: tree = hvd.barrier(tree)")
    run([template], [nothing])
    return tree


@documented_as(collectives.join)
def join(device: int = -1) -> int:
    """Call it outside of jit. It waits first until all arrays of this process are computed, so the collectives of
    compiled programs that still run come before it. Keep a reference to a program's result until then. What a
    program has raised comes where its result is used.

    Example:
        >>> for batch in batches_of_this_rank:  # as many as there are, not equally many on every rank
        ...     parameters, state = train_step(parameters, state, batch)
        >>> last = hvd.join()
        >>> parameters = hvd.broadcast_parameters(parameters, root_rank=last)
    """
    for array in jax.live_arrays():
        with contextlib.suppress(Exception):  # an error belongs to whoever uses the array
            array.block_until_ready()
    return collectives.join(device)
