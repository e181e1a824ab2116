"""Collectives: those that block, those that work in place (`_`), and those that give a handle (`_async`).

The operations are documented in full in `horovodish.collectives`; what is said there about names, errors, process sets
and collective calls holds here, too.

Tensors are dense, in host memory or on this rank's GPU (see docs/gpu.md), of any dtype that the engine knows; one whose
elements do not lie one after another is copied first, or refused where the operation is in place. A tensor must not be
changed, and the tensor of an operation in place not be read, until `synchronize(handle)` returns.

Gradients flow through those that block and are not in place. A gradient is that of the sum of the losses of all ranks,
so where the forward pass sends values to other ranks, the backward pass brings their gradients back. Backward is
therefore collective as well: every rank must run it, or none. With the setting collective_gradients=horovod, allgather
and broadcast have 1/N of that gradient on N ranks, and reducescatter has N times that. As with torch's own collectives,
a leaf that requires a gradient may be written in place; autograd complains if it has saved the old values for a
backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import Function

from horovodish import collectives
from horovodish.collectives import devices
from horovodish.collectives.functions import Handle, barrier, poll, synchronize
from horovodish.collectives.operation import Operation, checked_group, checked_op, identified, only
from horovodish.collectives.process_sets import ProcessSet, global_process_set
from horovodish.collectives.reduce_ops import Average, ReduceOp
from horovodish.collectives.submission import RefuseOnError
from horovodish.gradients.compression import Compressor, check_compression
from horovodish.torch.adapter import COLLECTIVES, TENSORS
from horovodish.torch.autograd import Allgather, Allreduce, Alltoall, Broadcast, Reducescatter, is_recorded
from horovodish.torch.compression import Compression
from horovodish.torch.tensors import check_tensor

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

allgather_async = COLLECTIVES.allgather_async
allreduce_ = COLLECTIVES.allreduce_
allreduce_async = COLLECTIVES.allreduce_async
allreduce_async_ = COLLECTIVES.allreduce_async_
alltoall_async = COLLECTIVES.alltoall_async
broadcast_ = COLLECTIVES.broadcast_
broadcast_async = COLLECTIVES.broadcast_async
broadcast_async_ = COLLECTIVES.broadcast_async_
grouped_allgather_async = COLLECTIVES.grouped_allgather_async
grouped_allreduce_ = COLLECTIVES.grouped_allreduce_
grouped_allreduce_async = COLLECTIVES.grouped_allreduce_async
grouped_allreduce_async_ = COLLECTIVES.grouped_allreduce_async_
grouped_reducescatter_async = COLLECTIVES.grouped_reducescatter_async
reducescatter_async = COLLECTIVES.reducescatter_async


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce the tensors of all ranks, element by element, and give the result to every rank. Collective; blocks.

    result = postscale_factor * op(prescale_factor * tensor of rank 0, ..., prescale_factor * tensor of rank N-1)

    Differentiable where `op` is `Average` or `Sum`: its gradient is the allreduce of the gradients, in the same way.

    Args:
        tensor: the rank's values; any shape and dtype that can be reduced, the same on every rank.
        average: Horovod's older way to say op=Average (True) or op=Sum (False).
        name: the operation's name, the same on every rank; counted when not given.
        compression: what travels; see `Compression`.
        op: `Average` (the default), `Sum`, `Adasum`, `Min`, `Max` or `Product`. Average of integers rounds
            towards zero. Adasum takes floating-point numbers.
        prescale_factor: multiplies every input. For integers the product is computed in float64 and truncated.
        postscale_factor: multiplies the result, in the same way.
        process_set: the ranks that take part.

    Returns:
        A new tensor of the shape and dtype of `tensor`, row-major.

    Raises:
        ValueError: `average` and `op` are both given, or `op` is no reduce op.
        UnsupportedTensorError: a dtype, device or layout that the engine cannot take.
        MismatchError: the ranks disagree about the operation. `horovodish.collectives` lists the other errors.

    Example:
        >>> hvd.allreduce(torch.full((2,), float(hvd.rank())), op=hvd.Sum)  # on 4 ranks
        tensor([6., 6.])
    """
    if compression is Compression.none and not is_recorded(tensor):  # by far the most frequent case
        return COLLECTIVES.allreduce(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    return only(
        grouped_allreduce([tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set)
    )


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`allreduce` of several tensors as a unit. Differentiable; collective; blocks.

    Args:
        tensors: at least one, of any shapes and dtypes; each the same on every rank.
        name: of the group.
        average, compression, op, prescale_factor, postscale_factor, process_set: as for `allreduce`, of all tensors.

    Returns:
        New tensors, in the order of `tensors`.

    Raises:
        ValueError: as `allreduce`, or `tensors` is empty.
        TypeError: `tensors` is one tensor.
        UnsupportedTensorError, MismatchError: as `allreduce`.

    Example:
        >>> loss, accuracy = hvd.grouped_allreduce([loss, accuracy])
    """
    operation = Operation("allreduce", name, process_set, op, average, prescale_factor, postscale_factor)
    return _reduced(operation, Allreduce, tensors, compression)


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Put the tensors of all ranks one after another, in the order of the ranks, on every rank. Collective; blocks.

    Differentiable: the gradient is the sum over the ranks of the gradients of this rank's rows.

    Args:
        tensor: the rank's rows, of any dtype. The first dimension may differ between ranks and may be
            0; the others and the dtype may not. A tensor of zero dimensions counts as one row.
        name: the operation's name, the same on every rank; counted when not given.
        process_set: the ranks that take part.

    Returns:
        A new tensor whose first dimension is the sum of the ranks' first dimensions.

    Raises:
        UnsupportedTensorError: a dtype, device or layout that the engine cannot take.
        MismatchError: the ranks disagree about the operation. `horovodish.collectives` lists the other errors.

    Example:
        >>> hvd.allgather(torch.full((hvd.rank() + 1,), hvd.rank()))  # on 3 ranks
        tensor([0, 1, 1, 2, 2, 2])
    """
    if not is_recorded(tensor):
        return COLLECTIVES.allgather(tensor, name, process_set)
    return only(grouped_allgather([tensor], name, process_set))


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """`allgather` of several tensors as a unit. Differentiable; collective; blocks.

    Args:
        tensors: at least one; each as for `allgather`, and as many on every rank.
        name: of the group.
        process_set: the ranks that take part.

    Returns:
        New tensors, in the order of `tensors`.

    Raises:
        ValueError: `tensors` is empty.
        TypeError: `tensors` is one tensor.
        UnsupportedTensorError, MismatchError: as `allgather`.

    Example:
        >>> predictions, labels = hvd.grouped_allgather([predictions, labels])
    """
    operation = Operation("allgather", name, process_set)
    name, identity = identified(operation)
    operation = operation._replace(name=name)
    with RefuseOnError("allgather", name, identity):
        tensors = checked_group(tensors, "allgather", TENSORS.noun)
    if any(map(is_recorded, tensors)):
        return list(Allgather.apply(operation, *tensors)[: len(tensors)])
    return TENSORS.group(operation, tensors, waits=True).wait()


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Give every rank the values that one rank holds. Collective; blocks.

    Differentiable: on the root the gradient is the sum of the gradients of all ranks, on the others it is zero.

    Args:
        tensor: on the root the values to send, of any dtype; on the others a tensor of the same shape
            and dtype, which is left as it is.
        root_rank: whose values to send, the same on every rank; a rank of the world, also where `process_set` is given.
        name: the operation's name, the same on every rank; counted when not given.
        process_set: the ranks that take part.

    Returns:
        A new tensor with the root's values.

    Raises:
        ValueError: there is no rank `root_rank` in the process set.
        UnsupportedTensorError: a dtype, device or layout that the engine cannot take.
        MismatchError: the ranks disagree about the operation. `horovodish.collectives` lists the other errors.

    Example:
        >>> hvd.broadcast(torch.full((2,), hvd.rank()), root_rank=1)  # on any rank
        tensor([1, 1])
    """
    if not is_recorded(tensor):
        return COLLECTIVES.broadcast(tensor, root_rank, name, process_set)
    sent: Tensor = Broadcast.apply(Operation("broadcast", name, process_set, root_rank=root_rank), tensor)
    return sent


def alltoall(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send some rows to every rank, and get some from every rank. Collective; blocks.

    Differentiable: the gradients of the rows go back the way that the rows came.

    Args:
        tensor: the rank's rows, of any dtype, those for rank 0 first. The first dimension may differ
            between ranks; the others and the dtype may not.
        splits: how many rows go to each rank of the process set, in order, as numbers or as a tensor of integers; they
            add up to the first dimension. Not given, every rank gets as many. Either every rank gives them or none.
        name: the operation's name, the same on every rank; counted when not given.
        process_set: the ranks that take part.

    Returns:
        A new tensor of the rows that came, in the order of the ranks. With `splits` a pair: that tensor, and how many
        rows came from each rank (int64, in host memory).

    Raises:
        ValueError: the splits are not one non-negative number per rank or do not add up to the first dimension; without
            splits, the first dimension cannot be divided by the number of ranks; or a tensor of zero dimensions.
        UnsupportedTensorError: a dtype, device or layout that the engine cannot take.
        MismatchError: the ranks disagree about the operation. `horovodish.collectives` lists the other errors.

    Example:
        >>> rows, counts = hvd.alltoall(torch.arange(3), splits=[1, 2])  # on 2 ranks; on rank 1
        (tensor([1, 2, 1, 2]), tensor([2, 2]))
    """
    if not is_recorded(tensor):
        return COLLECTIVES.alltoall(tensor, splits, name, process_set)
    operation = Operation("alltoall", name, process_set, splits=splits)
    received: tuple[Tensor, Tensor] = Alltoall.apply(operation, tensor)
    return received[0] if splits is None else received


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce the tensors of all ranks and give every rank some rows of the result. Collective; blocks.

    Differentiable where `op` is `Average` or `Sum`: the gradient is made of the gradients of the rows, from the ranks
    that have them.

    Args:
        tensor: the rank's values, of one dimension or more and any dtype that can be reduced; the same shape and
            dtype on every rank.
        name: the operation's name, the same on every rank; counted when not given.
        compression: what travels; see `Compression`.
        op: as for `allreduce`, but not `Adasum`.
        process_set: the ranks that take part.
        prescale_factor, postscale_factor: as for `allreduce`.

    Returns:
        A new tensor. The rows are dealt out in the order of the ranks, as evenly as possible: where the first dimension
        cannot be divided by the number of ranks, the first ranks get one row more.

    Raises:
        ValueError: `op` is `Adasum` or no reduce op, or the tensor has zero dimensions.
        UnsupportedTensorError: a dtype, device or layout that the engine cannot take.
        MismatchError: the ranks disagree about the operation. `horovodish.collectives` lists the other errors.

    Example:
        >>> hvd.reducescatter(torch.arange(3), op=hvd.Sum)  # on 2 ranks; on rank 0
        tensor([0, 2])
    """
    return only(grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor))


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """`reducescatter` of several tensors as a unit. Differentiable; collective; blocks.

    Args:
        tensors: at least one; each as for `reducescatter`.
        name: of the group.
        compression, op, process_set, prescale_factor, postscale_factor: as for `reducescatter`, of all tensors.

    Returns:
        New tensors, in the order of `tensors`.

    Raises:
        ValueError: as `reducescatter`, or `tensors` is empty.
        TypeError: `tensors` is one tensor.
        UnsupportedTensorError, MismatchError: as `reducescatter`.

    Example:
        >>> weights, biases = hvd.grouped_reducescatter([weight_gradients, bias_gradients])
    """
    operation = Operation("reducescatter", name, process_set, op, None, prescale_factor, postscale_factor)
    return _reduced(operation, Reducescatter, tensors, compression)


def join(device: int = -1) -> int:
    """As `horovodish.collectives.join`: say that this rank is out of data. Collective; blocks.

    Until all ranks have joined, an Average divides by the ranks that have not. `horovodish.collectives.join` says when
    it divides by all ranks, as Horovod does.

    Args:
        device: the CUDA device with which this rank takes part in what the others do with CUDA tensors; the current one
            when not given. It counts only if the rank has used none before, and means nothing without CUDA.

    Returns:
        The rank that joined last: the one that has seen all data.

    Raises:
        As `horovodish.collectives.join`.

    Example:
        >>> for batch in batches_of_this_rank:  # as many as there are, not equally many on every rank
        ...     train(batch)
        >>> last = hvd.join()
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        >>> hvd.broadcast_optimizer_state(optimizer, root_rank=last)
    """
    if not torch.cuda.is_available():
        return collectives.join()
    if device < 0 and torch.cuda.is_initialized():
        device = torch.cuda.current_device()
    if device >= 0:
        devices.use(device, "join")
    return collectives.join(device)


def _reduced(
    operation: Operation, function: type[Function], tensors: Sequence[Tensor], compression: Compressor
) -> list[Tensor]:
    name, identity = identified(operation)
    with RefuseOnError(operation.kind, name, identity):
        check_compression(compression)
        op = checked_op(operation.kind, name, operation.average, operation.op)
        operation = operation._replace(name=name, op=op, average=None)
        tensors = checked_group(tensors, operation.kind, TENSORS.noun)
        for tensor in tensors:
            check_tensor(tensor, name)
        pairs = [compression.compress(tensor) for tensor in tensors]
    payloads = [payload for payload, _ in pairs]
    if any(map(is_recorded, payloads)):
        results = function.apply(operation, *payloads)
    else:
        results = TENSORS.group(operation, payloads, waits=True).wait()
    return [compression.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)]
