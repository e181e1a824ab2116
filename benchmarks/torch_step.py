"""Training steps, ours beside DistributedDataParallel:  horovodish run -np 2 python benchmarks/torch_step.py

Four models with SGD, each trained by several contenders in turns: DistributedOptimizer, DistributedDataParallel over
gloo (gradient_as_bucket_view, static_graph), and the same step without communication, in all ranks at once: `alone`,
which is what a step costs at least, and `waiting`, whose ranks meet at a barrier after it. Times are of single steps,
on all ranks; a ratio below 1 means that ours takes less time.
"""

import time
from collections.abc import Callable

import peers
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training_steps import OURS, compare_steps, options_of

import horovodish.torch as hvd


def mlp() -> tuple[nn.Module, torch.Tensor]:
    """8 x Linear(2048, 2048): 128 MiB of gradients in 16 tensors."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(16, 2048)


def manysmall() -> tuple[nn.Module, torch.Tensor]:
    """501 small linear layers: 2 MiB of gradients in 1002 tensors."""
    layers = [layer for _ in range(500) for layer in (nn.Linear(32, 32), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(32, 10)), torch.randn(16, 32)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """8 blocks of width 512 on 4 x 64 tokens: 96 MiB of gradients."""
    block = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(block, 8, enable_nested_tensor=False), torch.randn(4, 64, 512)


def conv() -> tuple[nn.Module, torch.Tensor]:
    """6 convolutions to 512 channels on 8 images of 32 x 32: 18 MiB of gradients."""
    channels = [3, 64, 128, 256, 256, 512, 512]
    layers: list[nn.Module] = []
    for index in range(6):
        stride = 2 if index in (1, 2, 4) else 1
        layers += [nn.Conv2d(channels[index], channels[index + 1], 3, stride=stride, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)), torch.randn(8, 3, 32, 32)


MODELS = {make.__name__: make for make in (mlp, manysmall, transformer, conv)}


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> Callable[[], float]:
    def step() -> float:
        started = time.perf_counter()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - started

    return step


def contenders(name: str) -> dict[str, Callable[[], float]]:
    make = MODELS[name]
    torch.manual_seed(0)
    ours, inputs = make()
    alone, ddp = make()[0], make()[0]
    for model in (alone, ddp):
        model.load_state_dict(ours.state_dict())
    wrapped = DistributedDataParallel(ddp, gradient_as_bucket_view=True, static_graph=True)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in (ours, ddp, alone)]
    distributed = hvd.DistributedOptimizer(optimizers[0], ours.named_parameters())
    return {
        OURS: step_of(ours, distributed, inputs),
        "DDP": step_of(wrapped, optimizers[1], inputs),
        "alone": step_of(alone, optimizers[2], inputs),
    }


def main() -> None:
    options = options_of(__doc__, MODELS)
    peers.start()
    peers.say(f"{peers.setup()}\n")
    compare_steps(options, contenders)
    peers.stop()


if __name__ == "__main__":
    main()
