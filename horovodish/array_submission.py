"""The collectives on arrays as operations of the engine: arguments are checked here, and results made."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np

from horovodish import _native, basics
from horovodish.arrays import ITEM_BYTES, Array, SupportsDLPack, address, dtype_code, host_array, writable_array
from horovodish.process_sets import ProcessSet, checked_id, global_process_set
from horovodish.reduce_ops import Adasum, ReduceOp, chosen_op
from horovodish.submission import Checking, Handle, generated_name, submit

__all__ = [
    "Tensor",
    "check_targets_differ",
    "checked_root",
    "checked_splits",
    "only",
    "scattered_rows",
    "submit_allgather",
    "submit_allreduce",
    "submit_alltoall",
    "submit_broadcast",
    "submit_reducescatter",
]

Tensor = Array | SupportsDLPack
T = TypeVar("T")


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


def check_targets_differ(described: Sequence[tuple[int, int, int, tuple[int, ...]]], name: str) -> None:
    """Refuse a group that would write two results to one place.

    Args:
        described: the members as `submit` takes them.
        name: of the operation.

    Raises:
        ValueError: the targets of two of them overlap.
    """
    if len(described) == 1:
        return
    places = [
        (target, target + length * ITEM_BYTES[dtype], index)
        for index, (_, target, dtype, shape) in enumerate(described)
        if (length := math.prod(shape))
    ]
    places.sort()
    for (_, end, one), (begin, _, other) in pairwise(places):
        if begin < end:
            raise ValueError(
                f"{name}: numbers {min(one, other)} and {max(one, other)} of the group are the same memory, at "
                "least in part, which cannot take two results; name each part once, or use the function that is not in "
                "place"
            )


def only(arrays: Sequence[Array]) -> Array:
    """The array of a group of one."""
    return arrays[0]


def submit_allreduce(
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
    identity = checked_id(process_set)
    name = generated_name("allreduce", identity) if name is None else name
    with Checking("allreduce", name, identity):
        chosen = chosen_op(average, op)
        _check_group(tensors, "allreduce")
        pairs = [_source_and_target(tensor, in_place, name) for tensor in tensors]
        described = [_described(source, target, dtype_code(source, name, op=chosen)) for source, target in pairs]
        if in_place:
            check_targets_differ(described, name)
    return submit(
        "allreduce",
        name,
        described,
        keep_alive=pairs,
        result=lambda _: pick([target for _, target in pairs]),
        op=chosen,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        waits=waits,
        process_set_id=identity,
    )


def submit_broadcast(
    tensor: Tensor, in_place: bool, root_rank: int, name: str | None, process_set: ProcessSet, waits: bool
) -> Handle[Array]:
    identity = checked_id(process_set)
    name = generated_name("broadcast", identity) if name is None else name
    with Checking("broadcast", name, identity):
        root = checked_root(root_rank, process_set)
        source, target = _source_and_target(tensor, in_place, name)
        described = _described(source, target, dtype_code(source, name))
    return submit(
        "broadcast",
        name,
        [described],
        keep_alive=(source, target),
        result=lambda _: target,
        root_rank=root,
        waits=waits,
        process_set_id=identity,
    )


def submit_allgather(
    tensors: Sequence[Tensor],
    pick: Callable[[list[Array]], T],
    name: str | None,
    process_set: ProcessSet,
    waits: bool,
) -> Handle[T]:
    identity = checked_id(process_set)
    name = generated_name("allgather", identity) if name is None else name
    with Checking("allgather", name, identity):
        _check_group(tensors, "allgather")
        sources = [host_array(tensor, name) for tensor in tensors]
        sources = [source.reshape(1) if source.ndim == 0 else source for source in sources]
        described = [_rows(source, name) for source in sources]
    return submit(
        "allgather",
        name,
        described,
        keep_alive=sources,
        result=lambda native: pick([_received(native, index, source) for index, source in enumerate(sources)]),
        waits=waits,
        process_set_id=identity,
    )


def submit_alltoall(
    tensor: Tensor, splits: Sequence[int] | Array | None, name: str | None, process_set: ProcessSet, waits: bool
) -> Handle[Array | tuple[Array, Array]]:
    identity = checked_id(process_set)
    name = generated_name("alltoall", identity) if name is None else name
    with Checking("alltoall", name, identity):
        source = host_array(tensor, name)
        if source.ndim == 0:
            raise ValueError(f"{name}: an array of zero dimensions has no rows to send; pass one with a dimension")
        counts = checked_splits(splits, source.shape[0], process_set.size(), name)
        described = _rows(source, name)

    def result(native: _native.Handle) -> Array | tuple[Array, Array]:
        received = _received(native, 0, source)
        return received if splits is None else (received, np.array(native.rows(0), np.int64))

    return submit(
        "alltoall",
        name,
        [described],
        keep_alive=source,
        result=result,
        waits=waits,
        process_set_id=identity,
        splits=counts,
    )


def submit_reducescatter(
    tensors: Sequence[Tensor],
    pick: Callable[[list[Array]], T],
    name: str | None,
    op: ReduceOp,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
    waits: bool,
) -> Handle[T]:
    identity = checked_id(process_set)
    name = generated_name("reducescatter", identity) if name is None else name
    with Checking("reducescatter", name, identity):
        chosen = chosen_op(None, op)
        if chosen is Adasum:
            raise ValueError(f"{name}: op=Adasum is for allreduce; use op=Average or op=Sum")
        _check_group(tensors, "reducescatter")
        pairs = [_source_and_rows(tensor, process_set, name) for tensor in tensors]
        described = [_described(source, target, dtype_code(source, name, op=chosen)) for source, target in pairs]
    return submit(
        "reducescatter",
        name,
        described,
        keep_alive=pairs,
        result=lambda _: pick([target for _, target in pairs]),
        op=chosen,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        waits=waits,
        process_set_id=identity,
    )


def _check_group(tensors: Sequence[object], kind: str) -> None:
    if hasattr(tensors, "__dlpack__"):
        raise TypeError(f"grouped_{kind}: expected a list of arrays, got {type(tensors).__name__}; pass [array]")
    if not tensors:
        raise ValueError(f"grouped_{kind}: the group is empty; pass at least one array")


def _source_and_target(tensor: Tensor, in_place: bool, name: str) -> tuple[Array, Array]:
    if in_place:
        array = writable_array(tensor, name)
        return array, array
    source = host_array(tensor, name)
    return source, np.empty(source.shape, source.dtype)


def _source_and_rows(tensor: Tensor, process_set: ProcessSet, name: str) -> tuple[Array, Array]:
    source = host_array(tensor, name)
    if source.ndim == 0:
        raise ValueError(f"{name}: an array of zero dimensions has no rows to deal out; pass one with a dimension")
    return source, np.empty((scattered_rows(source.shape[0], process_set), *source.shape[1:]), source.dtype)


def _described(source: Array, target: Array, dtype: int) -> tuple[int, int, int, tuple[int, ...]]:
    start = address(source)
    return start, start if target is source else address(target), dtype, source.shape


def _rows(source: Array, name: str) -> tuple[int, int, int, tuple[int, ...]]:
    return address(source), 0, dtype_code(source, name), source.shape


def _received(native: _native.Handle, index: int, source: Array) -> Array:
    """An output that the engine allocated, as an array like `source`."""
    gathered = np.frombuffer(native.output(index), np.uint8).view(source.dtype)
    return gathered.reshape(sum(native.rows(index)), *source.shape[1:])
