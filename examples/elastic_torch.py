"""Digits, learned by ranks that may be lost:  horovodish run -np 4 --min-np 2 python examples/elastic_torch.py

End a rank with `kill -9`: the others go on with the step that it has missed, and every image still comes once in an
epoch.
"""

import math

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import horovodish.torch as hvd

EPOCHS = 10
GLOBAL_BATCH = 64

hvd.init()
torch.set_num_threads(1)  # the network is too small for more
images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
images = images.float() / 16
held_out = torch.arange(len(images)) % 5 == 0
train_set = TensorDataset(images[~held_out], labels[~held_out])

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
sampler = hvd.elastic.ElasticSampler(train_set)


@hvd.elastic.run
def train(state):
    """Called again when the ranks have changed, so it begins where the state says."""
    while state.epoch < EPOCHS:
        sampler.set_epoch(state.epoch)
        batch_size = math.ceil(GLOBAL_BATCH / hvd.size())
        loader = DataLoader(train_set, batch_size, sampler=sampler)
        batches, most = iter(loader), hvd.allreduce(torch.tensor(len(loader)), op=hvd.Max, name="batches").item()
        for number in range(most):
            optimizer.zero_grad()
            if batch := next(batches, None):
                functional.cross_entropy(model(batch[0]), batch[1]).backward()
            optimizer.step()  # also on a rank that had no batch left
            sampler.record_batch(number, batch_size)
            state.commit()
        state.epoch += 1


train(hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0))
with torch.no_grad():
    right = (model(images[held_out]).argmax(dim=1) == labels[held_out]).float().mean().item()
if hvd.rank() == 0:
    print(f"test accuracy {right:.4f} on {hvd.size()} ranks")
