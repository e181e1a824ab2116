"""Mistakes with PyTorch that end the job, or are told at its end. See alone.py."""

import sys

import torch
from each import make

import horovodish.torch as hvd

hvd.init()
rank = hvd.rank()


def train(batches, wrap=True, after_step=lambda step: None, **options):
    model = torch.nn.Linear(4, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if wrap:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    for step in range(batches):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        after_step(step)


def fewer_batches():
    r"""alone_torch.py", line \d+, in fewer_batches
    allreduce of 'weight' and 1 more failed on rank 0 in step 3: rank 1 has ended its script after 2 steps$
    Remedy: if the ranks have different numbers of batches, give every rank equally many,
    or call hvd.join\(\) after the last one
    rank 0 on \S+ failed with exit status 1: .*; rank 0 waits in alone_torch.py:\d+$"""
    train(3 - rank)


def exit_in_the_middle():
    r"""allreduce of 'weight' and 1 more failed on rank 0 in step 3: rank 1 called sys.exit\(3\) in alone_torch.py:\d+
    rank 1 on \S+ failed with exit status 3: it called sys.exit\(3\) in alone_torch.py:\d+
    after 2 steps; rank 0 waits in alone_torch.py:\d+$"""
    train(3, after_step=lambda step: sys.exit(3) if (rank, step) == (1, 1) else None)


def data_set_smaller_than_the_ranks():
    r"""in data_set_smaller_than_the_ranks
    RankLostError: allreduce of 'weight' failed on rank 0 in step 1: rank 1 has ended its script
    Remedy: if the ranks have different numbers of batches
    rank 0 on \S+ failed with exit status 1: .*; rank 0 waits in alone_torch.py:\d+$"""
    train(len(range(1)[rank :: hvd.size()]))


def sampler_without_ranks():
    r"""hint: .* give a DistributedSampler num_replicas=hvd.size\(\), rank=hvd.rank\(\)$
    rank \d on \S+ failed with exit status 1: .*Default process group has not been initialized"""
    torch.utils.data.DistributedSampler(range(8))


def ddp_without_a_process_group():
    r"""hint: .* has no process group. .*DistributedDataParallel, call torch.distributed.init_process_group\("horovodish
    rank \d on \S+ failed with exit status 1: .*Default process group has not been initialized"""
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))


def backend_without_its_import():
    r"""hint: .* import horovodish.torch.backend before init_process_group\(\)$
    rank \d on \S+ failed with exit status 1: .*Unknown backend type horovodish"""
    torch.distributed.init_process_group("horovodish")


def metric_of_rank_0():
    r"""StallError: allreduce .* failed on rank \d in step \d: every rank waits, .* was submitted by .*$
    Remedy: call the same collectives .* is called under `if rank == 0:`
    rank \d on \S+ failed with exit status 1: .*'loss' was submitted by rank 0 but not by rank 1
    ; rank 0 waits in alone_torch.py:\d+, rank 1 waits in alone_torch.py:\d+$"""
    train(3, after_step=lambda step: hvd.allreduce(torch.ones(1), name="loss") if rank == 0 else None)


def metric_of_rank_0_at_the_end():
    r"""allreduce 'loss' failed on rank 0 after 2 steps: rank 1 has ended its script after 2 steps$
    rank 0 on \S+ failed with exit status 1: .*; rank 0 waits in alone_torch.py:\d+$"""
    train(2)
    if rank == 0:
        hvd.allreduce(torch.ones(1), name="loss")


def no_batch_before_a_join():
    r"""alone_torch.py:\d+: RuntimeWarning: rank 1 has joined before its first step, and another rank has made 2:
    it had no batch. Remedy: give every rank equally many samples"""
    train(2 * (1 - rank))
    hvd.join()


def round_left_open():
    r"""alone_torch.py:\d+: RuntimeWarning: training has ended within a round of sync=,
    so the ranks have different parameters. Remedy: call optimizer.end_round\(\)"""
    train(6, sync=hvd.LocalSGD(every=4))


def not_wrapped():
    r"""alone_torch.py:\d+: RuntimeWarning: rank 0 of 2 took 20 steps of SGD and reduced no gradients,
    so each rank has trained its own model
    Remedy: .*DistributedOptimizer"""
    train(20, wrap=False)


make(globals())
