"""Optimizers whose state the ranks share: the same bits as without shards, and what they refuse."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import horovodish.torch as hvd
from horovodish.errors import MismatchError, UnsupportedTensorError
from horovodish.gradients.shards import own_parts, owned_ends, owners
from horovodish.torch.shards.gradient import ShardedGradient
from support.on_ranks import on_ranks
from support.processes import wait_until

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
}


class Lamb(torch.optim.Optimizer):
    """Steps a parameter by its norm, and has state of other shapes: a number for each row, and a number."""

    def __init__(self, parameters: Iterable[Any], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                its = self.state[parameter]
                if not its:
                    its["average"] = torch.zeros_like(parameter)
                    its["rows"] = torch.zeros(parameter.shape[:1])
                    its["steps"] = 0
                its["steps"] += 1
                its["average"].mul_(0.9).add_(parameter.grad)
                its["rows"].add_(parameter.grad.square().flatten(1).sum(1) if parameter.dim() > 1 else 1.0)
                scale = its["rows"].rsqrt().reshape(-1, *[1] * (parameter.dim() - 1)) if parameter.dim() else 1.0
                update = its["average"] * scale
                trust = parameter.norm() / update.norm() if parameter.numel() and update.norm() > 0 else 1.0
                parameter.sub_(update * trust, alpha=group["lr"])


WHOLE: dict[str, Make] = {
    "LAMB": lambda p: Lamb(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "AdamW": OPTIMIZERS["AdamW"],
}


class Model(nn.Module):
    """With parameters without elements, of shape (), in channels-last format, never used, and tied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(5, 21)
        self.outer = nn.Linear(21, 5)
        self.outer.weight = nn.Parameter(self.outer.weight.detach().t().contiguous().t())
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(3, 7)
        self.convolution = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.tied = self.inner

    def forward(self, x: Tensor) -> Tensor:
        y = self.outer(torch.tanh(self.inner(x))) * self.factor
        return y.square().mean() + self.convolution(self.tied(y)[:, :12].reshape(-1, 3, 2, 2)).square().mean()


def pair(make: Make, shard: str, model: Callable[[], nn.Module] = Model, **options: Any) -> tuple[Any, Any, Any, Any]:
    """A model and its optimizer without shards, and with them."""
    found: list[Any] = []
    for way in ("", shard):
        made = model()
        optimizer = make(parameter for parameter in made.parameters() if parameter.requires_grad)
        its = options if way else {name: value for name, value in options.items() if not name.startswith("shard")}
        found += [made, hvd.DistributedOptimizer(optimizer, made.named_parameters(), shard=way, **its)]
    return found[0], found[1], found[2], found[3]


def batches(steps: int, salt: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * hvd.rank() + salt)
    return [torch.randn(4, 5, generator=generator) for _ in range(steps)]


def train(model: nn.Module, optimizer: Any, steps: int, salt: int = 0) -> None:
    for x in batches(steps, salt):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()


def same(one: nn.Module, other: nn.Module) -> None:
    for (name, own), (_, theirs) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(own, theirs), f"{name}: {(own - theirs).abs().max()}"


def same_state(one: Any, other: Any) -> None:
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for index, its in one["state"].items():
        assert its.keys() == other["state"][index].keys()
        for key, value in its.items():
            theirs = other["state"][index][key]
            assert type(value) is type(theirs)
            if isinstance(value, Tensor):
                assert value.shape == theirs.shape and value.dtype == theirs.dtype and value.stride() == theirs.stride()
                assert torch.equal(value, theirs), (index, key)
            else:
                assert value == theirs


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


@on_ranks(2, 3)
@pytest.mark.parametrize("shard", ["states", "gradients"])
def test_optimizers_that_look_at_whole_tensors(shard: str) -> None:
    for make in WHOLE.values():
        model, optimizer, other, sharded = pair(make, shard, shard_by="parameter")
        train(model, optimizer, 20)
        train(other, sharded, 20)
        same(model, other)
        full = hvd.broadcast_object(sharded.full_state_dict(root=1), root_rank=1)
        same_state(optimizer.state_dict(), full)
        third, _, fourth, again = pair(make, shard, shard_by="parameter")
        fourth.load_state_dict(model.state_dict())
        again.load_state_dict(copy.deepcopy(full))
        third.load_state_dict(model.state_dict())
        sharded.load_state_dict(sharded.shard_state_dict())
        for made, its in ((model, optimizer), (other, sharded), (fourth, again)):
            train(made, its, 5, 1)
            same(model, made)


@on_ranks(3)
def test_whole_parameters_are_shared_out_by_size() -> None:
    model = nn.Sequential(*[nn.Linear(20, 20) for _ in range(7)])
    optimizer = hvd.DistributedOptimizer(plain_adam(model.parameters()), shard="states", shard_by="parameter")
    model(torch.ones(1, 20)).sum().backward()
    optimizer.step()
    own = [sum(value.numel() for its in optimizer.state.values() for value in its.values() if value.dim())]
    assert max(hvd.allgather_object(own[0])) <= 2 * 420 * 3


def plain_adam(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters)


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("shard", ["states", "gradients"])
def test_the_same_bits_as_without_shards(shard: str) -> None:
    for make in OPTIMIZERS.values():
        model, optimizer, other, sharded = pair(make, shard)
        train(model, optimizer, 20)
        train(other, sharded, 20)
        same(model, other)
        full = sharded.full_state_dict(root=hvd.size() - 1)
        if hvd.rank() == hvd.size() - 1:
            same_state(optimizer.state_dict(), full)
        else:
            assert full is None


@on_ranks((3, "mpi_ring"))
def test_the_same_numbers_where_every_rank_is_a_host() -> None:
    """A ring adds up in another order where it is cut in other places."""
    for name in ("SGD", "AdamW"):
        model, optimizer, other, sharded = pair(OPTIMIZERS[name], "gradients")
        train(model, optimizer, 10)
        train(other, sharded, 10)
        for own, theirs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(own, theirs)
        assert len({each.tobytes() for each in hvd.allgather_object(other.inner.weight.detach().numpy())}) == 1


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


def pairs_of_ranks() -> hvd.ProcessSet:
    """The pair of ranks that this one is in: 0 and 2, or 1 and 3, and so on."""
    sets = [hvd.add_process_set([low, low + 2]) for low in range(hvd.size()) if low % 4 < 2]
    return next(each for each in sets if each.included())


@on_ranks(4, (4, "mpi_ring"))
@pytest.mark.parametrize("shard", ["states", "gradients"])
def test_sets_of_ranks_that_share(shard: str) -> None:
    own = pairs_of_ranks()
    for name, options in {
        "AdamW": {"op": hvd.Average, "gradient_predivide_factor": 2.0},
        "SGD": {"op": hvd.Sum, "compression": hvd.Compression.bf16},
        "RMSprop": {"shard_by": "parameter", "groups": 2},
    }.items():
        model, optimizer, other, sharded = pair(OPTIMIZERS[name], shard, shard_set=own, **options)
        assert own.ranks == sharded._shards.process_set.ranks
        rounding = {"rtol": 2e-2, "atol": 2e-2} if "compression" in options else {"rtol": 1e-4, "atol": 1e-5}
        for made, its in ((model, optimizer), (other, sharded)):
            train(made, its, 5)
            its.zero_grad()
            if hvd.rank() == 3:  # the others have no gradient for this
                (made(batches(1, 1)[0]) + made.unused(torch.ones(3)).sum()).backward()
            else:
                made(batches(1, 1)[0]).backward()
            assert made.unused.bias.grad is not None
            its.step()
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one, two, **rounding)
        assert len({each.tobytes() for each in hvd.allgather_object(other.inner.weight.detach().numpy())}) == 1
        elements = sum(v.numel() for its in sharded.state.values() for v in its.values() if isinstance(v, Tensor))
        assert (
            0
            < elements
            < 0.8 * sum(v.numel() for its in optimizer.state.values() for v in its.values() if isinstance(v, Tensor))
        )
        full = sharded.full_state_dict(root=1)
        assert (full is not None) == (hvd.rank() == 1)
        if full is not None:
            assert full["state"].keys() == optimizer.state_dict()["state"].keys()
        norm = sharded.clip_grad_norm_(1e9)
        assert len({float(each) for each in hvd.allgather_object(norm)}) == 1


@on_ranks(4)
def test_what_fails_in_one_set_fails_in_all() -> None:
    own = pairs_of_ranks()
    model = nn.Linear(5, 7 if hvd.rank() == 2 else 5)
    optimizer = hvd.DistributedOptimizer(plain_adam(model.parameters()), shard="states", shard_set=own)
    with pytest.raises(MismatchError, match=r"the ranks build|disagree about its shape|cannot take part"):
        model(torch.ones(2, 5)).sum().backward()
    assert optimizer._reducer._outdated
    hvd.barrier()


@on_ranks(4)
def test_sets_that_cannot_share() -> None:
    own, everybody = pairs_of_ranks(), hvd.global_process_set
    three = hvd.add_process_set([0, 1, 2])

    def wrapped(shard_set: hvd.ProcessSet) -> None:
        hvd.DistributedOptimizer(plain_adam(Model().parameters()), shard="states", shard_set=shard_set)

    with pytest.raises(ValueError, match=r"shard_set: rank 3 is not in its set of ranks \[0, 1, 2\]"):
        wrapped(three)
    with pytest.raises(ValueError, match=r"rank 0 has 3 ranks in its set, and rank 3 has 2. Remedy: sets of the same"):
        wrapped(three if hvd.rank() < 3 else own)
    crossing = hvd.add_process_set([0, 1])
    with pytest.raises(ValueError, match=r"rank 0 shares with rank 1, which does not share with the same ranks"):
        wrapped(crossing if hvd.rank() == 0 else own)
    with pytest.raises(ValueError, match=r"that of rank 0 is not in use\. Remedy: add it with hvd.add_process_set"):
        wrapped(hvd.ProcessSet([hvd.rank(), (hvd.rank() + 1) % 4]))
    with pytest.raises(ValueError, match=r'shard_set= needs shard="states"'):
        hvd.DistributedOptimizer(plain_adam(Model().parameters()), shard_set=own)
    model = Model()
    optimizer = hvd.DistributedOptimizer(plain_adam(model.parameters()), shard="states", shard_set=own)
    with pytest.raises(ValueError, match=r"no sharded optimizer of a process set.*Remedy: leave process_set="):
        hvd.elastic.TorchState(model, optimizer)
    wrapped(everybody)


@on_ranks(2)
@pytest.mark.parametrize("shard", ["states", "gradients"])
def test_windows_and_several_backwards(shard: str) -> None:
    model, optimizer, other, sharded = pair(OPTIMIZERS["AdamW"], shard, backward_passes_per_step=2)
    for made, its in ((model, optimizer), (other, sharded)):
        for x in batches(6):
            its.zero_grad()
            made(x).backward()
            made(x + 1).backward()
            its.step()
        for x in batches(6, 1):  # a window of one, then a step without a backward
            its.zero_grad(set_to_none=False)
            made(x).backward()
            its.step()
        its.set_backward_passes_per_step(1)
        for x in batches(6, 2):
            its.zero_grad(set_to_none=False)
            made(x).backward()
            made(2 * x).backward()  # both are reduced
            its.step()
        for x in batches(4, 3):
            its.zero_grad()
            with its.no_sync():
                made(x).backward()
            made(x - 1).backward()
            its.step()
    for own, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(own, theirs)  # the average of R + g, and R + the average of g


@on_ranks(2)
def test_gradients_of_a_bucket_are_given_back_during_backward() -> None:
    torch.manual_seed(5)
    first, second, third = (nn.Linear(5, 5) for _ in range(3))
    model = nn.Sequential(first, second, third)
    groups = [[*each.parameters()] for each in model]
    optimizer: Any = hvd.DistributedOptimizer(plain_adam(model.parameters()), shard="gradients", groups=groups)
    seen: list[type] = []
    for step, x in enumerate(batches(2)):
        optimizer.zero_grad()
        inputs = first(x)
        outputs = second(inputs)
        if step == 1:  # the first backward only watches
            outputs.register_hook(lambda _: wait_until(lambda: optimizer._reducer._plan.arrived(0)))
        inputs.register_hook(lambda _: seen.append(type(third.weight.grad)))
        third(outputs).sum().backward()
        optimizer.step()
    assert seen == [Tensor, ShardedGradient]


@on_ranks(2)
def test_what_reads_a_whole_gradient_raises() -> None:
    _, _, model, _optimizer = pair(OPTIMIZERS["SGD"], "states")
    model(batches(1)[0]).backward()
    gradient = model.inner.weight.grad
    assert gradient.shape == model.inner.weight.shape and "105 elements" in repr(gradient)
    for read in (
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda: gradient.norm(),
        lambda: gradient.numpy(),
        lambda: gradient.mul_(2),
        lambda: torch.cat([each.grad.flatten() for each in model.inner.parameters()]),
    ):
        with pytest.raises((UnsupportedTensorError, RuntimeError), match=r"with shard=|numpy"):
            read()


@on_ranks(3)
def test_clipping_sees_all_parts() -> None:
    for norm_type in (2.0, 1.0, float("inf")):
        model, optimizer, other, sharded = pair(OPTIMIZERS["SGD"], "gradients")
        for x in batches(5):
            optimizer.zero_grad()
            sharded.zero_grad()
            model(100 * x).backward()
            other(100 * x).backward()
            expected = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
            torch.testing.assert_close(sharded.clip_grad_norm_(0.1, norm_type), expected)
            optimizer.step()
            sharded.step()
        for own, theirs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(own, theirs)


@on_ranks(2)
def test_clipping_does_not_hide_nan() -> None:
    _, _, model, optimizer = pair(OPTIMIZERS["SGD"], "states")
    model(batches(1)[0]).backward()
    (model.factor * float("nan")).backward()
    assert optimizer.clip_grad_norm_(1.0, "inf").isnan()
    for norm_type in (0, -1, -float("inf")):
        with pytest.raises(ValueError, match="must be a number above 0, or inf"):
            optimizer.clip_grad_norm_(1.0, norm_type)


@on_ranks(2)
def test_a_scaler_skips_the_step_of_all_ranks() -> None:
    model, optimizer, other, sharded = pair(OPTIMIZERS["AdamW"], "states")
    results = []
    for made, its in ((model, optimizer), (other, sharded)):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        for step, x in enumerate(batches(6)):
            its.zero_grad()
            if step == 2 and hvd.rank() == 0:
                x[0, 0] = float("inf")
            scaler.scale(made(x)).backward()
            scaler.unscale_(its)
            scaler.step(its)
            scaler.update()
        results.append(scaler.get_scale())
    assert results[0] == results[1]
    same(model, other)


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


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second, self.late = nn.Linear(5, 30), nn.Linear(30, 11), nn.Linear(11, 3)
        self.late.requires_grad_(False)
        self.uses_late = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x).tanh())
        if self.uses_late:
            self.late.requires_grad_(True)
            y = self.late(y)
        return y.square().mean()


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
def test_options_go_together() -> None:
    for options in (
        {"compression": hvd.Compression.fp16},
        {"groups": 2},
        {"op": hvd.Sum},
        {"gradient_predivide_factor": 2.0},
    ):
        model, optimizer, other, sharded = pair(OPTIMIZERS["SGD"], "states", **options)
        train(model, optimizer, 5)
        train(other, sharded, 5)
        same(model, other)


@on_ranks(2)
def test_mixed_dtypes() -> None:
    def mixed() -> nn.Module:
        torch.manual_seed(3)
        return nn.ModuleList([nn.Linear(5, 9), nn.Linear(5, 7).double(), nn.Linear(5, 3).bfloat16(), nn.Linear(5, 31)])

    model, optimizer, other, sharded = pair(OPTIMIZERS["AdamW"], "states", mixed, compression=hvd.Compression.bf16)
    for made, its in ((model, optimizer), (other, sharded)):
        for x in batches(5):
            its.zero_grad()
            sum(each(x.to(each.weight.dtype)).square().mean().float() for each in made).backward()
            its.step()
    same(model, other)


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


@on_ranks(2)
def test_closures_schedulers_and_hooks() -> None:
    model, optimizer, other, sharded = pair(OPTIMIZERS["SGD"], "states")
    for made, its in ((model, optimizer), (other, sharded)):
        schedule = torch.optim.lr_scheduler.ExponentialLR(its, 0.9)
        for x in batches(5):

            def closure(made: nn.Module = made, its: Any = its, x: Tensor = x) -> Tensor:
                its.zero_grad()
                loss = made(x)
                loss.backward()
                return loss

            assert its.step(closure).item() > 0
            schedule.step()
        train(made, its, 3, 1)
    same(model, other)


@on_ranks(2)
def test_a_step_that_raises_leaves_the_parameters() -> None:
    _, _, model, optimizer = pair(OPTIMIZERS["SGD"], "states")
    train(model, optimizer, 1)
    whole = [id(each) for each in optimizer.param_groups[0]["params"]]
    optimizer.param_groups[0]["momentum"] = "none"
    model(batches(1)[0]).backward()
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.9
    train(model, optimizer, 2)
    assert [id(each) for each in optimizer.param_groups[0]["params"]] == whole


class Assigns(torch.optim.SGD):
    """Gives parameters new memory, and steps by their names."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if parameter.grad is not None:
                    parameter.data = parameter.data - parameter.grad * (0.1 if "bias" in name else 0.01)


@on_ranks(3)
def test_steps_that_assign_parameters_and_go_by_their_names() -> None:
    made = []
    for way in ("", "states", "gradients"):
        model = Model()
        train(model, hvd.DistributedOptimizer(Assigns(model.named_parameters(), 0.01), shard=way), 3)
        made.append(model)
    same(made[0], made[1])
    same(made[0], made[2])


@on_ranks(2)
def test_gradients_that_are_zeroed() -> None:
    for way in ("foreach", "fused"):
        _, _, model, optimizer = pair(lambda p, way=way: torch.optim.Adam(p, **{way: True}), "states")  # type: ignore[misc]
        train(model, optimizer, 1)
        optimizer.zero_grad(set_to_none=False)
        assert all(not each.grad.piece.any() for each in model.parameters() if each.grad is not None)
        train(model, optimizer, 1)


@on_ranks(2)
def test_converted_models_are_an_error() -> None:
    for convert in (lambda model: model.to(memory_format=torch.channels_last), lambda model: model.bfloat16()):
        model = nn.Conv2d(3, 4, 2)
        optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), shard="states")
        convert(model)
        for parameter in model.parameters():
            parameter.grad = None
        if model.weight.dtype is torch.float32:
            model(torch.ones(1, 3, 4, 4)).sum().backward()
        with pytest.raises(ValueError, match="Remedy: convert the model"):
            optimizer.step()


@on_ranks(2)
def test_compiled_models() -> None:
    model, optimizer, other, sharded = pair(OPTIMIZERS["SGD"], "states", Frozen)
    train(torch.compile(model, backend="eager"), optimizer, 4)
    train(torch.compile(other, backend="eager"), sharded, 4)
    same(model, other)


@on_ranks(2)
def test_what_is_refused() -> None:
    model = Model()
    with pytest.raises(ValueError, match=r"shard='all' is not known. Remedy: \"states\", \"gradients\""):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), shard="all")
    with pytest.raises(ValueError, match=r'Adafactor looks at whole tensors.*Remedy: shard_by="parameter"'):
        hvd.DistributedOptimizer(torch.optim.Adafactor(model.parameters()), shard="states")
    with pytest.raises(ValueError, match="SparseAdam looks at all parameters"):
        hvd.DistributedOptimizer(torch.optim.SparseAdam(model.parameters()), shard="states", shard_by="parameter")
    with pytest.raises(ValueError, match=r"shard_by='tensor' is not known. Remedy: \"element\""):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), shard="states", shard_by="tensor")
    with pytest.raises(ValueError, match=r'shard_by= needs shard="states"'):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), shard_by="parameter")
    with pytest.raises(ValueError, match="op=Adasum"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), op=hvd.Adasum, shard="states")
    averaging = type("Averaging", (torch.optim.SGD,), {"train": lambda self: None, "eval": lambda self: None})
    with pytest.raises(ValueError, match=r"train\(\) and eval\(\) of Averaging look for the state of whole"):
        hvd.DistributedOptimizer(averaging(model.parameters(), 0.1), shard="states")
    complex_one = [nn.Parameter(torch.ones(3, dtype=torch.complex64))]
    with pytest.raises(UnsupportedTensorError, match="no complex parameters"):
        hvd.DistributedOptimizer(torch.optim.SGD(complex_one, 0.1), shard="states")
    old = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(4, 5)).backward()
    old.step()
    with pytest.raises(ValueError, match="that has made steps cannot become sharded"):
        hvd.DistributedOptimizer(old, model.named_parameters(), shard="states")
    _, _, model, optimizer = pair(OPTIMIZERS["AdamW"], "states")
    train(model, optimizer, 1)
    with pytest.raises(ValueError, match=r"call full_state_dict\(root=0\) on every rank"):
        optimizer.state_dict()
    for make_copy in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ValueError, match="sharded optimizer cannot be copied"):
            make_copy(optimizer)
    with pytest.raises(ValueError, match=r"(?s)sharded.*load_state_dict"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    model(batches(1)[0]).backward()
    model.inner.weight.grad = torch.ones_like(model.inner.weight)
    with optimizer.skip_synchronize(), pytest.raises(ValueError, match="was not reduced"):
        optimizer.step()


@on_ranks(2)
def test_parts_that_would_move_are_an_error() -> None:
    _, _, model, optimizer = pair(OPTIMIZERS["AdamW"], "states")
    train(model, optimizer, 2)
    with pytest.raises(ValueError, match=r"full_state_dict\(root=2\): the ranks that share the state are \[0, 1\]"):
        optimizer.full_state_dict(root=2)
    left = optimizer.param_groups[0]["params"].pop()
    with pytest.raises(ValueError, match="a parameter has left a sharded optimizer"):
        optimizer.zero_grad()
    optimizer.param_groups[0]["params"].append(left)
    train(model, optimizer, 2)
    hvd.shutdown()
    hvd.init(comm=[1, 0])
    with pytest.raises(ValueError, match="has parts for 2 ranks"):
        train(model, optimizer, 1)


@on_ranks(2)
def test_a_rank_that_joins_is_an_error() -> None:
    _, _, model, optimizer = pair(OPTIMIZERS["SGD"], "states")
    train(model, optimizer, 2)
    if hvd.rank() == 1:
        hvd.join()
        return
    with pytest.raises(MismatchError, match=r"join\(\), and its part of the parameters"):
        model(batches(1)[0]).backward()
    hvd.join()


def plain_sgd(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@on_ranks(2)
def test_sparse_gradients() -> None:
    def embeddings() -> nn.Module:
        torch.manual_seed(4)
        return nn.Embedding(10, 5, sparse=True)

    model, optimizer, other, sharded = pair(OPTIMIZERS["SGD"], "states", embeddings)
    with pytest.raises(ValueError, match=r"sparse, which shard= does not take\. Remedy: sparse_as_dense=True"):
        other(torch.tensor([hvd.rank(), 3])).sum().backward()
    model, optimizer, other, sharded = pair(plain_sgd, "gradients", embeddings, sparse_as_dense=True)
    for made, its in ((model, optimizer), (other, sharded)):
        for step in range(3):
            its.zero_grad()
            made(torch.tensor([hvd.rank(), 3 + step])).square().sum().backward()
            its.step()
    same(model, other)


@on_ranks(1)
def test_a_world_of_one_is_not_sharded() -> None:
    model, optimizer, other, sharded = pair(OPTIMIZERS["AdamW"], "states")
    train(model, optimizer, 3)
    train(other, sharded, 3)
    same(model, other)
    same_state(optimizer.state_dict(), sharded.full_state_dict())
    model(batches(1)[0]).backward()
    assert np.isfinite(float(sharded.clip_grad_norm_(1.0)))
