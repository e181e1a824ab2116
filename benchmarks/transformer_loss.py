"""What a codec, a policy of sync= or wait_for= does to the loss of the transformer of examples/torch_transformer.py:

HOROVODISH_PLANE=mpi_ring horovodish run -np 4 python benchmarks/transformer_loss.py --with int8 onebit
horovodish run -np 4 python benchmarks/transformer_loss.py --with "LocalSGD(8)" --rates 3e-3 6e-3 1.2e-2 --steps 1200

On the plane mpi_ring every rank counts as a host, so codes travel between all ranks. The gradients of all matrices are
encoded, small ones and embeddings, too. Seeds choose weights and batches. A row has the mean loss on other text over
the seeds, at the best of the learning rates. The last column compares it with synchronous training in float32, at the
best rate of that. 300 steps take about a minute on two cores that do nothing else.
"""

import argparse
import contextlib
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import horovodish.torch as hvd

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import torch_transformer as example

BLOCKS, WARMUP_STEPS, TESTED = 8, 40, 400
LATE_SHARE, LATE_SECONDS = 0.1, 0.5
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9),
}


def is_matrix(_: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2


CODECS: dict[str, Any] = {
    "int8": hvd.Compression.int8(where=is_matrix),
    "int4": hvd.Compression.int4(where=is_matrix),
    "ternary": hvd.Compression.ternary(where=is_matrix),
    "onebit": hvd.Compression.onebit(where=is_matrix),
    "onebit, start=100": hvd.Compression.onebit(where=is_matrix, start=100),
    "powersgd(4)": hvd.Compression.powersgd(4, where=is_matrix),
    "powersgd(2), start=2": hvd.Compression.powersgd(2, where=is_matrix, start=2),
}
INT8 = hvd.Compression.int8
POLICIES: dict[str, Callable[[int], Any]] = {
    "LocalSGD(8)": lambda _: hvd.LocalSGD(8),
    "LocalSGD(8) after a third": lambda third: hvd.LocalSGD(8, after=third),
    "DiLoCo(20)": lambda _: hvd.DiLoCo(20),
    "DiLoCo(100), 4 fragments, overlap 1, int8": lambda _: hvd.DiLoCo(100, fragments=4, overlap=1, compression=INT8),
    "the same after a third": lambda third: hvd.DiLoCo(100, after=third, fragments=4, overlap=1, compression=INT8),
}
"""Given a third of the steps."""
EXACT, LATE, DDP = "every step", "wait_for=3, a rank is late", "powersgd(2), start=2, of DDP over gloo"
CONTENDERS = [EXACT, *CODECS, *POLICIES, LATE, DDP]


def options_of(contender: str, steps: int) -> dict[str, Any]:
    """For `DistributedOptimizer`."""
    if contender in POLICIES:
        return {"sync": POLICIES[contender](steps // 3)}
    if contender == LATE:
        return {"wait_for": hvd.size() - 1}
    return {"compression": CODECS[contender]} if contender in CODECS else {}


def trained(optimizer: Any, model: nn.Module, blocks: torch.Tensor, steps: int, seed: int, *, is_late: bool) -> None:
    """Takes the steps. Every rank has batches of its own."""
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=WARMUP_STEPS)
    order = torch.Generator().manual_seed(seed * hvd.size() + hvd.rank())
    chance = random.Random(0)
    for step in itertools.count():
        if getattr(optimizer, "steps", step) >= steps:
            return
        if is_late and hvd.rank() == hvd.size() - 1 and chance.random() < LATE_SHARE:
            time.sleep(LATE_SECONDS)
        batch = blocks[torch.randint(len(blocks), (BLOCKS,), generator=order)]
        optimizer.zero_grad()
        example.loss_of(model, batch, torch.float32).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()


def with_hook(model: nn.Module) -> nn.Module:
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1024)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped


def loss(optimizer_name: str, name: str, rate: float | None, seed: int, steps: int) -> float:
    """The loss on other text."""
    characters, blocks, tested = example.blocks_of(None)
    torch.manual_seed(seed)
    model = example.Transformer(len(characters))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    for group in optimizer.param_groups:
        group["lr"] = rate or group["lr"]
    if name != DDP:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options_of(name, steps))
    model.train()
    trained(optimizer, with_hook(model) if name == DDP else model, blocks, steps, seed, is_late=name == LATE)
    hvd.barrier()
    with optimizer.synchronized() if name in POLICIES else contextlib.nullcontext():
        return float(example.test(model, tested[:TESTED], torch.float32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rates", type=float, nargs="+", default=[None], help="learning rates; by default a usual one")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=["AdamW"])
    parser.add_argument("--with", nargs="+", choices=CONTENDERS, default=CONTENDERS, dest="names")
    options = parser.parse_args()
    peers.start()
    peers.say(f"{peers.setup()}\n")
    peers.say(f"{options.steps} steps of {BLOCKS} blocks of {example.CONTEXT} characters on each rank")
    peers.say(f"{'optimizer':<9} {'contender':<42} {'rate':>7} {'loss':>7}   above {EXACT}")
    for optimizer in options.optimizers:
        exact = 0.0
        for name in dict.fromkeys([EXACT, *options.names]):
            found = {
                rate: statistics.mean(loss(optimizer, name, rate, seed, options.steps) for seed in range(options.seeds))
                for rate in options.rates
            }
            rate, least = min(found.items(), key=lambda pair: pair[1])
            exact = exact or least
            peers.say(f"{optimizer:<9} {name:<42} {rate or 'usual':>7} {least:>7.4f}   {least / exact - 1:+.1%}")
    peers.stop()


if __name__ == "__main__":
    main()
