"""Tensors of unusual kinds in process groups of our backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import horovodish.torch as hvd
from horovodish.errors import (
    MismatchError,
    UnsupportedTensorError,
)
from support.on_ranks import on_ranks
from support.process_groups import begin

OPS = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)


@on_ranks(2)
def test_tensors_without_plain_memory(tmp_path: Path) -> None:
    """A view that negates or conjugates its memory, and tensors that have none."""
    begin(tmp_path)
    rank, size, world = hvd.rank(), hvd.size(), dist.group.WORLD

    def negated(value: float) -> Tensor:
        return torch._neg_view(torch.full((2,), -value))

    own, everybodys = negated(rank + 1.0), [1.0, 1.0, 2.0, 2.0]
    whole = torch.zeros(2 * size)
    world._allgather_base(whole, own).wait()
    assert whole.tolist() == everybodys
    dist.all_to_all_single(whole, torch._neg_view(-torch.tensor(everybodys)))
    assert whole.tolist() == [rank + 1.0] * 4
    dist.all_reduce(own, op=ReduceOp.PRODUCT)
    assert own.tolist() == [2.0, 2.0]
    dist.reduce(own := negated(rank + 1.0), 0, op=ReduceOp.MAX)
    assert rank or own.tolist() == [2.0, 2.0]
    dist.broadcast(own := negated(rank + 1.0), 1)
    assert own.tolist() == [2.0, 2.0]
    world.broadcast([own := torch.full((2,), 1j * (rank + 1)).conj()], _broadcast_from(1)).wait()
    assert own.tolist() == [-2j, -2j]

    mesh = init_device_mesh("cpu", (size,))
    sharded, plain = distribute_tensor(torch.ones(2 * size), mesh, [Shard(0)]), torch.ones(2)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: dist.all_reduce(sharded),
        lambda: dist.broadcast(sharded, 0),
        lambda: dist.reduce(sharded, 0),
        lambda: world._allgather_base(sharded, plain).wait(),
        lambda: world._allgather_base(torch.ones(2 * size, device="meta"), torch.ones(2, device="meta")).wait(),
    )
    for call in calls:
        said = r", call \d+ of process group 0: .*(no memory of its own, like a DTensor|device meta is not supported)"
        with pytest.raises(UnsupportedTensorError, match=said):
            call()
    quantized, room = (torch.quantize_per_tensor(torch.ones(each), 0.1, 0, torch.quint8) for each in (2, 2 * size))
    with pytest.raises(UnsupportedTensorError, match=r"^all_gather_single, call \d+ of process group 0: dtype"):
        world._allgather_base(room, quantized).wait()
    dist.destroy_process_group()


@on_ranks(2)
def test_what_functional_collectives_bring(tmp_path: Path) -> None:
    """Their results are no plain tensors. `DTensor.to_local()` gives such a result, too."""
    begin(tmp_path)
    rank, world = hvd.rank(), dist.group.WORLD

    def sum_of(*values: float) -> Tensor:
        return functional.all_reduce(torch.tensor(values), "sum", world)

    own = sum_of(1.0, 2.0)
    dist.all_reduce(own)
    assert own.tolist() == [4.0, 8.0]
    dist.broadcast(own := sum_of(1.0 + rank), 0)
    assert own.tolist() == [3.0]
    came = [torch.zeros(1), torch.zeros(1)]
    dist.all_gather(came, sum_of(1.0))
    assert came == [torch.tensor([2.0])] * 2
    dist.all_to_all_single(whole := torch.zeros(2), sum_of(1.0, 2.0))
    assert whole.tolist() == [2.0 * (rank + 1)] * 2
    dist.reduce_scatter_tensor(part := torch.zeros(1), sum_of(1.0, 2.0))
    assert part.tolist() == [4.0 * (rank + 1)]
    parts = [sum_of(3.0), sum_of(4.0)]
    dist.scatter(part, parts if rank == 0 else None)
    assert part.tolist() == [6.0 + 2 * rank]
    own = sum_of(5.0)
    dist.send(own, 1) if rank == 0 else dist.recv(part, 0)
    dist.send(part, 0) if rank else dist.recv(own, 1)
    assert own.tolist() == [10.0]
    dist.destroy_process_group()


@on_ranks(2)
def test_sparse_tensors_of_different_shapes(tmp_path: Path) -> None:
    """The rows of each rank are within the shapes of both."""
    begin(tmp_path)
    rank = hvd.rank()
    tensor = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.ones(1, 3), (4 + rank, 3))
    said = r"^all_reduce, call 1 of process group 0: .* its shape: rank 0 has \(4, 3\), rank 1 has \(5, 3\)"
    with pytest.raises(MismatchError, match=said):
        dist.all_reduce(tensor)
    dist.destroy_process_group()


@on_ranks(2)
def test_truths_are_scattered_as_they_are_reduced(tmp_path: Path) -> None:
    begin(tmp_path)
    rank, size = hvd.rank(), hvd.size()
    for op in OPS:
        reduced, scattered = torch.tensor([rank == 0, True, False, rank == 1]), torch.zeros(2, dtype=torch.bool)
        dist.reduce_scatter(scattered, list(reduced.clone().split(2)), op=op)
        dist.all_reduce(reduced, op=op)
        assert scattered.tolist() == reduced.chunk(size)[rank].tolist(), op
    dist.destroy_process_group()


def _broadcast_from(root: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = root
    return options
