"""Memory, time and traffic of ranks that train with Adam:  horovodish run -np 2 python benchmarks/torch_shards.py WAY

WAY is "" or a word that `shard=` takes; "ddp" for DistributedDataParallel over gloo, "zero" for that with
ZeroRedundancyOptimizer; "fsdp2" for `fully_shard` over our process group. Each way needs a job of its own, because it
is the peak of the whole process that is printed.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torchrun_variables import set_torchrun_variables

import horovodish.torch as hvd
import horovodish.torch.backend  # noqa: F401

WAYS = ["", "states", "gradients", "ddp", "zero", "fsdp2"]


def peak_mib() -> int:
    """The most memory that this process has had so far."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) >> 10


def sent_bytes() -> int:
    """Bytes that this host has sent to other hosts so far."""
    lines = [line.split() for line in Path("/proc/net/dev").read_text().splitlines()]
    return sum(int(words[9]) for words in lines if words[0].startswith("e"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", nargs="?", default="", choices=WAYS)
    parser.add_argument("--layers", type=int, default=20, help="of 2048 x 2048 parameters")
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    way = arguments.way
    hvd.init()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(arguments.layers)])
    kind = torch.optim.Adam
    if way in ("", "states", "gradients"):
        optimizer = hvd.DistributedOptimizer(kind(model.parameters()), model.named_parameters(), shard=way)
    elif way in ("ddp", "zero"):
        set_torchrun_variables()
        dist.init_process_group("gloo")
        parameters = list(model.parameters())
        optimizer = ZeroRedundancyOptimizer(parameters, kind) if way == "zero" else kind(parameters)
        model = nn.parallel.DistributedDataParallel(model)
    else:
        set_torchrun_variables()
        dist.init_process_group("horovodish")
        for layer in [*model, model]:
            fully_shard(layer)
        optimizer = kind(model.parameters())
    begun = peak_mib()
    inputs = torch.randn(8, 2048)
    seconds, sent = [], sent_bytes()
    for _ in range(arguments.steps):
        started = time.perf_counter()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - started)
        if len(seconds) == 1:
            sent = sent_bytes()  # before the first step the ranks compare what they have
    megabytes = (sent_bytes() - sent) / (len(seconds) - 1) / 1e6
    print(
        f"{way or 'not sharded'}: {begun} MiB before the first step, {peak_mib()} MiB at most; "
        f"{statistics.median(seconds[1:]):.3f} s and {megabytes:.1f} MB sent for each step",
        flush=True,
    )
    if dist.is_initialized():
        dist.destroy_process_group()
    hvd.barrier()


main()
