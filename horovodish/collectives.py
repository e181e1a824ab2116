"""The collective operations on NumPy arrays, and the place where each operation is documented in full.

Every operation takes a NumPy array or any CPU array with `__dlpack__`, C-contiguous, of dtype uint8, int8, int16,
int32, int64, float16, bfloat16 (from ml_dtypes), float32 or float64; bool where nothing is reduced. Arrays of zero
elements and of zero dimensions are fine.

An operation is collective: every rank must call it, with the same name, dtype, shape and arguments; where they differ,
every rank raises `MismatchError`, which names the ranks and both values, and the engine stays usable. A call without a
name gets one by counting, so such calls must come in the same order on every rank; named calls may come in any order.
A name is in use until its operation is done. `process_set` says which ranks take part (all, when not given); names and
counts are apart for each set. The `grouped_` functions take a list of arrays and treat it as a unit: nothing of it
starts before all of it is there on every rank. The functions without `_async` block, without the GIL, until the result
is there; those with `_async` give a `Handle` at once, and the arrays must not be changed until `synchronize(handle)`
returns.

A rank that is out of data calls `join()` and contributes nothing to what the others do until all have joined: zeros to
a sum (an Average then divides by the ranks that have not joined), no rows to a gather. It cannot be the root of a
broadcast.

What every operation can raise:
    MismatchError: the ranks disagree about the operation.
    RankLostError: a rank died, raised or left while it was needed.
    EngineStoppedError: `shutdown()` was called while the operation was pending.
    UnsupportedTensorError: dtype, device or layout are not as said above, or an output in place is read-only.
    DuplicateNameError: an operation of this name is under way.
    NotInitializedError: before `init()` or after `shutdown()`.
    ForkedProcessError: in a forked child, such as a data-loader worker.
    ValueError: `process_set` is not in use, or this rank is outside it.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from horovodish import _native, basics
from horovodish.arrays import Array, SupportsDLPack, address, dtype_code, host_array, writable_array
from horovodish.process_sets import ProcessSet, checked_id, global_process_set
from horovodish.reduce_ops import Adasum, Average, Max, Min, Product, ReduceOp, Sum, chosen_op
from horovodish.submission import Handle, agree_on_counters, gather_objects, generated_name, poll, submit, synchronize

__all__ = [
    "Adasum",
    "Average",
    "Handle",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "checked_root",
    "chosen_op",
    "generated_name",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "scattered_rows",
    "submit",
    "synchronize",
]

Tensor = Array | SupportsDLPack
TensorT = TypeVar("TensorT", bound=Tensor)
T = TypeVar("T")


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Reduce the arrays of all ranks, element by element, and give the result to every rank. Collective; blocks.

    result = postscale_factor * op(prescale_factor * tensor of rank 0, ..., prescale_factor * tensor of rank N-1)

    Every rank gets the same bits, and the same inputs on the same ranks give the same bits in every run.

    Args:
        tensor: the rank's values; any shape, the same on every rank. Left as it is.
        average: Horovod's older way to say op=Average (True) or op=Sum (False).
        name: the operation's name, the same on every rank; counted when not given.
        op: `Average` (the default), `Sum`, `Min`, `Max` or `Product`; see `ReduceOp` for integers and NaN.
        prescale_factor: multiplies every input before the reduction. For integers the product is computed in float64
            and truncated towards zero.
        postscale_factor: multiplies the result, in the same way.
        process_set: the ranks that take part.

    Returns:
        A new array of the shape and dtype of `tensor`.

    Raises:
        ValueError: `average` and `op` are both given, or `op` is `Adasum` or no reduce op.
        See the module for what every operation can raise.

    Example:
        >>> hvd.allreduce(numpy.full(2, hvd.rank(), numpy.float32), op=hvd.Sum)  # on 4 ranks
        array([6., 6.], dtype=float32)
    """
    return _reduce(
        [tensor], _first, False, average, name, op, prescale_factor, postscale_factor, process_set, True
    ).wait()


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[Array]:
    """As `allreduce`, but gives a handle; `synchronize(handle)` gives the result. Collective; does not block.

    Example:
        >>> handles = [hvd.allreduce_async(values[key], name=key) for key in values]
        >>> averages = [hvd.synchronize(handle) for handle in handles]
    """
    return _reduce([tensor], _first, False, average, name, op, prescale_factor, postscale_factor, process_set, False)


def allreduce_(
    tensor: TensorT,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> TensorT:
    """As `allreduce`, but writes the result into `tensor`, which must be writable, and returns it. Collective; blocks.

    After an error the contents of `tensor` are undefined.
    """
    _reduce([tensor], _first, True, average, name, op, prescale_factor, postscale_factor, process_set, True).wait()
    return tensor


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[Array]:
    """As `allreduce_`, but gives a handle; `tensor` holds the result after `synchronize(handle)`. Collective."""
    return _reduce([tensor], _first, True, average, name, op, prescale_factor, postscale_factor, process_set, False)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """`allreduce` of several arrays as a unit. Collective; blocks.

    Args:
        tensors: at least one; their number, shapes and dtypes, which may differ within the group, are the same on every
            rank.
        name: of the group.
        average, op, prescale_factor, postscale_factor, process_set: as for `allreduce`.

    Returns:
        New arrays, in the order of `tensors`.

    Raises:
        ValueError: as `allreduce`, or `tensors` is empty.
        See the module for what every operation can raise.

    Example:
        >>> loss, correct = hvd.grouped_allreduce([loss, correct], name="metrics")
    """
    return _reduce(tensors, list, False, average, name, op, prescale_factor, postscale_factor, process_set, True).wait()


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[Array]]:
    """As `grouped_allreduce`, but gives a handle for the whole group. Collective; does not block."""
    return _reduce(tensors, list, False, average, name, op, prescale_factor, postscale_factor, process_set, False)


def grouped_allreduce_(
    tensors: Sequence[TensorT],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[TensorT]:
    """As `grouped_allreduce`, but writes the results into `tensors` and returns them. Collective; blocks."""
    _reduce(tensors, list, True, average, name, op, prescale_factor, postscale_factor, process_set, True).wait()
    return list(tensors)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[Array]]:
    """As `grouped_allreduce_`, but gives a handle for the whole group. Collective; does not block."""
    return _reduce(tensors, list, True, average, name, op, prescale_factor, postscale_factor, process_set, False)


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Array:
    """Put the arrays of all ranks one after another, in the order of the ranks, on every rank. Collective; blocks.

    Args:
        tensor: the rank's rows. The first dimension may differ between ranks and may be 0; the others and the dtype may
            not. An array of zero dimensions counts as one row. bool is allowed.
        name: the operation's name, the same on every rank; counted when not given.
        process_set: the ranks that take part.

    Returns:
        A new array whose first dimension is the sum of the ranks' first dimensions.

    Raises:
        See the module for what every operation can raise.

    Example:
        >>> hvd.allgather(numpy.full(hvd.rank() + 1, hvd.rank()))  # on 3 ranks
        array([0, 1, 1, 2, 2, 2])
    """
    return _gather([tensor], _first, name, process_set, True).wait()


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Array]:
    """As `allgather`, but gives a handle; `synchronize(handle)` gives the result. Collective; does not block."""
    return _gather([tensor], _first, name, process_set, False)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Array]:
    """`allgather` of several arrays as a unit. Collective; blocks.

    Args:
        tensors: at least one; each as for `allgather`, and as many on every rank.
        name: of the group.
        process_set: the ranks that take part.

    Returns:
        New arrays, in the order of `tensors`.

    Raises:
        ValueError: `tensors` is empty. See the module for what every operation can raise.

    Example:
        >>> inputs, labels = hvd.grouped_allgather([inputs, labels])
    """
    return _gather(tensors, list, name, process_set, True).wait()


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[list[Array]]:
    """As `grouped_allgather`, but gives a handle for the whole group. Collective; does not block."""
    return _gather(tensors, list, name, process_set, False)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """Give every rank the values that one rank holds. Collective; blocks.

    Args:
        tensor: on the root the values to send; on the others an array of the same shape and dtype, which is left as it
            is. bool is allowed.
        root_rank: whose values to send, the same on every rank; a rank of the world, also where `process_set` is given.
        name: the operation's name, the same on every rank; counted when not given.
        process_set: the ranks that take part.

    Returns:
        A new array with the root's values.

    Raises:
        ValueError: there is no rank `root_rank` in the process set.
        See the module for what every operation can raise.

    Example:
        >>> hvd.broadcast(numpy.full(2, hvd.rank()), root_rank=1)  # on any rank
        array([1, 1])
    """
    return _broadcast(tensor, False, root_rank, name, process_set, True).wait()


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Array]:
    """As `broadcast`, but gives a handle; `synchronize(handle)` gives the result. Collective; does not block."""
    return _broadcast(tensor, False, root_rank, name, process_set, False)


def broadcast_(
    tensor: TensorT, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> TensorT:
    """As `broadcast`, but writes the root's values into `tensor`, which must be writable, and returns it. Collective.

    After an error the contents of `tensor` are undefined on the ranks that are not the root.
    """
    _broadcast(tensor, True, root_rank, name, process_set, True).wait()
    return tensor


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Array]:
    """As `broadcast_`, but gives a handle; `tensor` holds the values after `synchronize(handle)`. Collective."""
    return _broadcast(tensor, True, root_rank, name, process_set, False)


def alltoall(
    tensor: Tensor,
    splits: Sequence[int] | Array | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array | tuple[Array, Array]:
    """Send some rows to every rank, and get some from every rank. Collective; blocks.

    Args:
        tensor: the rank's rows, those for rank 0 first. The first dimension may differ between ranks; the others and
            the dtype may not. bool is allowed.
        splits: how many rows go to each rank of the process set, in order; they add up to the first dimension. Not
            given, every rank gets as many. Either every rank gives them or none.
        name: the operation's name, the same on every rank; counted when not given.
        process_set: the ranks that take part.

    Returns:
        A new array of the rows that came, in the order of the ranks. With `splits` a pair: that array, and how many
        rows came from each rank (int32).

    Raises:
        ValueError: the splits are not one non-negative number per rank or do not add up to the first dimension; without
            splits, the first dimension cannot be divided by the number of ranks; or an array of zero dimensions.
        See the module for what every operation can raise.

    Example:
        >>> rows, counts = hvd.alltoall(numpy.arange(3), splits=[1, 2])  # on 2 ranks; on rank 1
        (array([1, 2, 1, 2]), array([2, 2], dtype=int32))
    """
    return _alltoall(tensor, splits, name, process_set, True).wait()


def alltoall_async(
    tensor: Tensor,
    splits: Sequence[int] | Array | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Array | tuple[Array, Array]]:
    """As `alltoall`, but gives a handle; `synchronize(handle)` gives the result. Collective; does not block."""
    return _alltoall(tensor, splits, name, process_set, False)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """Reduce the arrays of all ranks and give every rank some rows of the result. Collective; blocks.

    Args:
        tensor: the rank's values, of one dimension or more; the same shape on every rank.
        name: the operation's name, the same on every rank; counted when not given.
        op: as for `allreduce`.
        process_set: the ranks that take part.
        prescale_factor, postscale_factor: as for `allreduce`.

    Returns:
        A new array. The rows are dealt out in the order of the ranks, as evenly as possible: where the first dimension
        cannot be divided by the number of ranks, the first ranks get one row more.

    Raises:
        ValueError: `op` is `Adasum` or no reduce op, or the array has zero dimensions.
        See the module for what every operation can raise.

    Example:
        >>> hvd.reducescatter(numpy.arange(3), op=hvd.Sum)  # on 2 ranks; on rank 0
        array([0, 2])
    """
    return _scatter([tensor], _first, name, op, process_set, prescale_factor, postscale_factor, True).wait()


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Array]:
    """As `reducescatter`, but gives a handle; `synchronize(handle)` gives the result. Collective; does not block."""
    return _scatter([tensor], _first, name, op, process_set, prescale_factor, postscale_factor, False)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Array]:
    """`reducescatter` of several arrays as a unit. Collective; blocks.

    Args:
        tensors: at least one; each as for `reducescatter`.
        name: of the group.
        op, process_set, prescale_factor, postscale_factor: as for `reducescatter`.

    Returns:
        New arrays, in the order of `tensors`.

    Raises:
        ValueError: as `reducescatter`, or `tensors` is empty.
        See the module for what every operation can raise.

    Example:
        >>> weights, biases = hvd.grouped_reducescatter([weight_gradients, bias_gradients])
    """
    return _scatter(tensors, list, name, op, process_set, prescale_factor, postscale_factor, True).wait()


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[Array]]:
    """As `grouped_reducescatter`, but gives a handle for the whole group. Collective; does not block."""
    return _scatter(tensors, list, name, op, process_set, prescale_factor, postscale_factor, False)


def join() -> int:
    """Say that this rank is out of data, and take part in what the others do without contributing. Blocks.

    It returns once every rank has joined; then all go on as before. Operations that this rank submitted before are its
    own. For all ranks together; process sets have no join.

    Returns:
        The rank that joined last: the one that has seen all data.

    Raises:
        RankLostError, EngineStoppedError, NotInitializedError, ForkedProcessError: as for every operation.

    Example:
        >>> for batch in batches_of_this_rank:  # as many as there are, not equally many on every rank
        ...     train(batch)
        >>> last = hvd.join()
        >>> hvd.broadcast_(weights, root_rank=last)
    """
    name = "horovodish.join"  # no user's
    last = submit("join", name, [], keep_alive=None, result=lambda native: native.last_joined(), waits=True).wait()
    agree_on_counters()
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank has come to this call. Collective; blocks.

    Operations that were enqueued before it need not be done when it returns.

    Args:
        process_set: the ranks that take part.

    Raises:
        RankLostError, EngineStoppedError, NotInitializedError, ForkedProcessError, ValueError: as for every operation.

    Example:
        >>> if hvd.rank() == 0:
        ...     download_the_data()
        >>> hvd.barrier()
    """
    identity = checked_id(process_set)
    name = generated_name("barrier", identity)
    submit("barrier", name, [], keep_alive=None, result=lambda _: None, waits=True, process_set_id=identity).wait()


def broadcast_object(
    obj: object, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Give every rank an object that one rank holds. Collective; blocks.

    Args:
        obj: on the root anything that can be pickled; ignored on the others.
        root_rank: whose object to send, the same on every rank.
        name: the operation's name, the same on every rank; counted when not given.
        process_set: the ranks that take part.

    Returns:
        On the root `obj` itself, on the others a copy of it.

    Raises:
        ValueError: there is no rank `root_rank` in the process set.
        See the module for what every operation can raise.

    Example:
        >>> start_epoch = hvd.broadcast_object(start_epoch if hvd.rank() == 0 else None)
    """
    root = checked_root(root_rank, process_set)
    identity = checked_id(process_set)
    name = generated_name("broadcast_object", identity) if name is None else name
    if basics.rank() == root:
        data = np.frombuffer(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), np.uint8)
        broadcast(np.array(data.size), root, f"{name}.length", process_set)
        broadcast(data, root, f"{name}.data", process_set)
        return obj
    length = broadcast(np.array(0), root, f"{name}.length", process_set)
    return pickle.loads(broadcast(np.empty(length, np.uint8), root, f"{name}.data", process_set).data)


def allgather_object(obj: object, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Give every rank the objects of all ranks. Collective; blocks.

    Args:
        obj: anything that can be pickled.
        name: the operation's name, the same on every rank; counted when not given.
        process_set: the ranks that take part.

    Returns:
        The objects in the order of the ranks, without those that have joined; copies, this rank's own included.

    Raises:
        See the module for what every operation can raise.

    Example:
        >>> hvd.allgather_object({"rank": hvd.rank()})  # on 2 ranks
        [{'rank': 0}, {'rank': 1}]
    """
    identity = checked_id(process_set)
    return gather_objects(obj, generated_name("allgather_object", identity) if name is None else name, identity)


def checked_root(root_rank: int, process_set: ProcessSet = global_process_set) -> int:
    """`root_rank` as an int, once it is clear that the process set has this rank.

    Raises:
        ValueError: it has not.
        TypeError: it is no integer.
    """
    root = operator.index(root_rank)
    if process_set is global_process_set:
        if not 0 <= root < basics.size():
            raise ValueError(f"root_rank={root} does not exist: the ranks are 0 to {basics.size() - 1}")
    elif root not in process_set.ranks:
        raise ValueError(f"root_rank={root} is not in the process set of ranks {process_set.ranks}")
    return root


def checked_splits(splits: Sequence[int] | Array | None, rows: int, ranks: int, name: str) -> list[int]:
    """How many of an alltoall's rows go to each rank.

    Raises:
        ValueError: `splits` is not one non-negative number per rank, or does not add up to `rows`; or it is None and
            `rows` cannot be divided by `ranks`.
    """
    if splits is None:
        if rows % ranks:
            raise ValueError(
                f"{name}: {rows} rows cannot be divided evenly by {ranks} ranks; pass splits, one number per rank"
            )
        return [rows // ranks] * ranks
    counts = [operator.index(count) for count in splits]
    if len(counts) != ranks or min(counts, default=0) < 0 or sum(counts) != rows:
        raise ValueError(
            f"{name}: splits {counts} must be {ranks} non-negative numbers, one per rank, that add up to the "
            f"{rows} rows of the array; they add up to {sum(counts)}"
        )
    return counts


def scattered_rows(rows: int, process_set: ProcessSet) -> int:
    """How many of a reducescatter's `rows` this rank gets."""
    base, more = divmod(rows, process_set.size())
    return base + (process_set.rank() < more)


def _named(kind: str, name: str | None, tensors: Sequence[object], process_set_id: int) -> str:
    if not tensors:
        raise ValueError(f"grouped_{kind}: the group is empty; pass at least one array")
    return generated_name(kind, process_set_id) if name is None else name


def _first(arrays: Sequence[Array]) -> Array:
    return arrays[0]


def _reduce(
    tensors: Sequence[Tensor],
    pick: Callable[[list[Array]], T],
    in_place: bool,
    average: bool | None,
    name: str | None,
    op: ReduceOp | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    waits: bool,
) -> Handle[T]:
    chosen = chosen_op(average, op)
    identity = checked_id(process_set)
    name = _named("allreduce", name, tensors, identity)
    pairs = [_source_and_target(tensor, in_place, name) for tensor in tensors]
    return submit(
        "allreduce",
        name,
        [_described(source, target, dtype_code(source, name, reduces=True)) for source, target in pairs],
        keep_alive=pairs,
        result=lambda _: pick([target for _, target in pairs]),
        op=chosen,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        waits=waits,
        process_set_id=identity,
    )


def _broadcast(
    tensor: Tensor, in_place: bool, root_rank: int, name: str | None, process_set: ProcessSet, waits: bool
) -> Handle[Array]:
    identity = checked_id(process_set)
    root = checked_root(root_rank, process_set)
    name = _named("broadcast", name, [tensor], identity)
    source, target = _source_and_target(tensor, in_place, name)
    return submit(
        "broadcast",
        name,
        [_described(source, target, dtype_code(source, name, reduces=False))],
        keep_alive=(source, target),
        result=lambda _: target,
        root_rank=root,
        waits=waits,
        process_set_id=identity,
    )


def _gather(
    tensors: Sequence[Tensor],
    pick: Callable[[list[Array]], T],
    name: str | None,
    process_set: ProcessSet,
    waits: bool,
) -> Handle[T]:
    identity = checked_id(process_set)
    name = _named("allgather", name, tensors, identity)
    sources = [host_array(tensor, name) for tensor in tensors]
    sources = [source.reshape(1) if source.ndim == 0 else source for source in sources]
    return submit(
        "allgather",
        name,
        [_rows(source, name) for source in sources],
        keep_alive=sources,
        result=lambda native: pick([_received(native, index, source) for index, source in enumerate(sources)]),
        waits=waits,
        process_set_id=identity,
    )


def _alltoall(
    tensor: Tensor, splits: Sequence[int] | Array | None, name: str | None, process_set: ProcessSet, waits: bool
) -> Handle[Array | tuple[Array, Array]]:
    identity = checked_id(process_set)
    name = _named("alltoall", name, [tensor], identity)
    source = host_array(tensor, name)
    if source.ndim == 0:
        raise ValueError(f"{name}: an array of zero dimensions has no rows to send; pass one of one dimension or more")
    counts = checked_splits(splits, source.shape[0], process_set.size(), name)

    def result(native: _native.Handle) -> Array | tuple[Array, Array]:
        received = _received(native, 0, source)
        return received if splits is None else (received, np.array(native.rows(0), np.int32))

    return submit(
        "alltoall",
        name,
        [_rows(source, name)],
        keep_alive=source,
        result=result,
        waits=waits,
        process_set_id=identity,
        splits=counts,
    )


def _scatter(
    tensors: Sequence[Tensor],
    pick: Callable[[list[Array]], T],
    name: str | None,
    op: ReduceOp,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
    waits: bool,
) -> Handle[T]:
    chosen = chosen_op(None, op)
    identity = checked_id(process_set)
    name = _named("reducescatter", name, tensors, identity)
    sources = [host_array(tensor, name) for tensor in tensors]
    if any(source.ndim == 0 for source in sources):
        raise ValueError(f"{name}: an array of zero dimensions has no rows to deal out; pass one with a dimension")
    targets = [
        np.empty((scattered_rows(source.shape[0], process_set), *source.shape[1:]), source.dtype) for source in sources
    ]
    return submit(
        "reducescatter",
        name,
        [
            _described(source, target, dtype_code(source, name, reduces=True))
            for source, target in zip(sources, targets, strict=True)
        ],
        keep_alive=(sources, targets),
        result=lambda _: pick(targets),
        op=chosen,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        waits=waits,
        process_set_id=identity,
    )


def _source_and_target(tensor: Tensor, in_place: bool, name: str) -> tuple[Array, Array]:
    if in_place:
        array = writable_array(tensor, name)
        return array, array
    source = host_array(tensor, name)
    return source, np.empty(source.shape, source.dtype)


def _described(source: Array, target: Array, dtype: int) -> tuple[int, int, int, tuple[int, ...]]:
    start = address(source)
    return start, start if target is source else address(target), dtype, source.shape


def _rows(source: Array, name: str) -> tuple[int, int, int, tuple[int, ...]]:
    return address(source), 0, dtype_code(source, name, reduces=False), source.shape


def _received(native: _native.Handle, index: int, source: Array) -> Array:
    """An output that the engine allocated, as an array like `source`."""
    gathered = np.frombuffer(native.output(index), np.uint8).view(source.dtype)
    return gathered.reshape(sum(native.rows(index)), *source.shape[1:])
