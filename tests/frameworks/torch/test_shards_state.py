"""The state that ranks share: who has what, and the state of the plain optimizer for files."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import horovodish.torch as hvd
from horovodish.gradients.shards import own_parts, owned_ends, owners
from support.on_ranks import on_ranks
from support.sharded import (
    OPTIMIZERS,
    Frozen,
    Model,
    batches,
    pair,
    plain_adam,
    same,
    same_state,
    train,
)


def test_parts_are_those_of_everybody() -> None:
    for counts in ([3, 5, 2, 0, 1], [1], [0], [1000, 7]):
        for ranks in (1, 2, 3, 7):
            parts = [own_parts(counts, place, ranks) for place in range(ranks)]
            for index, count in enumerate(counts):
                own = [part[index] for part in parts]
                assert sum(end - begin for begin, end in own) == count
                ends = [0, *(end for begin, end in own if begin < end)]
                assert [begin for begin, end in own if begin < end] == ends[:-1]
            sizes = [sum(end - begin for begin, end in part) for part in parts]
            assert max(sizes) - min(sizes) <= 1


def test_owners_have_whole_parameters() -> None:
    loads = [0, 0, 10]
    assert owners([4, 9, 5, 4], loads) == [1, 0, 1, 0] and loads == [13, 9, 10]
    assert owned_ends([4, 9, 5, 4], [0, 0, 1, 1], 3) == [13, 22, 22]
    assert [own_parts([4, 9, 5], place, 3, [13, 18, 18]) for place in (1, 2)] == [
        [(4, 4), (9, 9), (0, 5)],
        [(4, 4), (9, 9), (5, 5)],
    ]


@on_ranks(3)
def test_whole_parameters_are_shared_out_by_size() -> None:
    model = nn.Sequential(*[nn.Linear(20, 20) for _ in range(7)])
    optimizer = hvd.DistributedOptimizer(plain_adam(model.parameters()), shard="states", shard_by="parameter")
    model(torch.ones(1, 20)).sum().backward()
    optimizer.step()
    own = [sum(value.numel() for its in optimizer.state.values() for value in its.values() if value.dim())]
    assert max(hvd.allgather_object(own[0])) <= 2 * 420 * 3


@on_ranks(3)
def test_state_is_shared_out_also_of_one_large_tensor() -> None:
    def large() -> nn.Module:
        return nn.Sequential(nn.Linear(500, 200), nn.Linear(200, 20), nn.Linear(20, 10))

    model = large()
    optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters()), shard="states")
    model(torch.ones(1, 500)).sum().backward()
    optimizer.step()
    own = sum(value.numel() for its in optimizer.state.values() for value in its.values() if value.dim())
    everything = 2 * sum(parameter.numel() for parameter in model.parameters())
    assert own <= everything * (1 / hvd.size() + 0.005)


@on_ranks(3)
def test_parameters_come_and_freeze() -> None:
    """Every rank keeps the state of its part."""
    model, optimizer, other, sharded = pair(
        OPTIMIZERS["AdamW"],
        "states",
        Frozen,
    )
    for made, its in ((model, optimizer), (other, sharded)):
        train(made, its, 4)
        its.add_param_group({"params": list(made.late.parameters()), "lr": 1e-3})
        made.uses_late = True
        train(made, its, 4, 1)
        made.first.weight.requires_grad_(False)
        train(made, its, 4, 2)
        made.first.weight.requires_grad_(True)
        train(made, its, 4, 3)
        its.param_groups[0]["lr"] = 0.5e-2
        train(made, its, 4, 4)
    same(model, other)
    full = sharded.full_state_dict()
    if hvd.rank() == 0:
        same_state(optimizer.state_dict(), full)


@on_ranks(3)
def test_a_state_is_loaded_by_any_number_of_ranks() -> None:
    model, optimizer, other, sharded = pair(OPTIMIZERS["AdamW"], "states")
    train(model, optimizer, 5)
    train(other, sharded, 5)
    part = sharded.shard_state_dict()
    full = hvd.broadcast_object(sharded.full_state_dict())
    stream = io.BytesIO()
    torch.save(full, stream)
    stream.seek(0)
    full = torch.load(stream)
    plain_model, plain, third, again = pair(OPTIMIZERS["AdamW"], "gradients")
    plain_model.load_state_dict(model.state_dict())
    third.load_state_dict(model.state_dict())
    plain.load_state_dict(copy.deepcopy(full))
    again.load_state_dict(copy.deepcopy(full))
    pairs = hvd.ProcessSet([0, 1])
    hvd.add_process_set(pairs)
    for made, its in ((model, optimizer), (other, sharded), (plain_model, plain), (third, again)):
        train(made, its, 5, 1)
        same(model, made)
    sharded.load_state_dict(part)
    with pytest.raises(ValueError, match="part of rank"):
        again.load_state_dict({**part, "horovodish part": (7, {0: (1, 2, 3)})})
    with pytest.raises(ValueError, match="of another model"):
        again.load_state_dict({**full, "state": {0: {"exp_avg": torch.ones(3, 3)}}})
    if hvd.rank() < 2:  # two ranks go on with what three have saved
        two = Model()
        two.load_state_dict(model.state_dict())
        its = hvd.DistributedOptimizer(
            OPTIMIZERS["AdamW"](two.parameters()), two.named_parameters(), shard="states", process_set=pairs
        )
        its.load_state_dict(optimizer.state_dict())
        saved = its.full_state_dict(root=1)
        if hvd.rank() == 1:
            same_state(optimizer.state_dict(), saved)
    hvd.remove_process_set(pairs)


@on_ranks(2)
def test_a_state_is_loaded_for_frozen_parameters_by_any_numbers_and_again() -> None:
    model, optimizer, other, sharded = pair(OPTIMIZERS["AdamW"], "states")
    train(model, optimizer, 3)
    train(other, sharded, 3)
    given = hvd.broadcast_object(sharded.full_state_dict(), 0)
    numbers = given["param_groups"][0]["params"]
    given["param_groups"][0]["params"] = numbers[::-1]
    given["state"] = {numbers[-1 - number]: its for number, its in given["state"].items()}
    model, optimizer, other, sharded = pair(OPTIMIZERS["AdamW"], "states")
    _, _, frozen, _ = pair(OPTIMIZERS["AdamW"], "states")
    frozen.inner.requires_grad_(False)
    late: Any = hvd.DistributedOptimizer(OPTIMIZERS["AdamW"](frozen.parameters()), shard="gradients")
    for made, its in ((model, optimizer), (other, sharded), (frozen, late)):
        for _ in range(2):
            its.load_state_dict(copy.deepcopy(given) if its is optimizer else given)
            if its is late:
                assert (found := its.full_state_dict()) is None or len(found["state"]) == len(given["state"])
            made.inner.requires_grad_(True)
            made.load_state_dict(Model().state_dict())
            train(made, its, 2)
    same(model, other)
    same(model, frozen)


@on_ranks(1)
def test_a_world_of_one_is_not_sharded() -> None:
    model, optimizer, other, sharded = pair(OPTIMIZERS["AdamW"], "states")
    train(model, optimizer, 3)
    train(other, sharded, 3)
    same(model, other)
    same_state(optimizer.state_dict(), sharded.full_state_dict())
    model(batches(1)[0]).backward()
    assert np.isfinite(float(sharded.clip_grad_norm_(1.0)))
