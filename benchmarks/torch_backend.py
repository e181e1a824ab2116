"""torch.distributed over our engine and over gloo:  horovodish run -np 2 python benchmarks/torch_backend.py

First single calls of some sizes, then steps of DDP and FSDP2. Both backends are in the same processes and take turns.
Times are medians over all ranks; a ratio below 1 means that ours takes less time. With the words `memory gloo` or
`memory horovodish` it shows how much memory a rank needs for FSDP2 on that backend: each has a job of its own.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from rounds import alternate, say, timed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torchrun_variables import set_torchrun_variables

import horovodish as hvd
import horovodish.torch.backend

SIZES = {4: 200, 64 << 10: 100, 1 << 20: 40, 64 << 20: 3}
"""Bytes, and how many calls a block has."""
ROUNDS = 9


def mlp() -> nn.Module:
    """8 x Linear(2048, 2048): 128 MiB of gradients in 16 tensors."""
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(2048, 2048), nn.ReLU())])


def calls(group: dist.ProcessGroup, count: int) -> dict[str, Callable[[], object]]:
    """By name, one call on tensors of `count` numbers."""
    size, rank = group.size(), group.rank()
    tensor, whole = torch.ones(count), torch.ones(count * size)
    found = {
        "all_reduce": lambda: dist.all_reduce(tensor, group=group),
        "broadcast": lambda: dist.broadcast(tensor, 0, group=group),
        "all_gather": lambda: group._allgather_base(whole, tensor).wait(),
        "reduce_scatter": lambda: group._reduce_scatter_base(tensor, whole).wait(),
    }
    if rank < 2:
        found["send"] = lambda: back_and_forth(tensor, group)
    return found


def back_and_forth(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    if group.rank() == 0:
        dist.send(tensor, 1, group=group)
        dist.recv(tensor, 1, group=group)
    else:
        dist.recv(tensor, 0, group=group)
        dist.send(tensor, 0, group=group)


def steps(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], object]:
    model = wrap(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(16, 2048)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


def sharded(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def compare(what: str, ours: Callable[[], object], gloos: Callable[[], object], count: int) -> None:
    contenders = {"ours": timed(ours), "gloo": timed(gloos)}
    seconds = alternate(contenders, ROUNDS, dict.fromkeys(contenders, count))
    medians = {name: statistics.median(values) * 1e6 for name, values in seconds.items()}
    ratio = medians["ours"] / medians["gloo"]
    say(f"{what:28} {medians['ours']:10.0f} {medians['gloo']:10.0f} {ratio:8.2f}")


def memory_of_fsdp2(backend: str) -> None:
    dist.init_process_group(backend)
    assert dist.group.WORLD is not None
    step = steps(lambda model: sharded(model, dist.group.WORLD))
    step()
    process = Path("/proc/self")
    (process / "clear_refs").write_text("5")  # the peak begins anew
    for _ in range(5):
        step()
    found = re.search(r"VmHWM:\s+(\d+) kB", (process / "status").read_text())
    assert found is not None
    peak = torch.tensor(int(found[1]) / 1024)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"{backend}: a step of FSDP2 needs up to {peak.item():.0f} MiB in a rank")
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["memory"]:
        return memory_of_fsdp2(sys.argv[2])
    hvd.init()
    set_torchrun_variables()
    dist.init_process_group("horovodish")
    ours = dist.group.WORLD
    gloo = dist.new_group(backend="gloo")
    assert ours is not None
    say(f"torch {torch.__version__}, {hvd.size()} ranks; microseconds\n{'':28} {'ours':>10} {'gloo':>10} {'ratio':>8}")
    only = sys.argv[1:]
    for size, count in SIZES.items():
        theirs = calls(gloo, size // 4)
        for name, call in calls(ours, size // 4).items():
            if not only or name in only:
                compare(f"{name} {size} B", call, theirs[name], count)
    wraps: dict[str, Callable[[nn.Module, dist.ProcessGroup], nn.Module]] = {
        "DDP": lambda model, group: DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True),
        "FSDP2": sharded,
    }
    for name, wrap in wraps.items():
        if not only or name in only:
            pair = [steps(lambda model, group=group, wrap=wrap: wrap(model, group)) for group in (ours, gloo)]
            compare(f"step of {name}", *pair, 3)
    dist.destroy_process_group()


main()
