"""The collective operations on NumPy arrays, and the place where each operation is documented in full.

Every operation takes a NumPy array or any CPU array with `__dlpack__`, C-contiguous, of dtype uint8, int8, int16,
int32, int64, float16, bfloat16 (from ml_dtypes), float32 or float64; bool where nothing is reduced. Arrays of zero
elements and of zero dimensions are fine.

An operation is collective: every rank must call it, with the same name, dtype, shape and arguments; where they differ,
every rank raises `MismatchError`, which names the ranks and both values, and the engine stays usable. A call without a
name gets one by counting, so such calls must come in the same order on every rank; named calls may come in any order.
A name is in use until its operation is done. The functions without `_async` block, without the GIL, until the result is
there; those with `_async` give a `Handle` at once, and the arrays must not be changed until `synchronize(handle)`
returns.

What every operation can raise:
    MismatchError: the ranks disagree about the operation.
    RankLostError: a rank died, raised or left while it was needed.
    EngineStoppedError: `shutdown()` was called while the operation was pending.
    UnsupportedTensorError: dtype, device or layout are not as said above, or an output in place is read-only.
    DuplicateNameError: an operation of this name is under way.
    NotInitializedError: before `init()` or after `shutdown()`.
    ForkedProcessError: in a forked child, such as a data-loader worker.
"""

from __future__ import annotations

import operator
from typing import TypeVar

import numpy as np

from horovodish import _native, basics
from horovodish.arrays import Array, SupportsDLPack, address, dtype_code, host_array, writable_array
from horovodish.reduce_ops import Adasum, Average, Max, Min, Product, ReduceOp, Sum, chosen_op
from horovodish.submission import Handle, generated_name, poll, submit, synchronize

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
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "checked_root",
    "chosen_op",
    "generated_name",
    "poll",
    "submit",
    "synchronize",
]

TensorT = TypeVar("TensorT", bound=Array | SupportsDLPack)


def allreduce(
    tensor: Array | SupportsDLPack,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
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

    Returns:
        A new array of the shape and dtype of `tensor`.

    Raises:
        ValueError: `average` and `op` are both given, or `op` is `Adasum` or no reduce op.
        See the module for what every operation can raise.

    Example:
        >>> hvd.allreduce(numpy.full(2, hvd.rank(), numpy.float32), op=hvd.Sum)  # on 4 ranks
        array([6., 6.], dtype=float32)
    """
    return _reduce(tensor, False, average, name, op, prescale_factor, postscale_factor, True).wait()


def allreduce_async(
    tensor: Array | SupportsDLPack,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Array]:
    """As `allreduce`, but gives a handle; `synchronize(handle)` gives the result. Collective; does not block.

    Example:
        >>> handles = [hvd.allreduce_async(values[key], name=key) for key in values]
        >>> averages = [hvd.synchronize(handle) for handle in handles]
    """
    return _reduce(tensor, False, average, name, op, prescale_factor, postscale_factor, False)


def allreduce_(
    tensor: TensorT,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> TensorT:
    """As `allreduce`, but writes the result into `tensor`, which must be writable, and returns it. Collective; blocks.

    After an error the contents of `tensor` are undefined.
    """
    _reduce(tensor, True, average, name, op, prescale_factor, postscale_factor, True).wait()
    return tensor


def allreduce_async_(
    tensor: Array | SupportsDLPack,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Array]:
    """As `allreduce_`, but gives a handle; `tensor` holds the result after `synchronize(handle)`. Collective."""
    return _reduce(tensor, True, average, name, op, prescale_factor, postscale_factor, False)


def allgather(tensor: Array | SupportsDLPack, name: str | None = None) -> Array:
    """Put the arrays of all ranks one after another, in the order of the ranks, on every rank. Collective; blocks.

    Args:
        tensor: the rank's rows. The first dimension may differ between ranks and may be 0; the others and the dtype may
            not. An array of zero dimensions counts as one row. bool is allowed.
        name: the operation's name, the same on every rank; counted when not given.

    Returns:
        A new array whose first dimension is the sum of the ranks' first dimensions.

    Raises:
        See the module for what every operation can raise.

    Example:
        >>> hvd.allgather(numpy.full(hvd.rank() + 1, hvd.rank()))  # on 3 ranks
        array([0, 1, 1, 2, 2, 2])
    """
    return _gather(tensor, name, True).wait()


def allgather_async(tensor: Array | SupportsDLPack, name: str | None = None) -> Handle[Array]:
    """As `allgather`, but gives a handle; `synchronize(handle)` gives the result. Collective; does not block."""
    return _gather(tensor, name, False)


def broadcast(tensor: Array | SupportsDLPack, root_rank: int, name: str | None = None) -> Array:
    """Give every rank the values that one rank holds. Collective; blocks.

    Args:
        tensor: on the root the values to send; on the others an array of the same shape and dtype, which is left as it
            is. bool is allowed.
        root_rank: whose values to send, the same on every rank.
        name: the operation's name, the same on every rank; counted when not given.

    Returns:
        A new array with the root's values.

    Raises:
        ValueError: there is no rank `root_rank`.
        See the module for what every operation can raise.

    Example:
        >>> hvd.broadcast(numpy.full(2, hvd.rank()), root_rank=1)  # on any rank
        array([1, 1])
    """
    return _broadcast(tensor, False, root_rank, name, True).wait()


def broadcast_async(tensor: Array | SupportsDLPack, root_rank: int, name: str | None = None) -> Handle[Array]:
    """As `broadcast`, but gives a handle; `synchronize(handle)` gives the result. Collective; does not block."""
    return _broadcast(tensor, False, root_rank, name, False)


def broadcast_(tensor: TensorT, root_rank: int, name: str | None = None) -> TensorT:
    """As `broadcast`, but writes the root's values into `tensor`, which must be writable, and returns it. Collective.

    After an error the contents of `tensor` are undefined on the ranks that are not the root.
    """
    _broadcast(tensor, True, root_rank, name, True).wait()
    return tensor


def broadcast_async_(tensor: Array | SupportsDLPack, root_rank: int, name: str | None = None) -> Handle[Array]:
    """As `broadcast_`, but gives a handle; `tensor` holds the values after `synchronize(handle)`. Collective."""
    return _broadcast(tensor, True, root_rank, name, False)


def barrier() -> None:
    """Wait until every rank has come to this call. Collective; blocks.

    Operations that were enqueued before it need not be done when it returns.

    Raises:
        RankLostError, EngineStoppedError, NotInitializedError, ForkedProcessError: as for every operation.

    Example:
        >>> if hvd.rank() == 0:
        ...     download_the_data()
        >>> hvd.barrier()
    """
    submit("barrier", generated_name("barrier"), [], keep_alive=None, result=lambda _: None, waits=True).wait()


def checked_root(root_rank: int) -> int:
    """`root_rank` as an int, once it is clear that this rank exists.

    Raises:
        ValueError: there is no such rank.
        TypeError: it is no integer.
    """
    root = operator.index(root_rank)
    if not 0 <= root < basics.size():
        raise ValueError(f"root_rank={root} does not exist: the ranks are 0 to {basics.size() - 1}")
    return root


def _reduce(
    tensor: Array | SupportsDLPack,
    in_place: bool,
    average: bool | None,
    name: str | None,
    op: ReduceOp | None,
    prescale_factor: float,
    postscale_factor: float,
    waits: bool,
) -> Handle[Array]:
    chosen = chosen_op(average, op)
    name = generated_name("allreduce") if name is None else name
    source, target = _source_and_target(tensor, in_place, name)
    return submit(
        "allreduce",
        name,
        [_described(source, target, dtype_code(source, name, reduces=True))],
        keep_alive=(source, target),
        result=lambda _: target,
        op=chosen,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        waits=waits,
    )


def _broadcast(
    tensor: Array | SupportsDLPack, in_place: bool, root_rank: int, name: str | None, waits: bool
) -> Handle[Array]:
    root = checked_root(root_rank)
    name = generated_name("broadcast") if name is None else name
    source, target = _source_and_target(tensor, in_place, name)
    return submit(
        "broadcast",
        name,
        [_described(source, target, dtype_code(source, name, reduces=False))],
        keep_alive=(source, target),
        result=lambda _: target,
        root_rank=root,
        waits=waits,
    )


def _gather(tensor: Array | SupportsDLPack, name: str | None, waits: bool) -> Handle[Array]:
    name = generated_name("allgather") if name is None else name
    source = host_array(tensor, name)
    dtype, shape = source.dtype, source.shape or (1,)

    def rows(native: _native.Handle) -> Array:
        gathered = np.frombuffer(native.output(0), np.uint8).view(dtype)
        return gathered.reshape(sum(native.rows(0)), *shape[1:])

    return submit(
        "allgather",
        name,
        [(address(source), 0, dtype_code(source, name, reduces=False), shape)],
        keep_alive=source,
        result=rows,
        waits=waits,
    )


def _source_and_target(tensor: Array | SupportsDLPack, in_place: bool, name: str) -> tuple[Array, Array]:
    if in_place:
        array = writable_array(tensor, name)
        return array, array
    source = host_array(tensor, name)
    return source, np.empty(source.shape, source.dtype)


def _described(source: Array, target: Array, dtype: int) -> tuple[int, int, int, tuple[int, ...]]:
    start = address(source)
    return start, start if target is source else address(target), dtype, source.shape
