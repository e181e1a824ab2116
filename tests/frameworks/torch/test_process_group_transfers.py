"""Sends and receives of process groups of torch.distributed over our engine."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import horovodish.torch as hvd
from horovodish.errors import HorovodInternalError, StallError
from support.on_ranks import on_ranks
from support.process_groups import begin, numbers


@on_ranks(3, (3, "mpi_ring"))
def test_sends_and_receives(tmp_path: Path) -> None:
    begin(tmp_path)
    rank, size = hvd.rank(), hvd.size()
    left, right = (rank - 1) % size, (rank + 1) % size
    for count in (0, 1, 1000, 300_000):
        for dtype in (torch.float32, torch.bool, torch.complex64):
            came = torch.zeros(count).to(dtype)
            own = numbers((count,), torch.float32, rank).to(dtype)
            transfers = [dist.P2POp(dist.isend, own, right), dist.P2POp(dist.irecv, came, left)]
            for work in dist.batch_isend_irecv(transfers):
                work.wait()
            assert torch.equal(came, numbers((count,), torch.float32, left).to(dtype))
    if rank == 0:
        first, second = torch.zeros(1), torch.zeros(1)
        dist.recv(second, src=1, tag=2)
        dist.recv(first, src=1, tag=1)
        assert (first.item(), second.item()) == (1.0, 2.0)
        senders = [dist.recv(first, tag=3) for _ in range(size - 1)]
        assert sorted(senders) == list(range(1, size))
    else:
        if rank == 1:
            dist.send(torch.ones(1), dst=0, tag=1)
            dist.send(torch.full((1,), 2.0), dst=0, tag=2)
        dist.send(torch.full((1,), float(rank)), dst=0, tag=3)
    objects = [None]
    if rank == 1:
        dist.send_object_list([{"of": rank}], dst=2)
    elif rank == 2:
        dist.recv_object_list(objects, src=1)
        assert objects == [{"of": 1}]
    with pytest.raises(StallError, match=r"receive from rank \d with tag 9 in process group 0 has taken longer"):
        dist.irecv(torch.zeros(1), src=left, tag=9).wait(timedelta(seconds=0.3))
    own = r"^receive from rank (\d) with tag 0 in process group 0 failed on rank \1: rank \1 is this rank itself"
    with pytest.raises(HorovodInternalError, match=own):
        dist.recv(torch.zeros(1), src=rank)
    dist.barrier()
    dist.isend(torch.full((1,), 5.0), dst=right, tag=9)
    came = torch.zeros(1)
    dist.recv(came, src=left, tag=9)
    assert came.item() == 5.0, "the receive that was given up took nothing"
    dist.destroy_process_group()


@on_ranks(2, (2, "mpi_ring"))
def test_receives_arrive_while_nobody_waits(tmp_path: Path) -> None:
    """Also if they begin when the sender has filled the memory between the two."""
    begin(tmp_path)
    files = dist.FileStore(str(tmp_path / "beside"), 2)
    if hvd.rank() == 0:
        sends = [dist.isend(torch.full((256,), float(each)), 1) for each in range(1000)]
        files.set("sends", "begun")
        for send in sends:
            send.wait()
        files.set("sends", "ended")
    else:
        files.wait(["sends"])
        came = torch.zeros(1000, 256)
        receives = [dist.irecv(each, 0) for each in came]
        while files.get("sends") != b"ended":
            time.sleep(0.01)
        while not all(each.is_completed() for each in receives):
            time.sleep(0.01)
        assert torch.equal(came[:, 0], torch.arange(1000.0))
    dist.barrier()
    dist.destroy_process_group()
