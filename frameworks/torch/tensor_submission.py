"""The collectives on tensors as operations of the engine: arguments are checked here, and results made.

Every function takes a group of tensors where the operation has groups, and gives a handle whose result `pick` or
`result` makes. None of them is part of the autograd graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from horovodish import _native
from horovodish.array_submission import check_targets_differ, checked_root, checked_splits, scattered_rows
from horovodish.process_sets import ProcessSet, checked_id
from horovodish.reduce_ops import Adasum, ReduceOp, chosen_op
from horovodish.submission import Checking, Handle, generated_name, submit
from horovodish.torch import cuda
from horovodish.torch.tensors import member, rows_of, source_of, target_of

T = TypeVar("T")

Gathered = Callable[[list[Tensor], list[list[int]]], T]
"""Makes a result from the rows of all ranks, tensor by tensor, and from how many of them each rank gave."""


def only(tensors: Sequence[Tensor]) -> Tensor:
    """The tensor of a group of one."""
    return tensors[0]


def submit_allreduce(
    tensors: Sequence[Tensor],
    pick: Callable[[list[Tensor]], T],
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
        check_group(tensors, "allreduce")
        sources, targets, described = [], [], []
        for tensor in tensors:  # a loop, because comprehensions would make small tensors noticeably slower
            source = target_of(tensor, name) if in_place else source_of(tensor, name)
            target = source if in_place else torch.empty_like(source)
            described.append(member(source, target, name, chosen))
            sources.append(source)
            targets.append(target)
        if in_place:
            check_targets_differ(described, name)
        way = cuda.way("allreduce", sources, described, name, chosen, prescale_factor, postscale_factor)
        arrivals = targets
        if way.through_host:
            sources, arrivals = cuda.copies(sources, targets)
            described = [member(source, arrival, name) for source, arrival in zip(sources, arrivals, strict=True)]

    def reduced(_: _native.Handle) -> T:
        if way.through_host:
            cuda.copy_back(arrivals, targets)
        return pick(_written(targets, in_place))

    return submit(
        "allreduce",
        name,
        described,
        keep_alive=(sources, arrivals),
        result=reduced,
        device=way.device,
        current_stream=way.current_stream,
        op=chosen,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        waits=waits,
        process_set_id=identity,
    )


def submit_broadcast(
    tensor: Tensor, in_place: bool, root_rank: int, name: str | None, process_set: ProcessSet, waits: bool
) -> Handle[Tensor]:
    identity = checked_id(process_set)
    name = generated_name("broadcast", identity) if name is None else name
    with Checking("broadcast", name, identity):
        root = checked_root(root_rank, process_set)
        source = target_of(tensor, name) if in_place else source_of(tensor, name)
        target = source if in_place else torch.empty_like(source)
        described = member(source, target, name)
        way = cuda.way("broadcast", [source], [described], name)
    return submit(
        "broadcast",
        name,
        [described],
        keep_alive=(source, target),
        result=lambda _: only(_written([target], in_place)),
        root_rank=root,
        device=way.device,
        current_stream=way.current_stream,
        waits=waits,
        process_set_id=identity,
    )


def submit_allgather(
    tensors: Sequence[Tensor], result: Gathered[T], name: str | None, process_set: ProcessSet, waits: bool
) -> Handle[T]:
    identity = checked_id(process_set)
    name = generated_name("allgather", identity) if name is None else name
    with Checking("allgather", name, identity):
        check_group(tensors, "allgather")
        sources, described = [], []
        for tensor in tensors:
            source = source_of(tensor, name)
            source = source.reshape(1) if source.dim() == 0 else source
            described.append(member(source, None, name))
            sources.append(source)
        way = cuda.way("allgather", sources, described, name)
    return submit(
        "allgather",
        name,
        described,
        keep_alive=sources,
        result=lambda native: result(*_received(native, sources, way)),
        device=way.device,
        current_stream=way.current_stream,
        waits=waits,
        process_set_id=identity,
    )


def submit_alltoall(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None,
    result: Gathered[T],
    name: str | None,
    process_set: ProcessSet,
    waits: bool,
) -> Handle[T]:
    identity = checked_id(process_set)
    name = generated_name("alltoall", identity) if name is None else name
    with Checking("alltoall", name, identity):
        source = rows_of(tensor, name, "send")
        counts = row_counts(splits, source.shape[0], process_set, name)
        described = member(source, None, name)
        way = cuda.way("alltoall", [source], [described], name)
    return submit(
        "alltoall",
        name,
        [described],
        keep_alive=source,
        result=lambda native: result(*_received(native, [source], way)),
        device=way.device,
        current_stream=way.current_stream,
        waits=waits,
        process_set_id=identity,
        splits=counts,
    )


def submit_reducescatter(
    tensors: Sequence[Tensor],
    pick: Callable[[list[Tensor]], T],
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
        check_group(tensors, "reducescatter")
        sources = [rows_of(tensor, name, "deal out") for tensor in tensors]
        targets = [
            source.new_empty((scattered_rows(source.shape[0], process_set), *source.shape[1:])) for source in sources
        ]
        described = [member(source, target, name, chosen) for source, target in zip(sources, targets, strict=True)]
        way = cuda.way("reducescatter", sources, described, name, chosen, prescale_factor, postscale_factor)
        arrivals = targets
        if way.through_host:
            sources, arrivals = cuda.copies(sources, targets)
            described = [member(source, arrival, name) for source, arrival in zip(sources, arrivals, strict=True)]

    def scattered(_: _native.Handle) -> T:
        if way.through_host:
            cuda.copy_back(arrivals, targets)
        return pick(targets)

    return submit(
        "reducescatter",
        name,
        described,
        keep_alive=(sources, arrivals),
        result=scattered,
        device=way.device,
        current_stream=way.current_stream,
        op=chosen,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        waits=waits,
        process_set_id=identity,
    )


def row_counts(splits: Sequence[int] | Tensor | None, rows: int, process_set: ProcessSet, name: str) -> list[int]:
    """As `checked_splits`, of a tensor as well."""
    given = splits.tolist() if isinstance(splits, Tensor) else splits
    return checked_splits(given, rows, process_set.size(), name)


def check_group(tensors: object, kind: str) -> None:
    """Passes groups with members.

    Raises:
        TypeError: one tensor instead of a group, whose rows would be taken for the members.
        ValueError: the group is empty.
    """
    if not isinstance(tensors, list) and isinstance(tensors, Tensor):
        raise TypeError(f"grouped_{kind}: expected a list of tensors, got one tensor; pass [tensor]")
    if not tensors:
        raise ValueError(f"grouped_{kind}: the group is empty; pass at least one tensor")


def _written(targets: list[Tensor], in_place: bool) -> list[Tensor]:
    # Autograd cannot see what the engine writes. If it has saved a tensor for a backward, it must complain as usual.
    if in_place:
        increment_version(targets)
    return targets


def _received(native: _native.Handle, sources: Sequence[Tensor], way: cuda.Way) -> tuple[list[Tensor], list[list[int]]]:
    """The outputs that the engine allocated, as tensors like `sources`, and the number of rows from each rank."""
    tensors, counts = [], []
    for index, source in enumerate(sources):
        rows = native.rows(index)
        shape = (sum(rows), *source.shape[1:])
        counts.append(rows)
        if way.current_stream is not None:
            # Into memory of torch's own allocator, which knows best when it may be used again.
            tensors.append(source.new_empty(shape))
            native.move_output(index, tensors[-1].data_ptr(), way.current_stream())
            continue
        empty = math.prod(shape) == 0  # of which torch.frombuffer makes nothing
        flat = source.new_empty(0) if empty else torch.frombuffer(native.output(index), dtype=source.dtype)
        tensors.append(flat.reshape(shape))
    return tensors, counts
