"""The sum of sparse tensors, such as the gradients of embeddings."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from horovodish.collectives.operation import Operation
from horovodish.collectives.process_sets import ProcessSet, checked_id, global_process_set
from horovodish.collectives.reduce_ops import Average, ReduceOp, Sum
from horovodish.collectives.submission import RefuseOnError
from horovodish.errors import MismatchError, UnsupportedTensorError
from horovodish.torch.adapter import TENSORS
from horovodish.torch.tensors import check_tensor, dtype_code

__all__ = ["sparse_allreduce_async"]


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: ReduceOp, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Sum or average the sparse tensors of all ranks. Collective; does not block. Not differentiable.

    Every rank first adds up its own entries of the same index; then the indices and values of all ranks are gathered
    and added up. What travels is thus in proportion to the entries, not to the shape.

    Args:
        tensor: the rank's values, of layout `torch.sparse_coo`, of any dtype but bool; the same shape,
            the same sparse dimensions and the same dtype on every rank, with any number of entries.
        name: the operation's name, the same on every rank.
        op: `Sum` or `Average`, as for `allreduce`. An index that a rank does not have counts as zero there. float16 and
            bfloat16 are added up in float32.
        process_set: the ranks that take part.

    Returns:
        A function that waits for the result and gives it: a new coalesced sparse tensor, the same bits on every rank.

    Raises:
        ValueError: `op` is another one.
        UnsupportedTensorError: a layout, dtype or device that it cannot take.
        MismatchError: the ranks disagree about the operation; from the returned function where the shapes differ.
            `horovodish.collectives` lists the other errors.

    Example:
        >>> finish = hvd.sparse_allreduce_async(embedding.weight.grad, "embedding", op=hvd.Average)
        >>> embedding.weight.grad = finish()
    """
    identity = checked_id(process_set)
    with RefuseOnError("allgather", name, identity):
        _check(tensor, name, op)
        own = tensor.detach().coalesce()
        indices = own.indices().t()
        shape = torch.tensor([[*own.shape, own.sparse_dim()]], device=own.device)

    def summed(gathered: list[Tensor], counts: list[list[int]]) -> Tensor:
        all_indices, values, shapes = gathered
        _check_shapes(shapes, counts[2], process_set, name)
        wide = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
        result = torch.sparse_coo_tensor(all_indices.t(), wide, own.shape, check_invariants=False).coalesce()
        total = result.values()
        if op is Average:
            ranks = len(shapes)  # those that have joined gave none
            total = total / ranks if total.is_floating_point() else total.div(ranks, rounding_mode="trunc")
        return torch.sparse_coo_tensor(
            result.indices(), total.to(values.dtype), own.shape, is_coalesced=True, check_invariants=False
        )

    operation = Operation("allgather", name, process_set)
    return TENSORS.start(operation, [indices, own.values(), shape], summed).wait


def _check(tensor: Tensor, name: str, op: ReduceOp) -> None:
    if op not in (Average, Sum):
        raise ValueError(f"{name}: op={op!r} is not for sparse tensors; use op=Average or op=Sum")
    if not isinstance(tensor, Tensor) or tensor.layout is torch.strided:
        check_tensor(tensor, name)
        raise UnsupportedTensorError(f"{name}: expected a sparse tensor, got a dense one; use allreduce_async")
    if tensor.layout is not torch.sparse_coo:
        raise UnsupportedTensorError(f"{name}: layout {tensor.layout} is not supported; pass tensor.to_sparse_coo()")
    check_tensor(tensor._values(), name)
    dtype_code(tensor.dtype, name, reduces=True)


def _check_shapes(shapes: Tensor, counts: list[int], process_set: ProcessSet, name: str) -> None:
    """The rows of the gather cannot tell the sizes of sparse dimensions apart."""
    different = (shapes != shapes[0]).any(1).nonzero()
    if len(different):
        ranks = [rank for rank, count in zip(process_set.ranks, counts, strict=True) if count]
        other = int(different[0])
        (*first, dense), (*second, others) = shapes[0].tolist(), shapes[other].tolist()
        raise MismatchError(
            f"sparse tensor '{name}': the ranks disagree about its shape: rank {ranks[0]} has {tuple(first)} with "
            f"{dense} sparse dimensions, rank {ranks[other]} has {tuple(second)} with {others}. Remedy: submit the "
            "same tensor under this name on every rank."
        )
