"""Collectives on groups of tensors: nothing of a group starts before all of it is there on every rank.

Each is to its members what the operation without `grouped_` is to one tensor, gradients included, and documented there.
A group is a list, of one tensor or more and as many on every rank; its name is that of the whole group. What gives a
handle or works in place is not differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor

from horovodish.compression import Compressor, check_compression
from horovodish.process_sets import ProcessSet, checked_id, global_process_set
from horovodish.reduce_ops import Average, ReduceOp, chosen_op
from horovodish.submission import Checking, Handle, generated_name
from horovodish.torch.autograd_functions import (
    Allgather,
    Allreduce,
    Reducescatter,
    Reduction,
    is_recorded,
    reduced,
    scattered,
)
from horovodish.torch.compression import Compression
from horovodish.torch.tensor_submission import (
    check_group,
    submit_allgather,
    submit_allreduce,
    submit_reducescatter,
)
from horovodish.torch.tensors import check_tensor

TensorT = TypeVar("TensorT", bound=Tensor)


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
    identity = checked_id(process_set)
    name = generated_name("allreduce", identity) if name is None else name
    with Checking("allreduce", name, identity):
        call = Reduction(chosen_op(average, op), name, prescale_factor, postscale_factor, process_set)
        payloads, contexts = _compressed(tensors, "allreduce", name, compression)
    results = Allreduce.apply(call, *payloads) if any(map(is_recorded, payloads)) else reduced(payloads, call)
    return _decompressed(results, contexts, compression)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[Tensor]]:
    """As `grouped_allreduce`, but gives a handle for the whole group. Collective; does not block."""
    return submit_allreduce(
        tensors, list, False, average, name, op, prescale_factor, postscale_factor, process_set, False
    )


def grouped_allreduce_(
    tensors: Sequence[TensorT],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[TensorT]:
    """As `grouped_allreduce`, but writes the results into `tensors`, which must be contiguous. Collective; blocks.

    Not differentiable. After an error the contents of `tensors` are undefined.
    """
    submit_allreduce(
        tensors, list, True, average, name, op, prescale_factor, postscale_factor, process_set, True
    ).wait()
    return list(tensors)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[Tensor]]:
    """As `grouped_allreduce_`, but gives a handle for the whole group. Collective; does not block."""
    return submit_allreduce(
        tensors, list, True, average, name, op, prescale_factor, postscale_factor, process_set, False
    )


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
    identity = checked_id(process_set)
    name = generated_name("allgather", identity) if name is None else name
    with Checking("allgather", name, identity):
        _check_tensors(tensors, "allgather", name)
    if any(map(is_recorded, tensors)):
        return list(Allgather.apply(name, process_set, *tensors)[: len(tensors)])
    return submit_allgather(tensors, lambda gathered, _: gathered, name, process_set, True).wait()


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[list[Tensor]]:
    """As `grouped_allgather`, but gives a handle for the whole group. Collective; does not block."""
    return submit_allgather(tensors, lambda gathered, _: gathered, name, process_set, False)


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
    identity = checked_id(process_set)
    name = generated_name("reducescatter", identity) if name is None else name
    with Checking("reducescatter", name, identity):
        call = Reduction(chosen_op(None, op), name, prescale_factor, postscale_factor, process_set)
        payloads, contexts = _compressed(tensors, "reducescatter", name, compression)
    results = Reducescatter.apply(call, *payloads) if any(map(is_recorded, payloads)) else scattered(payloads, call)
    return _decompressed(results, contexts, compression)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[Tensor]]:
    """As `grouped_reducescatter`, but gives a handle for the whole group. Collective; does not block."""
    return submit_reducescatter(tensors, list, name, op, process_set, prescale_factor, postscale_factor, False)


def _check_tensors(tensors: Sequence[Tensor], kind: str, name: str) -> None:
    check_group(tensors, kind)
    for tensor in tensors:
        check_tensor(tensor, name)


def _compressed(
    tensors: Sequence[Tensor], kind: str, name: str, compression: Compressor
) -> tuple[list[Tensor], list[Any]]:
    _check_tensors(tensors, kind, name)
    check_compression(compression)
    pairs = [compression.compress(tensor) for tensor in tensors]
    return [payload for payload, _ in pairs], [context for _, context in pairs]


def _decompressed(results: Sequence[Tensor], contexts: Sequence[Any], compression: Compressor) -> list[Tensor]:
    return [compression.decompress(result, context) for result, context in zip(results, contexts, strict=True)]
