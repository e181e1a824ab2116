"""The state that ranks share: who has what, and the state of the plain optimizer for files."""

from __future__ import annotations

import copy
import io
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import horovodish.torch as hvd
import horovodish.torch.backend  # noqa: F401
from horovodish.gradients.shards import own_parts, owned_ends, owners
from support.documents import python_blocks
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from support.scripts import output_of
from support.sharded import (
    OPTIMIZERS,
    SHARED,
    Frozen,
    Model,
    batches,
    pair,
    plain_adam,
    same,
    same_state,
    train,
)
from support.sources import ROOT


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
        again.load_state_dict({"part of rank 7 of 8": {}})
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


def of_documents(call: str) -> tuple[str, str]:
    """The code of the guide that saves by a call, and what loads it later."""
    (block,) = (each for each in python_blocks("docs/sharding.md") if call in each)
    save, load = block.split("# later")
    return save, f"#{load}"


def losses_of(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    """Losses of steps with 12 samples, which the ranks divide. So the number of ranks does not change them."""
    losses = []
    for step in steps:
        samples = torch.randn(12, 5, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(samples[hvd.rank() :: hvd.size()])
        loss.backward()
        optimizer.step()
        losses.append(float(hvd.allreduce(loss.detach())))
    return losses


def shared(way: str) -> dict[str, Any]:
    model = Model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["AdamW"](model.parameters()), model.named_parameters(), **SHARED[way]
    )
    return {"model": model, "optimizer": optimizer, "hvd": hvd, "torch": torch}


def save_and_go_on(folder: Path, way: str, call: str) -> list[float]:
    os.chdir(folder)
    scope = shared(way)
    model, optimizer = scope["model"], scope["optimizer"]
    losses_of(model, optimizer, range(5))
    exec(of_documents(call)[0], scope)
    return losses_of(model, optimizer, range(5, 15))


def load_and_go_on(folder: Path, way: str, call: str) -> list[float]:
    os.chdir(folder)
    scope = shared(way)
    imports, _ = of_documents(call)[0].split("state = ")
    exec(imports + of_documents(call)[1], scope)
    return losses_of(scope["model"], scope["optimizer"], range(5, 15))


@pytest.mark.parametrize(
    ("way", "call"),
    [("states", "torch.save"), ("gradients", "torch.save"), ("parameter", "torch.save"), ("states", "dcp.save")],
)
def test_four_ranks_save_and_fewer_go_on(way: str, call: str, tmp_path: Path) -> None:
    expected, *_ = run_ranks(save_and_go_on, 4, args=(tmp_path, way, call), begin=True)
    for ranks in (3, 2, 1):
        for losses in run_ranks(load_and_go_on, ranks, args=(tmp_path, way, call), begin=True):
            assert losses == pytest.approx(expected, rel=1e-5)


@on_ranks(2)
def test_parts_in_one_checkpoint_of_torch_distributed(tmp_path: Path) -> None:
    folder = hvd.broadcast_object(tmp_path)
    model, optimizer, other, sharded = pair(OPTIMIZERS["AdamW"], "states")
    train(model, optimizer, 5)
    train(other, sharded, 5)
    store = dist.FileStore(str(folder / "store"), hvd.size())
    dist.init_process_group("horovodish", store=store, rank=hvd.rank(), world_size=hvd.size())
    dcp.save(sharded.shard_state_dict(), checkpoint_id=folder / "parts")
    _, _, fresh_model, fresh = pair(OPTIMIZERS["AdamW"], "states")
    fresh_model.load_state_dict(model.state_dict())
    to_fill = fresh.shard_state_dict()
    dcp.load(to_fill, checkpoint_id=folder / "parts")
    dist.destroy_process_group()
    with pytest.raises(ValueError, match=rf"the part of rank {hvd.rank()} of 2 lacks state that was saved.*Remedy"):
        fresh.load_state_dict(to_fill)
    dcp_to_torch_save(folder / "parts", folder / f"{hvd.rank()}.pt")
    fresh.load_state_dict(torch.load(folder / f"{hvd.rank()}.pt"))
    for made, its in ((model, optimizer), (fresh_model, fresh)):
        train(made, its, 5, 1)
    same(model, fresh_model)


@pytest.mark.soak
def test_the_root_needs_memory_for_the_state_alone() -> None:
    said = output_of(ROOT / "benchmarks" / "torch_full_state.py", np=3)
    found = re.findall(
        r"a state of (\d+) MB; the peak of the root rises by (\d+) MB, the peak of another rank by (\d+) MB", said
    )
    assert len(found) == 4, said
    for state, root, others in found:
        assert int(root) <= int(state) + 64 and int(others) <= 64, said
