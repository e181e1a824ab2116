"""The shape of ImageNet training: checkpoints and resume, warm-up, accumulation, clipping, averaged metrics."""

import argparse
import os

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn, optim

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint-format", default="checkpoint-{epoch}.pt")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batches-per-allreduce", type=int, default=2)
parser.add_argument("--warmup-epochs", type=float, default=1)
parser.add_argument("--base-lr", type=float, default=0.0125)
args = parser.parse_args()

hvd.init()
torch.manual_seed(1)
verbose = hvd.rank() == 0

resume_from_epoch = 0
for try_epoch in range(args.epochs, 0, -1):
    if os.path.exists(args.checkpoint_format.format(epoch=try_epoch)):
        resume_from_epoch = try_epoch
        break
resume_from_epoch = hvd.broadcast(torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch").item()

features = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), hvd.SyncBatchNorm(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
model = nn.Sequential(features, nn.Flatten(), nn.Linear(32, 4))
data = torch.randn(64, 3, 16, 16, generator=torch.Generator().manual_seed(hvd.rank()))
target = (data.mean((1, 2, 3)) > 0).long()
steps = 4

optimizer = optim.SGD(model.parameters(), lr=args.base_lr * args.batches_per_allreduce * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=args.batches_per_allreduce
)
if resume_from_epoch > 0 and hvd.rank() == 0:
    checkpoint = torch.load(args.checkpoint_format.format(epoch=resume_from_epoch))
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)


class Metric:
    def __init__(self, name):
        self.name, self.sum, self.n = name, torch.tensor(0.0), torch.tensor(0.0)

    def update(self, value):
        self.sum += hvd.allreduce(value.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self):
        return self.sum / self.n


def adjust_learning_rate(epoch, batch_idx):
    if epoch < args.warmup_epochs:
        epoch += float(batch_idx + 1) / steps
        lr_adj = 1.0 / hvd.size() * (epoch * (hvd.size() - 1) / args.warmup_epochs + 1)
    else:
        lr_adj = 1.0
    for group in optimizer.param_groups:
        group["lr"] = args.base_lr * hvd.size() * args.batches_per_allreduce * lr_adj


hvd.start_timeline(file_path=os.path.join(os.path.dirname(args.checkpoint_format), "timeline.json"), mark_cycles=True)
for epoch in range(resume_from_epoch, args.epochs):
    model.train()
    train_loss = Metric("train_loss")
    for batch_idx in range(steps):
        adjust_learning_rate(epoch, batch_idx)
        optimizer.zero_grad()
        inputs, labels = data[batch_idx::steps], target[batch_idx::steps]
        for i in range(0, len(inputs), len(inputs) // args.batches_per_allreduce):
            part = slice(i, i + len(inputs) // args.batches_per_allreduce)
            loss = F.cross_entropy(model(inputs[part]), labels[part])
            train_loss.update(loss)
            loss.div_(args.batches_per_allreduce)
            loss.backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
    if verbose:
        print(f"epoch {epoch + 1} from {resume_from_epoch}: loss {train_loss.avg:.3f}")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, args.checkpoint_format.format(epoch=epoch + 1))

hvd.stop_timeline()
weights = hvd.allgather(torch.cat([p.detach().flatten() for p in model.parameters()]).unsqueeze(0), name="weights")
assert torch.equal(weights[0], weights[-1]), "the ranks differ"
if verbose:
    print("done")
