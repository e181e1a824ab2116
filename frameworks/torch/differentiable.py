"""Collectives on tensors that gradients flow through; they block.

A gradient is that of the sum of the losses of all ranks, so where the forward pass sends values to other ranks, the
backward pass brings their gradients back. Backward is therefore collective as well: every rank must run it, or none.

What `horovodish.collectives` says of names, errors, process sets and collective calls holds here, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from horovodish.compression import Compressor
from horovodish.process_sets import ProcessSet, checked_id, global_process_set
from horovodish.reduce_ops import Average, ReduceOp
from horovodish.submission import Checking, generated_name
from horovodish.torch.asynchronous import exchange
from horovodish.torch.autograd_functions import Alltoall, Broadcast, is_recorded
from horovodish.torch.compression import Compression
from horovodish.torch.grouped import grouped_allgather, grouped_allreduce, grouped_reducescatter
from horovodish.torch.tensor_submission import only, row_counts, submit_allgather, submit_allreduce, submit_broadcast
from horovodish.torch.tensors import rows_of


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
        tensor: the rank's values; any shape and any dtype but bool, the same on every rank.
        average: Horovod's older way to say op=Average (True) or op=Sum (False).
        name: the operation's name, the same on every rank; counted when not given.
        compression: what travels; see `Compression`.
        op: `Average` (the default), `Sum`, `Adasum`, `Min`, `Max` or `Product`. Average of integers floors. Adasum
            takes floating-point numbers.
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
        return submit_allreduce(
            [tensor], only, False, average, name, op, prescale_factor, postscale_factor, process_set, True
        ).wait()
    return only(
        grouped_allreduce([tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set)
    )


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
        return submit_allgather([tensor], lambda gathered, _: only(gathered), name, process_set, True).wait()
    return only(grouped_allgather([tensor], name, process_set))


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
        return submit_broadcast(tensor, False, root_rank, name, process_set, True).wait()
    name = generated_name("broadcast", checked_id(process_set)) if name is None else name
    sent: Tensor = Broadcast.apply(tensor, root_rank, name, process_set)
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
        exchanged: Tensor | tuple[Tensor, Tensor] = exchange(tensor, splits, name, process_set, True).wait()
        return exchanged
    identity = checked_id(process_set)
    name = generated_name("alltoall", identity) if name is None else name
    with Checking("alltoall", name, identity):
        sent = row_counts(splits, rows_of(tensor, name, "send").shape[0], process_set, name)
    received: tuple[Tensor, Tensor] = Alltoall.apply(tensor, sent, name, process_set)
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
        tensor: the rank's values, of one dimension or more and any dtype but bool; the same shape and
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
