"""Optimizers and process groups give the same on a GPU as in host memory, with each of their options."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import horovodish.torch as hvd
import horovodish.torch.elastic
from support.gpu import needs_gpu
from support.process_groups import begin, numbers
from support.ranks import run_ranks

SHARED = {"HOROVODISH_TEST_SHARED_GPU": "1", "HOROVODISH_PLANE": "nccl"}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"op": hvd.Sum},
    "Adasum": {"op": hvd.Adasum},
    "predivide": {"gradient_predivide_factor": 2.0},
    "windows": {"backward_passes_per_step": 2},
    "fp16": {"compression": hvd.Compression.fp16},
    "bf16": {"compression": hvd.Compression.bf16},
    "int8": {"compression": hvd.Compression.int8},
    "PowerSGD": {"compression": hvd.Compression.powersgd(2)},
    "groups": {"num_groups": 2},
    "states": {"shard": "states"},
    "gradients": {"shard": "gradients"},
    "whole states": {"shard": "states", "shard_by": "parameter"},
    "local SGD": {"sync": hvd.LocalSGD(3)},
    "DiLoCo": {"sync": hvd.DiLoCo(4, fragments=2, overlap=1)},
    "wait for all": {"wait_for": hvd.size},
}


def network(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(8, 300), nn.ReLU(), nn.LayerNorm(300), nn.Linear(300, 9), nn.ReLU(), nn.Linear(9, 4))
    return nn.Sequential(*layers).to(device)


def batch(step: int, device: str) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + hvd.rank())).to(device)


def parameters_of(model: nn.Module) -> list[Tensor]:
    wholes = [each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()]
    return [each.detach().cpu() for each in wholes]


def trained(model: nn.Module, optimizer: Any, device: str, steps: Iterable[int] = range(8)) -> list[Tensor]:
    for step in steps:
        optimizer.zero_grad()
        model(batch(step, device)).square().mean().backward()
        optimizer.step()
    return parameters_of(model)


def trained_with(options: dict[str, Any], device: str) -> list[Tensor]:
    options = {key: value() if value is hvd.size else copy.deepcopy(value) for key, value in options.items()}
    model = network(device)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)
    found = trained(model, optimizer, device)
    if "shard" in options:  # saved and loaded within a run
        full = optimizer.full_state_dict()
        optimizer.load_state_dict(hvd.broadcast_object(full))
        found = trained(model, optimizer, device, range(8, 11))
    if "sync" in options:
        optimizer.end_round()
        found = parameters_of(model)
    return found


def close(ours: list[Tensor], theirs: list[Tensor], what: str) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-3, atol=2e-4, msg=lambda text: f"{what}: {text}")


def every_option(device: str) -> None:
    hvd.init()
    for what, options in OPTIONS.items():
        close(trained_with(options, device), trained_with(options, "cpu"), what)
    mixed_precision(device)
    state_that_is_kept(device)


def mixed_precision(device: str) -> None:
    model, kind = network(device), torch.device(device).type
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    scaler = torch.amp.GradScaler(kind, init_scale=2.0**40, enabled=kind == "cuda")  # the first step overflows
    for step in range(20):
        optimizer.zero_grad()
        with torch.autocast(kind, torch.float16 if kind == "cuda" else torch.bfloat16):
            loss = model(batch(step, device)).square().mean()
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    hvd.check_consistency(model)
    assert all(torch.isfinite(each).all() for each in parameters_of(model))


def state_that_is_kept(device: str) -> None:
    model = network(device)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = horovodish.torch.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    state.commit()
    expected = trained(model, optimizer, device)
    state.restore()
    close(trained(model, optimizer, device), expected, "restored")
    state.sync()
    hvd.check_consistency(model)


def process_groups(device: str, folder: Path) -> None:
    hvd.init()
    begin(folder)
    calls(device)
    reduce_scatters_and_sends(device)
    parallel_models(device)
    dist.destroy_process_group()


def calls(device: str) -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64):
        for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG):
            if op == ReduceOp.AVG and not dtype.is_floating_point:
                continue
            for shape in ((), (7,), (0,), (300, 40)):
                own = numbers(shape, dtype, rank)
                on_gpu = own.to(device)
                dist.all_reduce(own, op)
                dist.all_reduce(on_gpu, op)
                assert torch.equal(on_gpu.cpu(), own), (dtype, op, shape)
        own = numbers((2, 3), dtype, rank).to(device)
        everyones = [numbers((2, 3), dtype, each).to(device) for each in range(size)]
        room = [torch.zeros_like(own) for _ in range(size)]
        dist.all_gather(room, own)
        assert torch.equal(torch.stack(room), torch.stack(everyones))
        dist.scatter(own, everyones if rank == 0 else None, 0)
        assert torch.equal(own, everyones[rank])
        dist.broadcast(own, size - 1)
        assert torch.equal(own, everyones[-1])
        dist.all_to_all_single(own[:1].repeat(size, 1), own[:1].repeat(size, 1))
    found: list[Any] = [None] * size
    dist.all_gather_object(found, torch.full((2,), float(rank), device=device))
    assert [each.tolist() for each in found] == [[float(each)] * 2 for each in range(size)]
    dist.barrier()


def reduce_scatters_and_sends(device: str) -> None:
    rank, size = hvd.rank(), hvd.size()
    whole = torch.arange(5.0 * size, device=device) + rank
    own = torch.zeros(5, device=device)
    work = dist.reduce_scatter_tensor(own, whole, async_op=True)
    (doubled,) = work.get_future().then(lambda future: [future.value()[0] * 2]).wait()
    expected = (torch.arange(5.0 * size) * size + sum(range(size)))[5 * rank : 5 * rank + 5]
    assert torch.equal(doubled.cpu(), expected * 2) and torch.equal(own.cpu(), expected)
    group = dist.new_group([size - 1])
    if rank == size - 1:
        dist.all_reduce(own, group=group)
        assert torch.equal(own.cpu(), expected)
    if size == 1:
        return
    for count in (1, 70_000):
        leaves, comes = torch.full((count,), float(rank), device=device), torch.zeros(count, device=device)
        leaves += 1  # by a kernel that the send must wait for
        works = [dist.isend(leaves, (rank + 1) % size), dist.irecv(comes, (rank - 1) % size)]
        for each in works:
            each.wait()
        assert torch.equal(comes.cpu(), torch.full((count,), (rank - 1) % size + 1.0))


def parallel_models(device: str) -> None:
    found: dict[str, list[list[Tensor]]] = {}
    for where in (device, "cpu"):
        model = DistributedDataParallel(network(where))
        found.setdefault("DDP", []).append(trained(model, torch.optim.SGD(model.parameters(), 0.1), where))
        sharded, mesh = network(where), init_device_mesh(torch.device(where).type, (hvd.size(),))
        for layer in (sharded[0], sharded[3]):
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        found.setdefault("FSDP2", []).append(trained(sharded, torch.optim.SGD(sharded.parameters(), 0.1), where))
    for what, pair in found.items():
        close(*pair, what)


@pytest.mark.gpu
@pytest.mark.parametrize("np", [1, 2])
def test_every_option(np: int) -> None:
    needs_gpu()
    run_ranks(every_option, np, args=("cuda:0",), env=SHARED)


@pytest.mark.gpu
@pytest.mark.parametrize("np", [1, 2])
def test_process_groups(np: int, tmp_path: Path) -> None:
    needs_gpu()
    run_ranks(process_groups, np, args=("cuda:0", tmp_path), env=SHARED)
