"""Collectives: blocking functions, functions that work in place (`_`), and functions that return a handle (`_async`).

The operations are documented in full in `horovodish.collectives`. Its rules for names, errors, process sets and
collective calls hold here, too.

Tensors are dense, in host memory or on this rank's GPU (see docs/gpu.md), of any dtype that the engine knows. A tensor
that is not contiguous is copied first, or refused where the operation is in place. Until `synchronize(handle)` returns,
do not change a tensor, and do not read the tensor of an operation in place.

Gradients flow through functions that block and are not in place. They are gradients of the sum of the losses of all
ranks, so where the forward pass sends values to other ranks, the backward pass brings their gradients back. Backward is
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
from horovodish.collectives.adapter import checked, checked_group, identified, only
from horovodish.collectives.documentation import documented_as
from horovodish.collectives.functions import Handle, barrier, poll, synchronize
from horovodish.collectives.operation import Operation
from horovodish.collectives.process_sets import ProcessSet, global_process_set
from horovodish.collectives.reduce_ops import Average, ReduceOp
from horovodish.collectives.submission import RefuseOnError
from horovodish.gradients.compression import Compressor, with_codec
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


@documented_as(collectives.allreduce)
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
    """Differentiable where `op` is `Average` or `Sum`: its gradient is the allreduce of the gradients, in the same
    way.

    Args:
        compression: a cast or a codec for the values; see `Compression`.

    Returns:
        A new tensor of the shape and dtype of `tensor`, row-major.

    Example:
        >>> hvd.allreduce(torch.full((2,), float(hvd.rank())), op=hvd.Sum)  # on 4 ranks
        tensor([6., 6.])
    """
    if compression is Compression.none and not is_recorded(tensor):  # by far the most frequent case
        return COLLECTIVES.allreduce(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    return only(
        grouped_allreduce([tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set)
    )


@documented_as(collectives.grouped_allreduce)
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
    """Differentiable, as `allreduce`.

    Args:
        compression: as for `allreduce`, of all tensors.
    """
    operation = Operation("allreduce", name, process_set, op, average, prescale_factor, postscale_factor)
    return _reduced(operation, Allreduce, tensors, compression)


@documented_as(collectives.allgather)
def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Differentiable: the gradient is the sum over the ranks of the gradients of this rank's rows.

    Example:
        >>> hvd.allgather(torch.full((hvd.rank() + 1,), hvd.rank()))  # on 3 ranks
        tensor([0, 1, 1, 2, 2, 2])
    """
    if not is_recorded(tensor):
        return COLLECTIVES.allgather(tensor, name, process_set)
    return only(grouped_allgather([tensor], name, process_set))


@documented_as(collectives.grouped_allgather)
def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Differentiable, as `allgather`."""
    operation = Operation("allgather", name, process_set)
    name, identity = identified(operation)
    operation = operation._replace(name=name)
    with RefuseOnError("allgather", name, identity):
        tensors = checked_group(tensors, "allgather", TENSORS.noun)
    if any(map(is_recorded, tensors)):
        return list(Allgather.apply(operation, *tensors)[: len(tensors)])
    return TENSORS.group(operation, tensors, waits=True).wait()


@documented_as(collectives.broadcast)
def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Differentiable: on the root the gradient is the sum of the gradients of all ranks, on the others it is zero.

    Example:
        >>> hvd.broadcast(torch.full((2,), hvd.rank()), root_rank=1)  # on any rank
        tensor([1, 1])
    """
    if not is_recorded(tensor):
        return COLLECTIVES.broadcast(tensor, root_rank, name, process_set)
    sent: Tensor = Broadcast.apply(Operation("broadcast", name, process_set, root_rank=root_rank), tensor)
    return sent


@documented_as(collectives.alltoall)
def alltoall(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Differentiable: the gradients of the rows go back the way that the rows came.

    Returns:
        A new tensor of the rows that came, in the order of the ranks. With `splits` a pair: that tensor, and how many
        rows came from each rank (int64, in host memory).

    Example:
        >>> rows, counts = hvd.alltoall(torch.arange(3), splits=[1, 2])  # on 2 ranks; on rank 1
        (tensor([1, 2, 1, 2]), tensor([2, 2]))
    """
    if not is_recorded(tensor):
        return COLLECTIVES.alltoall(tensor, splits, name, process_set)
    operation = Operation("alltoall", name, process_set, splits=splits)
    received: tuple[Tensor, Tensor] = Alltoall.apply(operation, tensor)
    return received[0] if splits is None else received


@documented_as(collectives.reducescatter)
def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Differentiable where `op` is `Average` or `Sum`: the gradient is made of the gradients of the rows, from the
    ranks that have them.

    Args:
        compression: a cast for the values; see `Compression`.

    Example:
        >>> hvd.reducescatter(torch.arange(3), op=hvd.Sum)  # on 2 ranks; on rank 0
        tensor([0, 2])
    """
    return only(grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor))


@documented_as(collectives.grouped_reducescatter)
def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Differentiable, as `reducescatter`.

    Args:
        compression: as for `reducescatter`, of all tensors.
    """
    operation = Operation("reducescatter", name, process_set, op, None, prescale_factor, postscale_factor)
    return _reduced(operation, Reducescatter, tensors, compression)


@documented_as(collectives.join)
def join(device: int = -1) -> int:
    """Args:
        device: the CUDA device for this rank's part in the others' collectives of CUDA tensors; the current one
            when not given. It counts only if the rank has used none before, and means nothing without CUDA.

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
        operation, compression = with_codec(checked(operation._replace(name=name)), compression)
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
