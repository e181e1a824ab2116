"""Samples are dealt out once each, and a checkpoint goes on with those that are left."""

from __future__ import annotations

import random
from collections import Counter
from itertools import chain, islice
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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


class Place(hvd.ProcessSet):
    """Where a sampler is among ranks that need not exist."""

    def __init__(self, rank: int, size: int) -> None:
        self.number, self.count = rank, size

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.count


class World:
    """Ranks that train on a data set together, and are lost and raised.

    Attributes:
        trained: how often the state that all of them have was trained on each sample in this epoch.
    """

    def __init__(self, length: int, ranks: int, chance: random.Random, shuffle: bool) -> None:
        self.chance = chance
        self.length = length
        self.shuffle = shuffle
        self.trained: Counter[int] = Counter()
        self.states: list[hvd.elastic.TorchState] = []
        self.begin(ranks)

    def begin(self, ranks: int, claims: list[dict[str, Any]] | None = None) -> None:
        """As `init()`, `on_reset()` and `sync()` with this number of ranks, of which the first have lived on."""
        for rank, state in enumerate(self.states):
            state._place.number, state._place.count = rank, ranks
            state.on_reset()
        while len(self.states) < ranks:
            place = Place(len(self.states), ranks)
            sampler = hvd.elastic.ElasticSampler(range(self.length), self.shuffle, 3, cast(hvd.ProcessSet, place))
            self.states.append(hvd.elastic.TorchState(sampler=sampler))
            self.states[-1]._place = place
        for state in self.states if claims else ():
            state._settle(claims or [])

    def samplers(self) -> list[hvd.elastic.ElasticSampler]:
        return [state.sampler for state in self.states]

    def train_epoch(self, epoch: int, recorded_by: str, limit: int) -> int:
        """Until no rank has a sample left. Returns how often the ranks have changed; that is `limit` at most."""
        self.trained.clear()
        changes = 0
        while True:
            for sampler in self.samplers():
                sampler.set_epoch(epoch)
            passes = [iter(sampler) for sampler in self.samplers()]
            size = self.chance.randint(1, 5)
            while True:
                if recorded_by == "record_batch":
                    size = self.chance.randint(1, 5)  # of each rank, as they step together
                batches = [list(islice(samples, size)) for samples in passes]
                if not any(batches):
                    return changes
                is_lost = changes < limit and self.chance.random() < 0.3
                furthest = [not is_lost or self.chance.random() < 0.5 for _ in batches]
                for sampler, batch, gets_on in zip(self.samplers(), batches, furthest, strict=True):
                    if gets_on and recorded_by == "record_batch":
                        sampler.record_batch(0, size)
                    elif gets_on:
                        sampler.record(len(batch))
                survivors = self.survivors() if is_lost else range(len(batches))
                if any(furthest[rank] for rank in survivors):  # they have a state after this step
                    self.trained.update(chain.from_iterable(batches))
                if is_lost:
                    changes += 1
                    claims = [self.states[rank]._claims() for rank in survivors]
                    as_far = [claims[i] for i, rank in enumerate(survivors) if furthest[rank]] or claims
                    self.states = [self.states[rank] for rank in survivors]
                    self.begin(len(self.states) + self.chance.choice([0, 0, 1, 3]), as_far)
                    break

    def survivors(self) -> list[int]:
        count = self.chance.randint(1, len(self.states))
        return sorted(self.chance.sample(range(len(self.states)), count))


@given(
    length=st.integers(1, 80),
    ranks=st.integers(1, 6),
    recorded_by=st.sampled_from(["record_batch", "record"]),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_every_sample_comes_once_however_the_ranks_change(
    length: int, ranks: int, recorded_by: str, shuffle: bool, seed: int
) -> None:
    world = World(length, ranks, random.Random(seed), shuffle)
    for epoch in range(3):
        changes = world.train_epoch(epoch, recorded_by, limit=8)
        if recorded_by == "record_batch" or not changes:
            assert world.trained == Counter(range(length)), "each sample once"
        else:
            # A rank that had its only batch so far at the end cannot know whether it was a full one.
            assert set(world.trained) == set(range(length)), "no sample is lost"


def test_a_reset_in_the_middle_of_a_pass() -> None:
    place = Place(0, 2)
    sampler = hvd.elastic.ElasticSampler(range(20), shuffle=False, process_set=cast(hvd.ProcessSet, place))
    given_up = iter(sampler)
    assert [next(given_up) for _ in range(6)] == [0, 2, 4, 6, 8, 10]
    sampler.record_batch(0, 3)
    place.number, place.count = 1, 3
    sampler.reset()
    assert len(sampler) == 5
    assert list(sampler) == [7, 10, 13, 16, 19], "the open pass is no longer the one that counts"
    assert list(given_up) == [12, 14, 16, 18]
    sampler.reset()
    assert list(sampler) == [7, 10, 13, 16, 19]


def test_what_horovods_sampler_records() -> None:
    sampler = hvd.elastic.ElasticSampler(range(7), shuffle=False, process_set=cast(hvd.ProcessSet, Place(1, 2)))
    sampler.record_indices([1])
    assert sampler.state_dict()["done"] == 2
    sampler.record_batch(1, 1)
    assert sampler.left == 1
    sampler.record_batch(2, 1)
    assert sampler.state_dict()["done"] == 6, "the first rank may have one more batch"
    sampler.record_batch(3, 1)
    assert sampler.state_dict()["done"] == 7
    assert sampler.left == 0
