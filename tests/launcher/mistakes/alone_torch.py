"""Mistakes with PyTorch that end the job, or are told at its end. See alone.py."""

import torch
from each import make

import horovodish.torch as hvd

hvd.init()
rank = hvd.rank()


def train(batches, wrap=True):
    model = torch.nn.Linear(4, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if wrap:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    for _ in range(batches):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def fewer_batches():
    r"""alone_torch.py", line \d+, in fewer_batches
    allreduce of 'weight' and 1 more failed on rank 0 in step 3: rank 1 has ended its script after 2 steps$
    Remedy: if the ranks have different numbers of batches, give them all as many,
    or call hvd.join\(\) after the last one
    rank 0 on \S+ failed with exit status 1: .*; alone_torch.py:\d+ waits for it$"""
    train(3 - rank)


def data_set_smaller_than_the_ranks():
    r"""in data_set_smaller_than_the_ranks
    failed on rank 0 in step 1: rank 1 has ended its script
    Remedy: if the ranks have different numbers of batches
    rank 0 on \S+ failed with exit status 1: .*; alone_torch.py:\d+ waits for it$"""
    train(len(range(1)[rank :: hvd.size()]))


def sampler_without_ranks():
    r"""hint: .* give a DistributedSampler num_replicas=hvd.size\(\), rank=hvd.rank\(\)$
    rank \d on \S+ failed with exit status 1: .*Default process group has not been initialized"""
    torch.utils.data.DistributedSampler(range(8))


def not_wrapped():
    r"""RuntimeWarning: rank 0 of 2 took 20 steps of SGD and reduced no gradients,
    so each rank has trained a model of its own
    Remedy: .*DistributedOptimizer"""
    train(20, wrap=False)


make(globals())
