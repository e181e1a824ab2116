"""What trains on torch.distributed gives the same on our process groups as on gloo's, from the same seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import horovodish.torch as hvd
import horovodish.torch.backend  # noqa: F401
from support.on_ranks import on_ranks
from support.ranks import run_ranks

Program = Callable[[], Iterable[Tensor]]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 9), nn.ReLU(), nn.Linear(9, 4))


def batch(step: int, rank: int | None = None) -> Tensor:
    seed = 100 * step + (dist.get_rank() if rank is None else rank)
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))


def trained(model: nn.Module, optimizer: Any = None, *, steps: int = 3, clip: bool = False) -> list[Tensor]:
    """The parameters and buffers after some steps."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    return state(model)


def state(model: nn.Module) -> list[Tensor]:
    return [whole(each) for each in (*model.parameters(), *model.buffers())]


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().clone()


def ddp(**options: Any) -> Program:
    return lambda: trained(DistributedDataParallel(network(), **options))


def ddp_with_hook(hook: Callable[..., Any], state_of: Callable[[], Any] = lambda: None) -> Program:
    def program() -> list[Tensor]:
        model = DistributedDataParallel(network())
        model.register_comm_hook(state_of(), hook)
        return trained(model, steps=5)

    return program


def ddp_that_accumulates() -> list[Tensor]:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        with nullcontext() if step % 2 else model.no_sync():
            model(batch(step)).square().mean().backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return state(model)


class Branches(nn.Module):
    """Even and odd ranks use other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        chosen = self.odd if dist.get_rank() % 2 else self.even
        return chosen(inputs)


def ddp_with_unused_parameters() -> list[Tensor]:
    torch.manual_seed(0)
    return trained(DistributedDataParallel(Branches(), find_unused_parameters=True))


def ddp_with_buffers() -> list[Tensor]:
    model = network().insert(1, nn.BatchNorm1d(16))
    return trained(DistributedDataParallel(model))


def ddp_with_uneven_inputs() -> list[Tensor]:
    model = DistributedDataParallel(network())
    with model.join():
        return trained(model, steps=2 + dist.get_rank())


def ddp_with_sparse_gradients() -> list[Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.tensor([dist.get_rank(), step, 3])).square().sum().backward()
        optimizer.step()
    return state(model)


def zero() -> list[Tensor]:
    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    found = trained(model, optimizer)
    optimizer.consolidate_state_dict(0)
    moments = optimizer.state_dict()["state"].values() if dist.get_rank() == 0 else ()
    return found + [each["exp_avg"] for each in moments]


def sharded(replicas: int = 1, **options: Any) -> nn.Module:
    """A model of `fully_shard`, HSDP with more than one replica."""
    shards = dist.get_world_size() // replicas
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicas", "shards"))
    mesh = mesh if replicas > 1 else mesh["shards"]
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def trained_by_adam(model: nn.Module) -> list[Tensor]:
    return trained(model, torch.optim.Adam(model.parameters(), 0.01), clip=True)


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def fsdp1() -> list[Tensor]:
    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    trained(model, torch.optim.Adam(model.parameters(), 0.01))
    with FullyShardedDataParallel.summon_full_params(model):
        return state(model)


def dtensor() -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    given = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    by_rows = distribute_tensor(given, mesh, [Shard(0)])
    by_columns = by_rows.redistribute(mesh, [Shard(1)])
    everywhere = by_columns.redistribute(mesh, [Replicate()])
    assert torch.equal(everywhere.to_local(), given)
    return [by_columns.to_local(), whole(by_rows @ everywhere.T), whole(by_columns.sum(1)), whole(by_rows.mean())]


def tensor_parallel() -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(network(), mesh, plan)
    output = model(batch(0, rank=0))
    output.square().sum().backward()
    return [output, *(whole(each.grad) for each in model.parameters())]


def pipelined(schedule: Callable[..., Any]) -> Program:
    def program() -> list[Tensor]:
        rank, model = dist.get_rank(), network()
        part = model[:3] if rank == 0 else model[3:]
        stage = PipelineStage(part, rank, 2, torch.device("cpu"))
        run = schedule(stage, 3, loss_fn=lambda outputs, target: (outputs - target).square().mean())
        losses: list[Tensor] = []
        for step in range(2):
            if rank == 0:
                run.step(batch(step, rank=0))
            else:
                run.step(target=torch.ones(6, 4), losses=losses)
        return [*losses, *(each.grad for each in part.parameters())]

    return program


def compiled(backend: str) -> Program:
    def program() -> list[Tensor]:
        world = dist.group.WORLD

        def function(given: Tensor) -> Tensor:
            total = functional.all_reduce(given, "sum", world)
            everything = functional.all_gather_tensor(total, 0, world)
            part = functional.reduce_scatter_tensor(everything * 2, "sum", 0, world)
            return functional.all_to_all_single(part, None, None, world) + functional.broadcast(given, 1, world)

        torch._dynamo.reset()
        given = torch.arange(4.0) + dist.get_rank()
        found = torch.compile(function, backend=backend, fullgraph=True)(given)
        torch.testing.assert_close(found, function(given))
        return [found]

    return program


PROGRAMS: dict[str, Program] = {
    "DDP": ddp(),
    "DDP, static graph": ddp(static_graph=True),
    "DDP, many buckets": ddp(gradient_as_bucket_view=True, bucket_cap_mb=0.0005),
    "DDP, no_sync": ddp_that_accumulates,
    "DDP, unused parameters": ddp_with_unused_parameters,
    "DDP, buffers": ddp_with_buffers,
    "DDP, join": ddp_with_uneven_inputs,
    "DDP, sparse gradients": ddp_with_sparse_gradients,
    "DDP, float16": ddp_with_hook(default_hooks.fp16_compress_hook),
    "DDP, PowerSGD": ddp_with_hook(
        powerSGD_hook.powerSGD_hook,
        lambda: powerSGD_hook.PowerSGDState(dist.group.WORLD, start_powerSGD_iter=2, min_compression_rate=0.5),
    ),
    "ZeroRedundancyOptimizer": zero,
    "fully_shard": lambda: trained_by_adam(sharded()),
    "fully_shard, mixed precision": lambda: trained_by_adam(sharded(mp_policy=MIXED)),
    "FullyShardedDataParallel": fsdp1,
    "DTensor": dtensor,
    "tensor parallelism": tensor_parallel,
    "pipeline, GPipe": pipelined(ScheduleGPipe),
    "pipeline, 1F1B": pipelined(Schedule1F1B),
    "torch.compile": compiled("aot_eager"),
}


def results(backend: str, folder: Path, programs: dict[str, Program]) -> dict[str, list[Tensor]]:
    store = dist.FileStore(str(folder / f"{backend} of {hvd.size()}"), hvd.size())
    dist.init_process_group(backend, store=store, rank=hvd.rank(), world_size=hvd.size())
    found = {name: list(program()) for name, program in programs.items()}
    assert dist.get_backend() == backend
    dist.destroy_process_group()
    return found


def check_like_gloo(folder: Path, programs: dict[str, Program]) -> None:
    expected, found = (results(backend, folder, programs) for backend in ("gloo", "horovodish"))
    for name in programs:
        assert expected[name]
        torch.testing.assert_close(found[name], expected[name], msg=lambda text, name=name: f"{name}: {text}")


@on_ranks(2)
def test_programs(tmp_path: Path) -> None:
    check_like_gloo(tmp_path, PROGRAMS)


@pytest.mark.soak
@on_ranks(4)
def test_replicas_of_shards(tmp_path: Path) -> None:
    check_like_gloo(
        tmp_path,
        {
            "HSDP": lambda: trained_by_adam(sharded(2)),
            "HSDP, mixed precision": lambda: trained_by_adam(sharded(2, mp_policy=MIXED)),
        },
    )


def _compiles_by_inductor(folder: Path) -> None:
    check_like_gloo(folder, {"inductor": compiled("inductor")})


@pytest.mark.soak
def test_inductor(tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # no processes that outlive the test
    run_ranks(_compiles_by_inductor, 2, args=(tmp_path,), env=env, begin=True, fresh=True)


def _saves(folder: Path) -> list[Tensor]:
    def program() -> list[Tensor]:
        model = sharded()
        trained_by_adam(model)
        checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder / "saved")
        return state(model)

    return results("horovodish", folder, {"": program})[""]


def _loads(folder: Path, saved: list[Tensor]) -> None:
    def program() -> list[Tensor]:
        model = sharded()
        found = {"model": model.state_dict()}
        checkpoint.load(found, checkpoint_id=folder / "saved")
        model.load_state_dict(found["model"])
        return state(model)

    for backend in ("gloo", "horovodish"):
        torch.testing.assert_close(results(backend, folder, {"": program})[""], saved, rtol=0, atol=0)


@pytest.mark.soak
def test_a_checkpoint_for_fewer_ranks(tmp_path: Path) -> None:
    saved = run_ranks(_saves, 4, args=(tmp_path,), begin=True)[0]
    for ranks in (3, 2):
        run_ranks(_loads, ranks, args=(tmp_path, saved), begin=True)
