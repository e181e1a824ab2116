"""Handwritten digits on slow links or uneven machines:

    horovodish run -np 2 python examples/torch_slow_machines.py --local-sgd 8

By default the ranks average their gradients in every step. On a slow link, let them meet every 8 steps (--local-sgd 8),
or every 20 steps with an outer optimizer and int8 (--diloco 20). If one of N machines is often late, go on without its
gradient (--wait-for N-1); --late makes the last rank late. The guide is docs/slow_machines.md.
"""

import argparse
import contextlib
import itertools
import random
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import horovodish.torch as hvd

STEPS, BATCH, LEARNING_RATE = 400, 16, 2e-3
LATE_SHARE, LATE_SECONDS = 0.1, 0.05


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--local-sgd", type=int, metavar="STEPS", help="average the parameters every STEPS steps")
    how.add_argument("--diloco", type=int, metavar="STEPS", help="likewise, with an outer optimizer and int8")
    how.add_argument("--wait-for", type=int, metavar="RANKS", help="go on when RANKS ranks have gradients")
    parser.add_argument("--late", action="store_true", help="the last rank sleeps in a tenth of its steps")
    return parser.parse_args()


def policy(chosen):
    """What DistributedOptimizer is to do besides averaging gradients."""
    if chosen.local_sgd:
        return {"sync": hvd.LocalSGD(chosen.local_sgd)}
    if chosen.diloco:
        return {"sync": hvd.DiLoCo(chosen.diloco, compression=hvd.Compression.int8)}
    return {"wait_for": chosen.wait_for} if chosen.wait_for else {}


def digits():
    """This rank's images and labels to train on, and the images and labels to test with."""
    images, labels = (torch.tensor(each) for each in load_digits(return_X_y=True))
    images = images.float() / 16
    train, test = slice(hvd.rank(), 1500, hvd.size()), slice(1500, None)
    return images[train], labels[train], images[test], labels[test]


def main():
    chosen = options()
    hvd.init()
    torch.set_num_threads(1)
    images, labels, test_images, test_labels = digits()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **policy(chosen))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    own_steps = itertools.count(1)
    order, lateness = torch.Generator().manual_seed(hvd.rank()), random.Random(0)
    began = time.perf_counter()
    steps = 0
    while steps < STEPS:
        if chosen.late and hvd.rank() == hvd.size() - 1 and lateness.random() < LATE_SHARE:
            time.sleep(LATE_SECONDS)
        batch = torch.randint(len(images), (BATCH,), generator=order)
        optimizer.zero_grad()
        cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        steps = optimizer.steps if chosen.wait_for else next(own_steps)  # with those that a late rank has missed
    seconds = time.perf_counter() - began

    # With sync= the ranks have different parameters between two meetings. In this block they have the same ones.
    with optimizer.synchronized() if "sync" in policy(chosen) else contextlib.nullcontext():
        hvd.check_consistency(model)
        right = (model(test_images).argmax(dim=1) == test_labels).float().mean().item()
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, {STEPS} steps in {seconds:.1f} s, test accuracy {right:.3f}")


if __name__ == "__main__":
    main()
