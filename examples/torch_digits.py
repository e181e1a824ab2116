"""Handwritten digits, learned by several ranks together:  horovodish run -np 2 python examples/torch_digits.py

A small convolutional network on scikit-learn's digits (1797 images of 8 x 8 pixels). Every rank computes on its own
shard of the data; the ranks train one model. The same script runs alone, too: python examples/torch_digits.py
"""

import hashlib
import sys
import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import horovodish.torch as hvd

EPOCHS = 20
GLOBAL_BATCH = 64
BAR_WIDTH = 30


def digits():
    """The images and labels to train on, and those to test with."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    parts = train_test_split(images, torch.tensor(labels), test_size=0.2, random_state=0, stratify=labels)
    train_images, test_images, train_labels, test_labels = parts
    return TensorDataset(train_images, train_labels), TensorDataset(test_images, test_labels)


def network():
    """Two convolutions and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.Linear(128, 10),
    )


def train_epoch(model, optimizer, loader):
    """One pass over this rank's shard; gives the mean loss over all ranks."""
    model.train()
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()  # ends with the gradients averaged over all ranks
        optimizer.step()
        losses.append(loss.detach())
    return hvd.allreduce(torch.stack(losses).mean(), name="loss").item()


@torch.no_grad()
def accuracy(model, dataset):
    """The share of digits that are recognised. Every rank looks at its part of the test set."""
    model.eval()
    images, labels = (tensor[hvd.rank() :: hvd.size()] for tensor in dataset.tensors)
    right = (model(images).argmax(dim=1) == labels).sum()
    return hvd.allreduce(right, op=hvd.Sum, name="right").item() / len(dataset)


def same_weights_everywhere(model):
    """Whether all ranks hold the same bits, and the hash of this rank's."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    own = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
    of_all_ranks = hvd.allgather(own.reshape(1, -1), name="hashes")
    return bool((of_all_ranks == own).all()), digest.hexdigest()


def say(text):
    if hvd.rank() == 0:
        print(text, flush=True)


def main():
    hvd.init()
    torch.manual_seed(hvd.rank())  # ranks may start with different weights: rank 0's are broadcast below
    torch.set_num_threads(1)  # the network is too small for more
    train, test = digits()
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank(), seed=0)
    loader = DataLoader(train, batch_size=max(1, GLOBAL_BATCH // hvd.size()), sampler=sampler)

    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    say(f"{hvd.size()} ranks, {len(sampler)} of {len(train)} images on each")
    started = time.perf_counter()
    reached = 0.0
    for epoch in range(1, EPOCHS + 1):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, optimizer, loader)
        scheduler.step()
        reached = accuracy(model, test)
        done = BAR_WIDTH * epoch // EPOCHS
        bar = "#" * done + "-" * (BAR_WIDTH - done)
        say(f"epoch {epoch:2}/{EPOCHS} [{bar}] loss {loss:.4f}  test accuracy {reached:.4f}")

    same, digest = same_weights_everywhere(model)
    say(f"trained in {time.perf_counter() - started:.1f} s, test accuracy {reached:.4f}")
    if not same:
        sys.exit(f"rank {hvd.rank()}: the ranks hold different weights; this one's have sha256 {digest}")
    say(f"all {hvd.size()} ranks hold bit-identical weights, sha256 {digest}")


if __name__ == "__main__":
    main()
