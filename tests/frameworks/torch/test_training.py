"""What training scripts do with a wrapped optimizer: uneven data, compiled models, penalties, freezing, scaling."""

from __future__ import annotations

import contextlib
import copy
import io
import time
from typing import Any

import pytest
import torch
from torch import nn

import horovodish
import horovodish.torch as hvd
from support.leaves import backward, check, leaf, mean, own, total, wrapped
from support.on_ranks import on_ranks
from support.ranks import run_ranks


@on_ranks(3)
def test_gradients_are_overwritten_at_once() -> None:
    """The first rank is late in every step; the others destroy their gradients as soon as backward has returned."""
    for op, expected in [(hvd.Average, mean), (hvd.Sum, total)]:
        large, small = nn.Parameter(torch.zeros(700_001)), [leaf() for _ in range(20)]
        optimizer = wrapped([large, *small], op=op)
        for step in range(4):
            optimizer.zero_grad()
            if hvd.rank() == 0:
                time.sleep(0.05)
            backward([large, *small], own(step))
            gradients = [parameter.grad.clone() if hvd.rank() == 0 else parameter.grad for parameter in [large, *small]]
            for gradient in gradients if hvd.rank() == 0 else []:
                torch.testing.assert_close(gradient, torch.full_like(gradient, expected(step)), rtol=1e-6, atol=0)
            for parameter in [large, *small]:
                parameter.grad.fill_(float("nan"))


@on_ranks(3)
def test_uneven_data() -> None:
    """Ranks run out of data one after the other; those that are left reduce with those that have joined."""
    p = leaf()
    optimizer = wrapped([p], op=hvd.Sum)
    for step in range(2 + hvd.rank()):
        optimizer.zero_grad()
        backward([p], own())
        check(p, total() if step < 2 else sum(2.0**rank for rank in range(step - 1, hvd.size())))
        optimizer.step()
    assert horovodish.join() == hvd.size() - 1
    optimizer.zero_grad()
    backward([p], own())
    check(p, total())


@on_ranks(3)
def test_an_unused_layer_that_comes_while_others_have_joined() -> None:
    p, late = leaf(), nn.Parameter(torch.zeros(3, 2))
    optimizer = wrapped([p, late], op=hvd.Sum)
    last = hvd.size() - 1
    for step in range(2 if hvd.rank() < last else 6):
        optimizer.zero_grad()
        loss = (p * own()).sum()
        if step > 2:
            loss = loss + nn.functional.embedding(torch.tensor([1]), late, sparse=True).sum()
        loss.backward()
        check(p, total() if step < 2 else own())
        if step > 2:
            assert late.grad.to_dense().tolist() == [[0, 0], [1, 1], [0, 0]]
        optimizer.step()
    horovodish.join()
    optimizer.zero_grad()
    backward([p], own())
    check(p, total())


@on_ranks(3)
def test_frozen_again() -> None:
    for op in (hvd.Average, hvd.Sum):
        p, q = leaf(), leaf()
        optimizer = wrapped([p, q], op=op)
        for step in range(6):
            q.requires_grad_(step not in (2, 3))
            optimizer.zero_grad()
            backward([p, q], own(step))
            expected = mean(step) if op is hvd.Average else total(step)
            check(p, expected)
            if q.requires_grad:
                check(q, expected)
            else:
                assert q.grad is None
            optimizer.step()


@on_ranks(3)
def test_a_penalty_on_gradients() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    hvd.broadcast_parameters(model.state_dict())
    optimizer = wrapped(model.named_parameters())
    for step in range(3):
        optimizer.zero_grad()
        x = torch.full((2, 3), own(step) / 8, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        loss = model(x).sum() + slope.square().sum()
        expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)
        loss.backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, hvd.allreduce(gradient))
        optimizer.step()


@on_ranks(3)
def test_two_models_that_play_against_each_other() -> None:
    """Each optimizer steps after a backward that also reaches the other one's parameters."""
    torch.manual_seed(1)
    generator, critic = nn.Linear(2, 3), nn.Linear(3, 1)
    of_generator, of_critic = wrapped(generator.named_parameters()), wrapped(critic.named_parameters())
    for step in range(3):
        noise = torch.full((2, 2), own(step) / 8)
        of_critic.zero_grad()
        (critic(generator(noise).detach()).mean() - critic(torch.ones(2, 3)).mean()).backward()
        of_critic.step()
        of_generator.zero_grad()
        (-critic(generator(noise)).mean()).backward()
        of_generator.step()
    hvd.check_consistency(nn.ModuleList([generator, critic]))


@on_ranks(3)
def test_grad_scaler_of_a_fused_optimizer() -> None:
    """It is told of infinities and scales in its own step; one rank's infinity stops all of them."""
    for unscales in (False, True):
        p = leaf(1.0)
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam([p], lr=0.5, fused=True))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(2):
            optimizer.zero_grad()
            infinite = step == 0 and hvd.rank() == hvd.size() - 1
            scaler.scale((p * (float("inf") if infinite else 3.0)).sum()).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            torch.testing.assert_close(p.detach(), torch.full((3,), 0.5 if step else 1.0))
            assert scaler.get_scale() == 2.0


@on_ranks(3)
def test_copies_of_the_state() -> None:
    p = leaf()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam([p], lr=0.1), [("p", p)])
    backward([p], own())
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for one in (state, loaded):
        assert one["param_groups"] == optimizer.state_dict()["param_groups"]
        assert torch.equal(one["state"][0]["exp_avg"], optimizer.state[p]["exp_avg"])
    before = p.detach().clone()
    for one in (state, loaded):
        with torch.no_grad():
            p.copy_(before)
        optimizer.load_state_dict(one)
        optimizer.zero_grad()
        backward([p], own(1))
        optimizer.step()
        check(p, mean(1))
        hvd.check_consistency(nn.ParameterList([p]), optimizer)


@on_ranks(3)
def test_shared_parameters_and_two_backwards() -> None:
    p, q = leaf(), leaf()
    for op, expected in [(hvd.Average, mean), (hvd.Sum, total)]:
        optimizer = wrapped([p, q], op=op)
        for step in range(3):
            optimizer.zero_grad()
            ((p + p * q) * own(step)).sum().backward()
            (p * own(step)).sum().backward()
            check(p, 2 * expected(step))
            check(q, 0.0)


def compiled_models() -> None:
    hvd.init()
    train_compiled("aot_eager")
    compiled_steps()
    compiled_whole_steps()
    compiled_collectives()
    compiled_autograd()


def compiled_kernels() -> None:
    hvd.init()
    train_compiled("inductor")  # as by default


def train_compiled(backend: str) -> None:
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    hvd.broadcast_parameters(model.state_dict())
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, compiled.named_parameters())
    plain = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        inputs = torch.full((4, 3), own(step) / 8)
        optimizer.zero_grad()
        compiled(inputs).square().mean().backward()
        optimizer.step()
        plain.zero_grad()
        twin(inputs).square().mean().backward()
        for parameter in twin.parameters():
            hvd.allreduce_(parameter.grad)
        plain.step()
        for one, other in zip(compiled.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one, other)
        hvd.check_consistency(model, optimizer)


def compiled_steps() -> None:
    """What reduces is not compiled along, which would have to be done again whenever its state has changed."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2))
    hvd.broadcast_parameters(model.state_dict())
    optimizer = wrapped(model.named_parameters())
    compiled = torch.compile(optimizer.step, backend="aot_eager")
    for step in range(6):
        optimizer.zero_grad()
        with optimizer.no_sync() if step % 2 else contextlib.nullcontext():
            model(torch.full((4, 3), own() / 8)).square().mean().backward()
        with torch._dynamo.config.patch(error_on_recompile=True):
            compiled()
        hvd.check_consistency(model)


def compiled_whole_steps() -> None:
    """Backward runs outside of the graphs, but its hooks run within a compiled function."""
    for options in ({}, {"op": hvd.Sum}, {"op": hvd.Adasum}, {"compression": hvd.Compression.bf16}):
        torch._dynamo.reset()
        p = nn.Parameter(torch.zeros(3))
        optimizer = wrapped([p], **options)

        @torch.compile(backend="aot_eager")
        def whole_step(inputs: torch.Tensor, p: torch.Tensor = p, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (p * inputs).sum() * hvd.size()
            loss.backward()
            optimizer.step()
            return loss.detach()

        for _ in range(4):  # the first reduction compares layouts
            whole_step(torch.full((3,), 1.0))
        change = 1 if options.get("op") is hvd.Sum else 1 / hvd.size()
        torch.testing.assert_close(p.data, torch.full((3,), -4.0 * hvd.size() ** 2 * change))


def compiled_collectives() -> None:
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager")
    def total_of(tensor: torch.Tensor) -> torch.Tensor:
        total = hvd.allreduce(tensor * 2, op=hvd.Sum)
        handle = hvd.allreduce_async(tensor * hvd.rank(), op=hvd.Sum)
        return total + hvd.synchronize(handle) + hvd.allgather(tensor).sum(0) + hvd.broadcast_object(1)

    for _ in range(2):
        assert total_of(torch.ones(1)).tolist() == [2 * hvd.size() + sum(range(hvd.size())) + hvd.size() + 1]


def compiled_autograd() -> None:
    p = leaf()
    optimizer = wrapped([p])
    enabled = torch._dynamo.compiled_autograd._enable
    for step in range(2):
        with enabled(torch.compile(backend="eager")), pytest.raises(RuntimeError, match="compiled_autograd off"):
            backward([p], own(step))
        optimizer.zero_grad()
        backward([p], own(step))
        check(p, mean(step))


@pytest.mark.soak
def test_compiled_models() -> None:
    run_ranks(compiled_models, 2, fresh=True)


@pytest.mark.soak
def test_compiled_kernels() -> None:
    # One precompiled header takes longer than the few kernels that could use it.
    run_ranks(compiled_kernels, 2, env={"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"})
