"""How many samples per second some ranks train on, with data that is made up:

    horovodish run -np 4 python examples/torch_throughput.py --model convnet --batch-size 32 --compression bf16

For a first look at a machine or a network, and for what an option is worth there. One rank alone
(`python examples/torch_throughput.py`) is what to compare with: N ranks that each have as many cores as that one should
train on nearly N times as many samples.
"""

import argparse
import itertools
import time

import torch
from torch import nn

import horovodish.torch as hvd

CLASSES = 100


def mlp() -> tuple[nn.Module, torch.Size]:
    """Wide linear layers: many gradients for little computation."""
    widths = [1024, 2048, 2048, 2048]
    layers = [layer for i in range(3) for layer in (nn.Linear(widths[i], widths[i + 1]), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(widths[-1], CLASSES)), torch.Size([1024])


def convnet() -> tuple[nn.Module, torch.Size]:
    """Convolutions and batch normalization on images of 32 x 32: few gradients for much computation."""
    channels = [3, 32, 64, 128, 256]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(channels):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * channels[-1], CLASSES)), torch.Size([3, 32, 32])


def transformer() -> tuple[nn.Module, torch.Size]:
    """An encoder of 4 layers on sequences of 64 vectors."""
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return nn.Sequential(encoder, nn.Flatten(), nn.Linear(64 * 256, CLASSES)), torch.Size([64, 256])


MODELS = {make.__name__: make for make in (mlp, convnet, transformer)}
OPS = {"average": hvd.Average, "sum": hvd.Sum, "adasum": hvd.Adasum}
COMPRESSIONS = {name: getattr(hvd.Compression, name) for name in ("none", "fp16", "bf16", "int8", "int4")}
CODECS = ("int8", "int4")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="convnet")
    parser.add_argument("--batch-size", type=int, default=32, help="samples in a step, on each rank")
    parser.add_argument("--steps", type=int, default=10, help="steps of an iteration, which is timed as a whole")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--warmup-steps", type=int, default=5, help="steps before the first iteration")
    parser.add_argument("--op", choices=OPS, default="average", help="how gradients are reduced")
    parser.add_argument("--compression", choices=COMPRESSIONS, default="none", help="what travels instead of float32")
    return parser.parse_args()


def say(text: str) -> None:
    if hvd.rank() == 0:
        print(text, flush=True)


def spread(rates: torch.Tensor) -> str:
    """Mean and standard deviation."""
    return f"{rates.mean():.1f} +- {rates.std(correction=0):.1f} samples/s"


def main() -> None:
    chosen = options()
    hvd.init()
    torch.manual_seed(hvd.rank())
    model, shape = MODELS[chosen.model]()
    inputs = torch.randn(chosen.batch_size, *shape)
    labels = torch.randint(CLASSES, (chosen.batch_size,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), op=OPS[chosen.op], compression=COMPRESSIONS[chosen.compression]
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()

    megabytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) / 1e6
    say(f"{chosen.model}, {megabytes:.1f} MB of gradients, {hvd.size()} ranks, {torch.get_num_threads()} threads each")
    train(chosen.warmup_steps)
    rates = []
    for iteration in range(1, chosen.iterations + 1):
        hvd.barrier()
        started = time.perf_counter()
        train(chosen.steps)
        rates.append(chosen.steps * chosen.batch_size / (time.perf_counter() - started))
        say(f"iteration {iteration}: {rates[-1]:.1f} samples/s on rank 0")

    of_ranks = hvd.allgather(torch.tensor([rates]))  # a row for each rank, a column for each iteration
    for rank, of_rank in enumerate(of_ranks):
        say(f"rank {rank}: {spread(of_rank)}")
    say(f"in all: {spread(of_ranks.sum(0))}")
    if chosen.compression in CODECS:
        say(str(hvd.compression_report()))


if __name__ == "__main__":
    main()
