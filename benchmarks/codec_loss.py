"""What each codec does to the loss of the transformer of examples/torch_transformer.py:

HOROVODISH_PLANE=mpi_ring horovodish run -np 4 python benchmarks/codec_loss.py

On this plane every rank counts as a host, so codes travel between all ranks. The gradients of all matrices are encoded,
small ones and embeddings, too. Each row is the mean loss on other text over the seeds, which choose weights and
batches, and how far it is above float32's. Takes ten minutes on two cores that do nothing else.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import peers
import torch
from torch import nn

import horovodish.torch as hvd
from horovodish.collectives.codecs import CodecCompressor

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import torch_transformer as example

BLOCKS, WARMUP_STEPS, TESTED = 8, 40, 400
OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9),
}


def is_matrix(_: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2


CODECS: dict[str, Any] = {
    "float32": hvd.Compression.none,
    "int8": hvd.Compression.int8(where=is_matrix),
    "int4": hvd.Compression.int4(where=is_matrix),
    "ternary": hvd.Compression.ternary(where=is_matrix),
    "onebit": hvd.Compression.onebit(where=is_matrix),
    "onebit, start=100": hvd.Compression.onebit(where=is_matrix, start=100),
    "powersgd(4)": hvd.Compression.powersgd(4, where=is_matrix),
}


def trained(optimizer_name: str, compression: CodecCompressor | Any, seed: int, steps: int) -> float:
    """The loss on other text. Every rank has batches of its own."""
    characters, blocks, tested = example.blocks_of(None)
    torch.manual_seed(seed)
    model = example.Transformer(len(characters))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    optimizer: Any = OPTIMIZERS[optimizer_name](model.parameters())
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=WARMUP_STEPS)
    order = torch.Generator().manual_seed(seed * hvd.size() + hvd.rank())
    model.train()
    for _ in range(steps):
        batch = blocks[torch.randint(len(blocks), (BLOCKS,), generator=order)]
        optimizer.zero_grad()
        example.loss_of(model, batch, torch.float32).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
    return float(example.test(model, tested[:TESTED], torch.float32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=[*OPTIMIZERS])
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=[*CODECS], help="beside float32")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    peers.say(f"{peers.setup()}\n")
    peers.say(f"{options.steps} steps of {BLOCKS} blocks of {example.CONTEXT} characters on each rank")
    peers.say(f"{'optimizer':<9} {'codec':<18} {'loss':>7}   above float32: mean, of each seed")
    for optimizer in options.optimizers:
        exact: list[float] = []
        for name in dict.fromkeys(["float32", *options.codecs]):
            losses = [trained(optimizer, CODECS[name], seed, options.steps) for seed in range(options.seeds)]
            exact = exact or losses
            above = [found / its - 1 for found, its in zip(losses, exact, strict=True)]
            of_seeds = " ".join(f"{its:+.1%}" for its in above)
            mean = statistics.mean(losses)
            peers.say(f"{optimizer:<9} {name:<18} {mean:>7.4f}   {statistics.mean(above):+.1%} ({of_seeds})")
    hvd.shutdown()


if __name__ == "__main__":
    main()
