"""Samples are dealt out once each, and a checkpoint goes on with those that are left."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import horovodish.torch as hvd
from support.ranks import run_ranks

LENGTH = 103


def through_an_epoch() -> dict[str, Any]:
    hvd.init()
    data = list(range(LENGTH))
    sampler = hvd.ResumableSampler(data, seed=3)
    epochs = []
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
        assert len(sampler) == len(epochs[-1])
    in_order = list(hvd.ResumableSampler(data, shuffle=False))
    sampler.set_epoch(2)
    seen: list[int] = []
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for batch in loader:
        seen += batch.tolist()
        next(iter(loader))  # a look counts for nothing
        sampler.record(len(batch))
        if len(seen) == 12:
            break
    checkpoint = sampler.state_dict()
    with pytest.raises(ValueError, match=f"of a data set of {LENGTH} samples, but this one has 5"):
        hvd.ResumableSampler(range(5)).load_state_dict(checkpoint)
    resumed = hvd.ResumableSampler(data)
    resumed.load_state_dict(checkpoint)
    resumed.set_epoch(2)  # as in a loop over epochs
    length = len(resumed)
    rest = list(resumed)
    assert length == len(rest)
    assert len(resumed) == len(range(hvd.rank(), LENGTH, hvd.size()))  # of the next pass, also without record
    resumed.set_epoch(3)
    return {
        "epochs": epochs,
        "in_order": in_order,
        "seen": seen,
        "checkpoint": checkpoint,
        "rest": rest,
        "next": list(resumed),
    }


def test_every_sample_once() -> None:
    results = run_ranks(through_an_epoch, 3)
    for epoch in (0, 1):
        assert sorted(chain.from_iterable(result["epochs"][epoch] for result in results)) == list(range(LENGTH))
    assert results[0]["epochs"][0] != results[0]["epochs"][1]
    assert [result["in_order"][:2] for result in results] == [[0, 3], [1, 4], [2, 5]]
    assert [len(result["in_order"]) for result in results] == [35, 34, 34]
    assert all(result["checkpoint"] == {"epoch": 2, "done": 36, "seed": 3, "length": LENGTH} for result in results)
    assert sorted(chain.from_iterable(result["seen"] + result["rest"] for result in results)) == list(range(LENGTH))
    assert sorted(chain.from_iterable(result["next"] for result in results)) == list(range(LENGTH))


def resume(checkpoint: dict[str, Any]) -> list[int]:
    hvd.init()
    sampler = hvd.ResumableSampler(range(LENGTH))
    sampler.load_state_dict(checkpoint)
    return list(sampler)


def test_another_number_of_ranks_goes_on() -> None:
    generator = torch.Generator()
    generator.manual_seed(3 + 2)
    left = torch.randperm(LENGTH, generator=generator).tolist()[36:]
    results = run_ranks(resume, 2, args=({"epoch": 2, "done": 36, "seed": 3, "length": LENGTH},))
    assert results == [left[::2], left[1::2]]


def train_on_uneven_ends() -> float:
    """7 batches on rank 0 and 6 on rank 1: the last average is of one rank."""
    hvd.init()
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    sampler = hvd.ResumableSampler(range(13), shuffle=False)
    for (number,) in DataLoader([(float(i),) for i in range(13)], batch_size=1, sampler=sampler):
        optimizer.zero_grad()
        (-model(torch.ones(1, 1)) * number).sum().backward()  # the gradient is minus the number
        optimizer.step()
    hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return model.weight.item()


def test_ends_that_are_uneven() -> None:
    # Averages of (0, 1), (2, 3), ... (10, 11), and then 12 alone.
    assert run_ranks(train_on_uneven_ends, 2) == [pytest.approx(0.5 + 2.5 + 4.5 + 6.5 + 8.5 + 10.5 + 12)] * 2


def pass_after_pass() -> list[list[int]]:
    """Without set_epoch, as scripts do with shuffle=False; the loader has workers, which are ahead of the training."""
    hvd.init()
    sampler = hvd.ResumableSampler(range(LENGTH), shuffle=False)
    sampler.load_state_dict({"epoch": 0, "done": 51, "seed": 0, "length": LENGTH})
    next(iter(sampler))  # a look at a sample does not count as a pass
    loader = DataLoader(range(LENGTH), batch_size=4, sampler=sampler, num_workers=1, prefetch_factor=4)
    passes = []
    for number in range(3):
        assert len(loader) == (7 if number == 0 else 13)
        passes.append([])
        for batch in loader:
            passes[-1] += batch.tolist()
            sampler.record(len(batch))
        assert sampler.state_dict()["done"] in (LENGTH - 1, LENGTH)  # the second rank has a sample less than the first
    return passes


def test_only_the_pass_that_was_resumed_is_shorter() -> None:
    for rank, passes in enumerate(run_ranks(pass_after_pass, 2)):
        assert passes == [list(range(51 + rank, LENGTH, 2)), *[list(range(rank, LENGTH, 2))] * 2]
