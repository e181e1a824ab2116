"""What each rank of benchmarks/recovery.py trains with horovodish."""

import os
import time

import recovery
import torch

import horovodish.torch as hvd

hvd.init()
first_rank = hvd.rank()
model = torch.nn.Sequential(*(torch.nn.Linear(recovery.FEATURES, recovery.FEATURES) for _ in range(recovery.LAYERS)))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9), model.named_parameters())
inputs = torch.randn(4, recovery.FEATURES)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    """Commits each step and prints a line after it."""
    while state.step < int(os.environ["STEPS"]):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        state.step += 1
        state.commit()
        start = os.environ["HOROVODISH_START"]
        print(f"step: {first_rank} {hvd.size()} {start} {state.step} {time.time()} {os.getpid()}", flush=True)


train(hvd.elastic.TorchState(model, optimizer, step=0))
