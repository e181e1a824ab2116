"""Steps of optimizers whose state the ranks share: the same bits as without shards."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import horovodish.torch as hvd
from horovodish.torch.shards.gradient import ShardedGradient
from support.on_ranks import on_ranks
from support.processes import wait_until
from support.sharded import (
    OPTIMIZERS,
    SHARED,
    WHOLE,
    Frozen,
    Model,
    batches,
    pair,
    pairs_of_ranks,
    plain_adam,
    same,
    same_state,
    train,
)


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


def adamw_in_groups(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    matrices, others = [], []
    for parameter in parameters:
        (matrices if parameter.dim() > 1 else others).append(parameter)
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 1e-3}]
    return torch.optim.AdamW(groups, lr=1e-2)


@pytest.mark.soak
@on_ranks(2, 3)
def test_a_hundred_steps() -> None:
    for make in (plain_adam, adamw_in_groups, OPTIMIZERS["SGD"]):
        trained = []
        for options in ({}, *SHARED.values()):
            model = Model()
            its = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), **options)  # type: ignore[arg-type]
            train(model, its, 100)
            trained.append(model)
        for other in trained[1:]:
            same(trained[0], other)


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


class DecaysMatrices(torch.optim.SGD):
    """Steps matrices and vectors differently."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(0.9 if parameter.dim() > 1 else 1.0).sub_(parameter.grad, alpha=group["lr"])
                    self.state[parameter].setdefault("sum", torch.zeros_like(parameter)).add_(parameter.grad)


@on_ranks(3)
def test_parts_have_as_many_dimensions_as_their_parameters() -> None:
    model, optimizer, other, sharded = pair(lambda parameters: DecaysMatrices(parameters, 0.01), "states")
    for made, its in ((model, optimizer), (other, sharded)):
        train(made, its, 3)
    same(model, other)
    full = hvd.broadcast_object(sharded.full_state_dict())
    same_state(optimizer.state_dict(), full)
    sharded.load_state_dict(full)
    train(other, sharded, 3)
    train(model, optimizer, 3)
    same_state(optimizer.state_dict(), hvd.broadcast_object(sharded.full_state_dict()))


@on_ranks(2)
def test_gradients_that_are_zeroed() -> None:
    for way in ("foreach", "fused"):
        _, _, model, optimizer = pair(lambda p, way=way: torch.optim.Adam(p, **{way: True}), "states")  # type: ignore[misc]
        train(model, optimizer, 1)
        optimizer.zero_grad(set_to_none=False)
        assert all(not each.grad.piece.any() for each in model.parameters() if each.grad is not None)
        train(model, optimizer, 1)


@on_ranks(2)
def test_compiled_models() -> None:
    model, optimizer, other, sharded = pair(OPTIMIZERS["SGD"], "states", Frozen)
    train(torch.compile(model, backend="eager"), optimizer, 4)
    train(torch.compile(other, backend="eager"), sharded, 4)
    same(model, other)


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
