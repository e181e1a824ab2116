"""The collective operations on NumPy arrays, and the place where each operation is documented in full.

Every operation takes a NumPy array or any CPU array with `__dlpack__`, C-contiguous and aligned, of dtype uint8, int8,
int16, int32, int64, float16, bfloat16 (from ml_dtypes), float32 or float64; and of bool, uint16, uint32 or uint64 where
nothing is reduced. Arrays of zero elements and of zero dimensions are fine.

An operation is collective: every rank must call it with the same name, dtype, shape and arguments. If these differ,
every rank raises `MismatchError`, which names the ranks and both values, and the engine stays usable. If only one
rank's arguments are wrong, such as the splits of an alltoall, this rank raises ValueError or UnsupportedTensorError at
once, and the others raise `MismatchError` with its reason.

The ranks match calls by name. Calls with a name may come in any order. A call without a name is numbered, so such calls
must come in the same order on every rank. A name is in use until its operation is done. `process_set` chooses the ranks
that take part (default: all). Each process set has its own names and numbers.

The `grouped_` functions treat a list of arrays as a unit: no array starts before all arrays are ready on every rank.
Functions without `_async` block, without the GIL, until the result is ready. Functions with `_async` return a `Handle`
at once. Do not change their arrays until `synchronize(handle)` returns.

A rank that is out of data calls `join()`. Until all ranks have joined, it contributes zeros to a sum and no rows to a
gather, and cannot be the root of a broadcast. Meanwhile an Average divides by the ranks that have not joined; see
`join`.

Every operation can raise:

- MismatchError: the ranks disagree about the operation.
- RankLostError: a rank died, raised or left while it was needed.
- EngineStoppedError: `shutdown()` was called while the operation was pending.
- UnsupportedTensorError: the dtype, device or layout is not one of the above, or an output in place is read-only.
- DuplicateNameError: an operation of this name is under way.
- NotInitializedError: before `init()` or after `shutdown()`.
- ForkedProcessError: in a forked child, such as a data-loader worker.
- ValueError: `process_set` is not in use, or this rank is outside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Generic, TypeVar

from horovodish.collectives.adapter import Adapter, Shaped, checked, identified
from horovodish.collectives.array_adapter import ARRAYS, Tensor
from horovodish.collectives.arrays import Array
from horovodish.collectives.codecs import CodecCompressor, checked_codec
from horovodish.collectives.devices import ON_HOST
from horovodish.collectives.operation import Operation
from horovodish.collectives.process_sets import ProcessSet, Sets, global_process_set
from horovodish.collectives.reduce_ops import Average, ReduceOp
from horovodish.collectives.submission import Handle, RefuseOnError, agree_on_counters, poll, submit, synchronize
from horovodish.runtime.process import part

__all__ = [
    "Handle",
    "allgather",
    "allgather_async",
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
    "synchronize",
]

GivenT = TypeVar("GivenT")
ThisT = TypeVar("ThisT")
ResultT = TypeVar("ResultT", bound=Shaped)


class Collectives(Generic[GivenT, ResultT]):
    """The collectives that need only an adapter from a framework.

    The functions of this module work on NumPy arrays. A shim has its own instance and exports its methods, except where
    the shim has its own function. `GivenT` is the type of an argument, `ResultT` the type of a result.
    """

    def __init__(self, adapter: Adapter[ResultT]):
        self._adapter = adapter

    def allreduce(
        self,
        tensor: GivenT,
        average: bool | None = None,
        name: str | None = None,
        op: ReduceOp | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        compression: CodecCompressor | None = None,
    ) -> ResultT:
        """Reduce the tensors of all ranks element by element. Every rank gets the result. Collective; blocks.

        result = postscale_factor * op(prescale_factor * tensor of rank 0, ..., prescale_factor * tensor of rank N-1)

        Every rank gets the same bits, and the same inputs on the same ranks give the same bits in every run.

        Args:
            tensor: the rank's values; any shape, the same on every rank. It does not change.
            average: Horovod's older way to write op=Average (True) or op=Sum (False).
            name: the operation's name, the same on every rank. Without it, the call is numbered.
            op: `Average` (the default), `Sum`, `Adasum`, `Min`, `Max` or `Product`; see `ReduceOp`.
            prescale_factor: multiplies every input. For integers the product is computed in float64 and truncated.
            postscale_factor: multiplies the result, in the same way.
            process_set: the ranks that take part.
            compression: a codec for the values between hosts, such as `Compression.int8`. The result is then an
                approximation, the same on every rank. None: the values are sent as they are.

        Returns:
            A new tensor of the shape and dtype of `tensor`.

        Raises:
            ValueError: `average` and `op` are both given, or `op` or `compression` is not valid.
            See `horovodish.collectives` for the errors of every operation.

        Example:
            >>> hvd.allreduce(numpy.full(2, hvd.rank(), numpy.float32), op=hvd.Sum)  # on 4 ranks
            array([6., 6.], dtype=float32)
        """
        operation = Operation("allreduce", name, process_set, op, average, prescale_factor, postscale_factor)
        if compression is not None:
            name, identity = identified(operation)
            with RefuseOnError("allreduce", name, identity):
                operation = checked_codec(compression).applied(checked(operation._replace(name=name)))
        return self._adapter.now(operation, tensor)

    def allreduce_async(
        self,
        tensor: GivenT,
        average: bool | None = None,
        name: str | None = None,
        op: ReduceOp | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Handle[ResultT]:
        """As `allreduce`, but returns a handle for `synchronize()`. Collective; does not block.

        Example:
            >>> handles = [hvd.allreduce_async(values[key], name=key) for key in values]
            >>> averages = [hvd.synchronize(handle) for handle in handles]
        """
        return self._adapter.one(
            Operation("allreduce", name, process_set, op, average, prescale_factor, postscale_factor), tensor
        )

    def allreduce_(
        self,
        tensor: ThisT,
        average: bool | None = None,
        name: str | None = None,
        op: ReduceOp | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> ThisT:
        """As `allreduce`, but writes the result into `tensor` and returns it. Collective; blocks.

        `tensor` must be writable and contiguous. After an error its contents are undefined.
        """
        operation = Operation(
            "allreduce", name, process_set, op, average, prescale_factor, postscale_factor, in_place=True
        )
        self._adapter.now(operation, tensor)
        return tensor

    def allreduce_async_(
        self,
        tensor: GivenT,
        average: bool | None = None,
        name: str | None = None,
        op: ReduceOp | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Handle[ResultT]:
        """As `allreduce_`, but returns a handle; `tensor` has the result after `synchronize(handle)`. Collective."""
        operation = Operation(
            "allreduce", name, process_set, op, average, prescale_factor, postscale_factor, in_place=True
        )
        return self._adapter.one(operation, tensor)

    def grouped_allreduce(
        self,
        tensors: Sequence[GivenT],
        average: bool | None = None,
        name: str | None = None,
        op: ReduceOp | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> list[ResultT]:
        """`allreduce` of several tensors as a unit. Collective; blocks.

        Args:
            tensors: at least one, of any shapes and dtypes. Each has the same shape and dtype on every rank.
            name: the name of the group.
            average, op, prescale_factor, postscale_factor, process_set: as for `allreduce`.

        Returns:
            New tensors, in the order of `tensors`.

        Raises:
            ValueError: as `allreduce`, or `tensors` is empty.
            TypeError: `tensors` is one tensor.
            See `horovodish.collectives` for the errors of every operation.

        Example:
            >>> loss, correct = hvd.grouped_allreduce([loss, correct], name="metrics")
        """
        operation = Operation("allreduce", name, process_set, op, average, prescale_factor, postscale_factor)
        return self._adapter.group(operation, tensors, waits=True).wait()

    def grouped_allreduce_async(
        self,
        tensors: Sequence[GivenT],
        average: bool | None = None,
        name: str | None = None,
        op: ReduceOp | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Handle[list[ResultT]]:
        """As `grouped_allreduce`, but returns a handle for the whole group. Collective; does not block."""
        operation = Operation("allreduce", name, process_set, op, average, prescale_factor, postscale_factor)
        return self._adapter.group(operation, tensors)

    def grouped_allreduce_(
        self,
        tensors: Sequence[ThisT],
        average: bool | None = None,
        name: str | None = None,
        op: ReduceOp | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> list[ThisT]:
        """As `grouped_allreduce`, but writes the results into `tensors` and returns them. Collective; blocks."""
        operation = Operation(
            "allreduce", name, process_set, op, average, prescale_factor, postscale_factor, in_place=True
        )
        self._adapter.group(operation, tensors, waits=True).wait()
        return list(tensors)

    def grouped_allreduce_async_(
        self,
        tensors: Sequence[GivenT],
        average: bool | None = None,
        name: str | None = None,
        op: ReduceOp | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Handle[list[ResultT]]:
        """As `grouped_allreduce_`, but returns a handle for the whole group. Collective; does not block."""
        operation = Operation(
            "allreduce", name, process_set, op, average, prescale_factor, postscale_factor, in_place=True
        )
        return self._adapter.group(operation, tensors)

    def allgather(
        self, tensor: GivenT, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> ResultT:
        """Concatenate the tensors of all ranks, in the order of the ranks, on every rank. Collective; blocks.

        Args:
            tensor: the rank's rows. Only the number of rows may differ between ranks. It may be 0. A tensor of zero
                dimensions counts as one row. bool is allowed.
            name: the operation's name, the same on every rank. Without it, the call is numbered.
            process_set: the ranks that take part.

        Returns:
            A new tensor whose first dimension is the sum of the ranks' first dimensions.

        Raises:
            See `horovodish.collectives` for the errors of every operation.

        Example:
            >>> hvd.allgather(numpy.full(hvd.rank() + 1, hvd.rank()))  # on 3 ranks
            array([0, 1, 1, 2, 2, 2])
        """
        return self._adapter.now(Operation("allgather", name, process_set), tensor)

    def allgather_async(
        self, tensor: GivenT, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle[ResultT]:
        """As `allgather`, but returns a handle for `synchronize()`. Collective; does not block."""
        return self._adapter.one(Operation("allgather", name, process_set), tensor)

    def grouped_allgather(
        self, tensors: Sequence[GivenT], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> list[ResultT]:
        """`allgather` of several tensors as a unit. Collective; blocks.

        Args:
            tensors: at least one, and the same number on every rank; each as for `allgather`.
            name: the name of the group.
            process_set: the ranks that take part.

        Returns:
            New tensors, in the order of `tensors`.

        Raises:
            ValueError: `tensors` is empty.
            TypeError: `tensors` is one tensor.
            See `horovodish.collectives` for the errors of every operation.

        Example:
            >>> inputs, labels = hvd.grouped_allgather([inputs, labels])
        """
        return self._adapter.group(Operation("allgather", name, process_set), tensors, waits=True).wait()

    def grouped_allgather_async(
        self, tensors: Sequence[GivenT], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle[list[ResultT]]:
        """As `grouped_allgather`, but returns a handle for the whole group. Collective; does not block."""
        return self._adapter.group(Operation("allgather", name, process_set), tensors)

    def broadcast(
        self, tensor: GivenT, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> ResultT:
        """Send the values of one rank, the root, to every rank. Collective; blocks.

        Args:
            tensor: on the root, the values to send; on the other ranks, a tensor of the same shape and dtype, which
                does not change. bool is allowed.
            root_rank: the root, the same on every rank. With `process_set`, too, it is the rank among all ranks.
            name: the operation's name, the same on every rank. Without it, the call is numbered.
            process_set: the ranks that take part.

        Returns:
            A new tensor with the root's values.

        Raises:
            ValueError: there is no rank `root_rank` in the process set.
            See `horovodish.collectives` for the errors of every operation.

        Example:
            >>> hvd.broadcast(numpy.full(2, hvd.rank()), root_rank=1)  # on any rank
            array([1, 1])
        """
        return self._adapter.now(Operation("broadcast", name, process_set, root_rank=root_rank), tensor)

    def broadcast_async(
        self, tensor: GivenT, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle[ResultT]:
        """As `broadcast`, but returns a handle for `synchronize()`. Collective; does not block."""
        return self._adapter.one(Operation("broadcast", name, process_set, root_rank=root_rank), tensor)

    def broadcast_(
        self, tensor: ThisT, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> ThisT:
        """As `broadcast`, but writes the root's values into `tensor` and returns it. Collective; blocks.

        `tensor` must be writable and contiguous. After an error its contents are undefined, except on the root.
        """
        self._adapter.now(Operation("broadcast", name, process_set, root_rank=root_rank, in_place=True), tensor)
        return tensor

    def broadcast_async_(
        self, tensor: GivenT, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle[ResultT]:
        """As `broadcast_`, but returns a handle; `tensor` has the values after `synchronize(handle)`. Collective."""
        return self._adapter.one(Operation("broadcast", name, process_set, root_rank=root_rank, in_place=True), tensor)

    def alltoall(
        self,
        tensor: GivenT,
        splits: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> ResultT | tuple[ResultT, ResultT]:
        """Send some rows to every rank, and get some rows from every rank. Collective; blocks.

        Args:
            tensor: the rank's rows, beginning with the rows for rank 0. Only the number of rows may differ between
                ranks. bool is allowed.
            splits: the number of rows for each rank of the process set, in order: numbers, an array or a tensor. They
                must add up to the first dimension. Without splits, every rank gets the same number of rows. Either
                every rank passes splits, or none.
            name: the operation's name, the same on every rank. Without it, the call is numbered.
            process_set: the ranks that take part.

        Returns:
            A new tensor with the received rows, in the order of the ranks. With `splits` a pair: this tensor, and the
            number of rows from each rank (int64).

        Raises:
            ValueError: the splits are not one non-negative number per rank or do not add up to the first dimension;
                without splits, the first dimension cannot be divided by the number of ranks; or `tensor` has zero
                dimensions.
            See `horovodish.collectives` for the errors of every operation.

        Example:
            >>> rows, counts = hvd.alltoall(numpy.arange(3), splits=[1, 2])  # on 2 ranks; on rank 1
            (array([1, 2, 1, 2]), array([2, 2]))
        """
        return self._exchanged(Operation("alltoall", name, process_set, splits=splits), tensor, waits=True).wait()

    def alltoall_async(
        self,
        tensor: GivenT,
        splits: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Handle[ResultT | tuple[ResultT, ResultT]]:
        """As `alltoall`, but returns a handle for `synchronize()`. Collective; does not block."""
        return self._exchanged(Operation("alltoall", name, process_set, splits=splits), tensor)

    def reducescatter(
        self,
        tensor: GivenT,
        name: str | None = None,
        op: ReduceOp = Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> ResultT:
        """Reduce the tensors of all ranks. Every rank gets some rows of the result. Collective; blocks.

        Args:
            tensor: the rank's values, of one dimension or more; the same shape on every rank.
            name: the operation's name, the same on every rank. Without it, the call is numbered.
            op: as for `allreduce`, but not `Adasum`.
            process_set: the ranks that take part.
            prescale_factor, postscale_factor: as for `allreduce`.

        Returns:
            A new tensor. The rows are divided in the order of the ranks, as evenly as possible: if the first dimension
            is not a multiple of the number of ranks, the first ranks get one row more.

        Raises:
            ValueError: `op` is `Adasum` or not a reduce op, or the tensor has zero dimensions.
            See `horovodish.collectives` for the errors of every operation.

        Example:
            >>> hvd.reducescatter(numpy.arange(3), op=hvd.Sum)  # on 2 ranks; on rank 0
            array([0, 2])
        """
        operation = Operation("reducescatter", name, process_set, op, None, prescale_factor, postscale_factor)
        return self._adapter.now(operation, tensor)

    def reducescatter_async(
        self,
        tensor: GivenT,
        name: str | None = None,
        op: ReduceOp = Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Handle[ResultT]:
        """As `reducescatter`, but returns a handle. Collective; does not block."""
        operation = Operation("reducescatter", name, process_set, op, None, prescale_factor, postscale_factor)
        return self._adapter.one(operation, tensor)

    def grouped_reducescatter(
        self,
        tensors: Sequence[GivenT],
        name: str | None = None,
        op: ReduceOp = Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> list[ResultT]:
        """`reducescatter` of several tensors as a unit. Collective; blocks.

        Args:
            tensors: at least one; each as for `reducescatter`.
            name: the name of the group.
            op, process_set, prescale_factor, postscale_factor: as for `reducescatter`.

        Returns:
            New tensors, in the order of `tensors`.

        Raises:
            ValueError: as `reducescatter`, or `tensors` is empty.
            TypeError: `tensors` is one tensor.
            See `horovodish.collectives` for the errors of every operation.

        Example:
            >>> weights, biases = hvd.grouped_reducescatter([weight_gradients, bias_gradients])
        """
        operation = Operation("reducescatter", name, process_set, op, None, prescale_factor, postscale_factor)
        return self._adapter.group(operation, tensors, waits=True).wait()

    def grouped_reducescatter_async(
        self,
        tensors: Sequence[GivenT],
        name: str | None = None,
        op: ReduceOp = Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Handle[list[ResultT]]:
        """As `grouped_reducescatter`, but returns a handle for the whole group. Collective; does not block."""
        operation = Operation("reducescatter", name, process_set, op, None, prescale_factor, postscale_factor)
        return self._adapter.group(operation, tensors)

    def _exchanged(
        self, operation: Operation, tensor: GivenT, *, waits: bool = False
    ) -> Handle[ResultT | tuple[ResultT, ResultT]]:
        def result(received: list[ResultT], counts: list[list[int]]) -> ResultT | tuple[ResultT, ResultT]:
            return received[0] if operation.splits is None else (received[0], self._adapter.row_counts(counts[0]))

        return self._adapter.start(operation, [tensor], result, waits=waits)


_arrays = Collectives[Tensor, Array](ARRAYS)
allreduce = _arrays.allreduce
allreduce_async = _arrays.allreduce_async
allreduce_ = _arrays.allreduce_
allreduce_async_ = _arrays.allreduce_async_
grouped_allreduce = _arrays.grouped_allreduce
grouped_allreduce_async = _arrays.grouped_allreduce_async
grouped_allreduce_ = _arrays.grouped_allreduce_
grouped_allreduce_async_ = _arrays.grouped_allreduce_async_
allgather = _arrays.allgather
allgather_async = _arrays.allgather_async
grouped_allgather = _arrays.grouped_allgather
grouped_allgather_async = _arrays.grouped_allgather_async
broadcast = _arrays.broadcast
broadcast_async = _arrays.broadcast_async
broadcast_ = _arrays.broadcast_
broadcast_async_ = _arrays.broadcast_async_
alltoall = _arrays.alltoall
alltoall_async = _arrays.alltoall_async
reducescatter = _arrays.reducescatter
reducescatter_async = _arrays.reducescatter_async
grouped_reducescatter = _arrays.grouped_reducescatter
grouped_reducescatter_async = _arrays.grouped_reducescatter_async


_around_join: list[Callable[[], AbstractContextManager[None]]] = []


def around_join(context: Callable[[], AbstractContextManager[None]]) -> None:
    """Have each `join()` be in a context."""
    _around_join.append(context)


def join(device: int = -1) -> int:
    """Say that this rank is out of data, and take part in the other ranks' operations until all have joined. Blocks.

    Every rank must call it. It returns when every rank has joined; then all continue as before. Until then this rank
    contributes zeros to a sum and no rows to a gather, also in its process sets. Operations that this rank submitted
    before `join()` have its own values. Groups of `torch.distributed` have no join. With `wait_for=`, a rank takes the
    steps that it has missed, and takes part in no other collective before all have joined.

    While ranks have joined, an Average divides by the ranks that have not. Horovod divides by all ranks. With the
    setting `join_average`, or if a rank has imported `horovod` before `init()`, an `allreduce` divides as in Horovod:

        rank 0 has joined, ranks 1 and 2 average 6 and 6   (6 + 6) / 2 = 6   in Horovod (6 + 6) / 3 = 4

    Args:
        device: the CUDA device of this rank for collectives of CUDA tensors, if the rank has used none before.

    Returns:
        The rank that joined last. It has taken the most steps.

    Raises:
        RankLostError, EngineStoppedError, NotInitializedError, ForkedProcessError: as for every operation.

    Example:
        >>> for batch in batches_of_this_rank:  # as many as there are, not equally many on every rank
        ...     train(batch)
        >>> last = hvd.join()
        >>> hvd.broadcast_(weights, root_rank=last)
    """
    name = "join.noname.one"  # the same for all, so that a second one at a time is refused
    on_device = ON_HOST._replace(device=device)
    with ExitStack() as contexts:
        for context in _around_join:
            contexts.enter_context(context())
        sets = part(Sets).that_join()
        handles = [
            submit(
                Operation("join", name, each),
                [],
                keep_alive=None,
                result=lambda native: native.last_joined(),
                placement=on_device,
                waits=True,
            )
            for each in sets
        ]
        last, *_ = [handle.wait() for handle in handles]
        agree_on_counters(sets)
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank has called it. Collective; blocks.

    Operations that were submitted before it may still be under way when it returns.

    Args:
        process_set: the ranks that take part.

    Raises:
        RankLostError, EngineStoppedError, NotInitializedError, ForkedProcessError, ValueError: as for every operation.

    Example:
        >>> if hvd.rank() == 0:
        ...     download_the_data()
        >>> hvd.barrier()
    """
    ARRAYS.group(Operation("barrier", None, process_set), [], waits=True).wait()
