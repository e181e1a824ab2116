"""How much of the communication hides behind backward, ours beside DDP:  make bench-hosts

Runs on two hosts with one rank each, joined by a link of 2 Gbit/s in either direction; `two_hosts.py` makes them of
this machine. Every rank has a core of its own, on which backward and communication share what there is. In turns:

- `alone`, the step without communication, in all ranks at once; of it also backward, B.
- for each contender its step, S, and its communication with nothing to hide behind, C: the same gradients in the same
  buckets, reduced after a backward that did not reduce (ours) or as tensors that are as large as DDP's buckets.

What a step takes longer than `alone` is exposed; overlap is the share of C that is not: 1 - (S - alone) / C. It is `at
most` B / C, because what is longer than backward cannot hide behind it, and less by what the core does for
communication (TCP, copies, additions), which delays backward. Times are medians of all ranks.
"""

import os
from collections.abc import Callable

import peers
import psutil
import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_step import MODELS, step_of
from training_steps import OURS, compare_overlaps, options_of, warm_up

import horovodish.torch as hvd

DDP = "DDP"


def take_a_core() -> None:
    """Has all threads of this rank run on one core, which no other rank takes; threads that they start do, too."""
    for thread in psutil.Process().threads():
        os.sched_setaffinity(thread.id, {hvd.rank() % (os.cpu_count() or 1)})


def backward_of(model: nn.Module, inputs: torch.Tensor) -> Callable[[], float]:
    def backward() -> float:
        model.zero_grad()
        loss = model(inputs).square().mean()
        return peers.timed(loss.backward)()

    return backward


def timed_parts(name: str) -> dict[str, Callable[[], float]]:
    """What is timed; training has been warmed up."""
    make = MODELS[name]
    torch.manual_seed(0)
    ours, inputs = make()
    alone, ddp = make()[0], make()[0]
    wrapped = DistributedDataParallel(ddp, gradient_as_bucket_view=True, static_graph=True)
    distributed = hvd.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=1e-3), ours.named_parameters())
    steps = {
        f"{OURS} step": step_of(ours, distributed, inputs),
        f"{DDP} step": step_of(wrapped, torch.optim.SGD(ddp.parameters(), lr=1e-3), inputs),
        "alone": step_of(alone, torch.optim.SGD(alone.parameters(), lr=1e-3), inputs),
    }
    warm_up(steps)
    bucket_bytes = wrapped._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    buckets = [torch.zeros(int(size) // 4) for size in bucket_bytes.split(",")]

    def reduce_ours() -> float:
        distributed.zero_grad()
        with distributed.no_sync():
            ours(inputs).square().mean().backward()
        hvd.barrier()
        return peers.timed(distributed.synchronize)()

    def reduce_buckets() -> None:
        works = [torch.distributed.all_reduce(bucket, async_op=True) for bucket in buckets]
        for work in works:
            work.wait()

    return {
        **steps,
        "backward": backward_of(alone, inputs),
        f"{OURS} communication": reduce_ours,
        f"{DDP} communication": peers.timed(reduce_buckets),
    }


def main() -> None:
    options = options_of(__doc__, ["transformer", "conv", "mlp"], steps=2)
    peers.start()
    take_a_core()
    peers.say(f"{peers.setup()}\n")
    compare_overlaps(options, "backward", timed_parts)
    peers.stop()


if __name__ == "__main__":
    main()
