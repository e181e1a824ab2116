"""A small network on handwritten digits: scaled learning rate, sampler, Adasum, averaged metrics."""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--use-adasum", action="store_true")
args = parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8 * 6 * 6, 10)

    def forward(self, x):
        return F.log_softmax(self.fc(F.relu(self.norm(self.conv(x))).flatten(1)), dim=1)


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


hvd.init()
torch.manual_seed(42)
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank())

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
dataset = TensorDataset(images, torch.tensor(digits.target))
train_set, test_set = torch.utils.data.random_split(dataset, [1497, 300], torch.Generator().manual_seed(0))
train_sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = DataLoader(train_set, batch_size=32, sampler=train_sampler)
test_loader = DataLoader(test_set, sampler=DistributedSampler(test_set, hvd.size(), hvd.rank()), batch_size=100)

model = Net()
lr_scaler = hvd.size() if not args.use_adasum else hvd.local_size() if hvd.nccl_built() else 1
optimizer = optim.SGD(model.parameters(), lr=args.lr * lr_scaler, momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    op=hvd.Adasum if args.use_adasum else hvd.Average,
)

for epoch in range(1, args.epochs + 1):
    model.train()
    train_sampler.set_epoch(epoch)
    for data, target in train_loader:
        optimizer.zero_grad()
        F.nll_loss(model(data), target).backward()
        optimizer.step()

    model.eval()
    correct = count = 0
    for data, target in test_loader:
        correct += (model(data).argmax(1) == target).sum().item()
        count += len(target)
    accuracy = metric_average(correct / count, "avg_accuracy")
    if hvd.rank() == 0:
        print(f"epoch {epoch}: accuracy {accuracy:.3f}")

assert accuracy > 0.85, accuracy
if hvd.rank() == 0:
    print("done")
