"""Digits, learned by as many ranks as there are, and resumed by another number of them:

    horovodish run -np 4 python examples/resume_torch.py digits.pt --stop-at 40
    horovodish run -np 3 python examples/resume_torch.py digits.pt

The optimizer's state is sharded, and the file has all of it. The second job goes on with the learning rate of the first
one, and with the samples of the epoch that it has not used. On as many ranks it has the same bits as a job that never
stopped.
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import horovodish.torch as hvd

EPOCHS = 6
GLOBAL_BATCH = 64

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("file", type=Path, help="the checkpoint: read if it is there, and written when training stops")
parser.add_argument("--stop-at", type=int, metavar="STEP", help="the step after which to save and end")
arguments = parser.parse_args()

hvd.init()
torch.set_num_threads(1)  # the network is too small for more
torch.manual_seed(hvd.rank())
images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
data = TensorDataset(images.float() / 16, labels)
batch_size = GLOBAL_BATCH // hvd.size()
sampler = hvd.ResumableSampler(data)
loader = DataLoader(data, batch_size, sampler=sampler)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), shard="states")
scheduler = CosineAnnealingLR(optimizer, EPOCHS * len(data) // GLOBAL_BATCH)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
step = 0


def save():
    """Every rank gives its part, and rank 0 writes the file."""
    state = {
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.full_state_dict(root=0),
        "scheduler": scheduler.state_dict(),
        "sampler": sampler.state_dict(),
    }
    if hvd.rank() == 0:
        torch.save(state, arguments.file)


def load():
    """Every rank reads the file. Returns the number of steps that are done."""
    state = torch.load(arguments.file, mmap=True)
    for name, part in {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler}.items():
        part.load_state_dict(state[name])
    return state["step"]


if arguments.file.exists():
    step = load()
    print(f"rank {hvd.rank()} of {hvd.size()} goes on after step {step}", flush=True)
for epoch in range(sampler.state_dict()["epoch"], EPOCHS):
    sampler.set_epoch(epoch)
    whole_batches = hvd.allreduce(torch.tensor(len(sampler) // batch_size), op=hvd.Min).item()
    for _, (inputs, targets) in zip(range(whole_batches), loader, strict=False):
        torch.manual_seed(step * hvd.size() + hvd.rank())  # so dropout does not depend on where training resumed
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        sampler.record(len(inputs))
        step += 1
        if step == arguments.stop_at:
            save()
            raise SystemExit

hvd.check_consistency(model)  # all ranks hold the same bits
with torch.no_grad():
    logits = model.eval()(data.tensors[0])
loss, right = functional.cross_entropy(logits, labels).item(), (logits.argmax(dim=1) == labels).float().mean().item()
if hvd.rank() == 0:
    print(f"{hvd.size()} ranks, {step} steps: loss {loss}, {right:.2%} of the digits are recognized")
