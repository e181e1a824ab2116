"""A training step of the transformer with PowerSGD of rank 2, beside DDP with its PowerSGD hook over gloo:

python benchmarks/two_hosts.py --gbit 1 1 benchmarks/powersgd_step.py

In turns: the step without communication, after which the ranks meet (`alone`), ours, and DDP's. What a step takes
longer than `alone` is the price of PowerSGD. Times are of single steps, on all ranks.
"""

import argparse
import statistics

import peers
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch_step import MODELS, step_of
from training_steps import waiting, warm_up

import horovodish.torch as hvd

RANK, EXACT_STEPS, BLOCK_SECONDS = 2, 2, 2.0
"""DDP's hook needs two steps before the first one that approximates."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    peers.start()
    peers.say(f"{peers.setup()}\n")
    torch.manual_seed(0)
    ours, inputs = MODELS["transformer"]()
    alone, ddp = (MODELS["transformer"]()[0] for _ in range(2))
    # One bucket: with more, the hook's callbacks reduce in an order that differs by rank, and gloo aborts.
    wrapped = DistributedDataParallel(ddp, gradient_as_bucket_view=True, bucket_cap_mb=1024)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=EXACT_STEPS)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    sgd = torch.optim.SGD(ours.parameters(), lr=1e-3)
    codec = hvd.Compression.powersgd(RANK, start=EXACT_STEPS)
    distributed = hvd.DistributedOptimizer(sgd, ours.named_parameters(), compression=codec)
    steps = {
        "alone": waiting(step_of(alone, torch.optim.SGD(alone.parameters(), lr=1e-3), inputs)),
        "ours": step_of(ours, distributed, inputs),
        "DDP": step_of(wrapped, torch.optim.SGD(ddp.parameters(), lr=1e-3), inputs),
    }
    warm_up(steps)
    seconds = peers.alternate(steps, options.rounds, peers.calls_within(steps, BLOCK_SECONDS, 20))
    middle = {name: statistics.median(its) * 1e3 for name, its in seconds.items()}
    peers.say(f"{'step':<8} {'min ms':>9} {'p50 ms':>9} {'above alone':>12}")
    for name, its in seconds.items():
        peers.say(f"{name:<8} {min(its) * 1e3:>9.1f} {middle[name]:>9.1f} {middle[name] - middle['alone']:>12.1f}")
    peers.stop()


if __name__ == "__main__":
    main()
