"""Sends and receives between two ranks, for the shims of frameworks."""

from __future__ import annotations

from typing import Any

from horovodish import _native
from horovodish.collectives.adapter import Adapter
from horovodish.collectives.operation import Member, Operation
from horovodish.collectives.process_sets import ProcessSet, checked_id, global_process_set
from horovodish.collectives.submission import Handle, generated_name, submit

__all__ = ["ANY_RANK", "receive", "send"]

ANY_RANK = -1
_TAGS = 1 << 32


def send(
    adapter: Adapter[Any],
    tensor: Any,
    rank: int,
    tag: int = 0,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    waits: bool = False,
) -> Handle[int]:
    """Send a tensor to one other rank. Only this rank calls it, and the other one calls `receive`. Does not block.

    Between two ranks, sends of one tag are received in their order. A small tensor is sent before the other rank
    receives: the handle is then settled, and the tensor may change. A large one waits for the receive.

    Args:
        adapter: knows the memory of the tensor.
        tensor: of any dtype and shape. In host memory it must not change before the handle is settled. Of a tensor on
            a GPU, a copy in host memory travels: the call waits until the GPU has computed it.
        rank: the receiver, a rank of the world and of `process_set`.
        tag: from 0 to 2**32 - 1.
        name: what messages call the operation; None: they name the rank and the tag only.
        process_set: sends keep their order within a process set.
        waits: the caller is about to wait.

    Returns:
        A handle. Its result is `rank`. It raises `MismatchError` if the receive has another dtype or number of
        elements. If it is settled before the receive, this rank prints a warning instead. It raises `RankLostError` if
        a rank of the set is lost, and `HorovodInternalError` if `rank` is this rank or is not in the set.

    Raises:
        UnsupportedTensorError: the engine cannot take the tensor or its dtype.
        ValueError: a tag out of range, or this rank is not in the process set.
        NotInitializedError, ForkedProcessError: as for every operation.
    """
    operation = _operation("send", name, process_set, rank, tag)
    source = adapter.source(tensor, str(operation.name))
    member, is_staged = _member(adapter, operation, source)
    if is_staged:
        (source,), _ = adapter.copies([source], [])
        member, _ = _member(adapter, operation, source)
    return submit(operation, [member], source, lambda _: rank, waits=waits)


def receive(
    adapter: Adapter[Any],
    tensor: Any,
    rank: int = ANY_RANK,
    tag: int = 0,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    waits: bool = False,
) -> Handle[int]:
    """Receive a tensor from one other rank, into a tensor. Only this rank and the sender call. Does not block.

    Args:
        adapter: knows the memory of the tensor.
        tensor: with the dtype and the number of elements of the sender's tensor. It is written to until the handle is
            settled; on a GPU, when the handle is waited for, after the work that the current stream has now.
        rank: the sender, a rank of the world and of `process_set`; `ANY_RANK` for whoever sends first.
        tag, name, process_set, waits: as for `send`.

    Returns:
        A handle. Its result is the rank that sent. It raises `MismatchError` if what came has another dtype or number
        of elements, and otherwise as for `send`.

    Raises:
        What `send` raises.
    """
    operation = _operation("receive", name, process_set, rank, tag)
    target = adapter.target(tensor, str(operation.name))
    arrival = target
    member, is_staged = _member(adapter, operation, target)
    if is_staged:
        _, (arrival,) = adapter.copies([], [target])
        order_after = adapter.work_so_far(target)
        member, _ = _member(adapter, operation, arrival)

    def received(native: _native.Handle) -> int:
        if is_staged:
            order_after()
            adapter.copy_back([arrival], [target])
        adapter.written([target])
        return native.sender()

    return submit(operation, [member], arrival, received, waits=waits)


def _operation(kind: str, name: str | None, process_set: ProcessSet, rank: int, tag: int) -> Operation:
    identity = checked_id(process_set)
    name = generated_name(kind, identity) if name is None else name
    if not 0 <= tag < _TAGS:
        raise ValueError(f"{name}: tag={tag} must be a number from 0 to {_TAGS - 1}")
    return Operation(kind, name, process_set, root_rank=rank, tag=tag)


def _member(adapter: Adapter[Any], operation: Operation, tensor: Any) -> tuple[Member, bool]:
    """The tensor as the engine takes it, and whether a copy in host memory travels in its place."""
    member = adapter.member(tensor, tensor, str(operation.name), None)
    return member, adapter.placement(operation, [tensor], [member]).is_staged
