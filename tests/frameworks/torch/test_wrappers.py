"""Optimizers around other optimizers: their steps are reduced, and the state of both travels. Wrappings that fail."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytorch_optimizer import Lookahead, ScheduleFreeWrapper
from torch import nn
from torch.optim.lr_scheduler import StepLR

import horovodish.torch as hvd
from horovodish.errors import MismatchError, UnsupportedTensorError
from support.leaves import backward, check, leaf, mean, own, total
from support.on_ranks import on_ranks


class Around(torch.optim.Optimizer):
    """Does not call `Optimizer.__init__()`, and has an empty state of its own."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.defaults, self.state = base, base.defaults, defaultdict(dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["base"], name)

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


class WithDicts(Around):
    """As timm's Lookahead."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base)
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()


class Extends(torch.optim.SGD):
    """Its step calls the hooks, and so does the step that it extends."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter -= hvd.rank()
        return loss


@on_ranks(2)
def test_steps_are_reduced() -> None:
    # Classes of their own, since a step that was made to call hooks does so for all objects of its class.
    for kind in (Around, WithDicts):
        for op, expected in ((hvd.Average, -mean()), (hvd.Adasum, -1.5)):
            p = leaf()
            around = type(kind.__name__, (kind,), {"step": lambda self, closure=None: self.base.step(closure)})
            optimizer: Any = hvd.DistributedOptimizer(around(torch.optim.SGD([p], lr=1.0)), op=op)
            backward([p], own())
            optimizer.step()
            assert p.tolist() == [expected] * 3, (kind, op)
        # A window that ends early, a step after no_sync(), and gradients that are set by hand.
        p = leaf()
        around = type(kind.__name__, (kind,), {"step": lambda self, closure=None: self.base.step(closure)})
        optimizer = hvd.DistributedOptimizer(
            around(torch.optim.SGD([p], lr=1.0)), op=hvd.Sum, backward_passes_per_step=2
        )
        backward([p], own())
        optimizer.step()
        check(p, total())
        optimizer.zero_grad()
        optimizer.set_backward_passes_per_step(1)
        with optimizer.no_sync():
            backward([p], own(1))
        optimizer.step()
        check(p, total(1))
        p.grad = torch.full((3,), own(2))
        optimizer.step()
        check(p, total(2))


@on_ranks(2)
def test_a_step_that_extends_another() -> None:
    torch.optim.SGD([leaf()])  # whose steps call hooks from now on
    p = leaf()
    optimizer = hvd.DistributedOptimizer(Extends([p], lr=1.0), op=hvd.Adasum)
    for _ in range(2):
        before = p.detach().clone()
        optimizer.zero_grad()
        backward([p], own())
        optimizer.step()
        change = hvd.allreduce(torch.full((3,), -own() - hvd.rank()), op=hvd.Adasum)
        assert torch.equal(p, before + change)


@on_ranks(2)
def test_wrappers_that_cannot_work() -> None:
    class WithoutGroups(torch.optim.Optimizer):
        def __init__(self) -> None:
            pass

    with pytest.raises(TypeError, match="WithoutGroups has no param_groups"):
        hvd.DistributedOptimizer(WithoutGroups())

    class Scheduled(Around):
        def step(self, closure: Any = None) -> Any:
            return self.base.step(closure)

    p = leaf()
    optimizer = Scheduled(torch.optim.SGD([p], lr=1.0))
    StepLR(optimizer, 1)
    with pytest.raises(ValueError, match=r"step\(\) of this Scheduled was replaced.*then make the scheduler"):
        hvd.DistributedOptimizer(optimizer)
    assert type(optimizer) is Scheduled
    assert not p._post_accumulate_grad_hooks


@pytest.mark.parametrize("adasum", [False, True])
@on_ranks(2)
def test_a_wrapping_that_fails_is_undone(adasum: bool) -> None:
    options = {"op": hvd.Adasum} if adasum else {}
    p, wrong = leaf(), nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)
    wrong.data = torch.zeros(2, dtype=torch.float8_e5m2)
    wrong.requires_grad_()
    # Of two optimizers over one parameter the last reduces it, unless its wrapping has failed.
    first: Any = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), **options)
    hooks = copy.copy(p._post_accumulate_grad_hooks)
    second = torch.optim.SGD([p, wrong], lr=1.0)
    with pytest.raises(UnsupportedTensorError, match=r"group0.1: dtype torch.float8_e5m2"):
        hvd.DistributedOptimizer(second, **options)
    assert type(second) is torch.optim.SGD
    assert not second._optimizer_step_pre_hooks  # type: ignore[attr-defined]
    assert p._post_accumulate_grad_hooks == hooks
    with pytest.raises(UnsupportedTensorError, match=r"group1.0: dtype torch.float8_e5m2"):
        first.add_param_group({"params": [wrong]})
    assert len(first.param_groups) == 1
    for _ in range(2):
        first.zero_grad()
        before = p.detach().clone()
        backward([p], own())
        if not adasum:
            check(p, mean())
        first.step()
        assert torch.equal(p, before - 1.5)
    q = leaf()
    first.add_param_group({"params": [q], "lr": 1.0})
    backward([q], own())
    first.step()
    assert q.tolist() == [-1.5] * 3


def step(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    if isinstance(optimizer, ScheduleFreeWrapper):
        optimizer.train()
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


HOLDERS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda base: Lookahead(base, k=2), "option 'counter'"),
    (ScheduleFreeWrapper, "optimizer state 'z'"),
    (Around, "inner optimizer 1: optimizer state 'momentum_buffer'"),  # without a state_dict() of its own
]
"""And what of it differs first where only one rank has taken a step."""


@on_ranks(2)
def test_the_state_within() -> None:
    for make, first in HOLDERS:
        parameters = [leaf(1.0), nn.Parameter(torch.ones(3, dtype=torch.bfloat16))]
        base = torch.optim.SGD([{"params": [p]} for p in parameters], lr=0.5, momentum=0.9)
        optimizer = make(base)
        model = nn.ParameterList(parameters)
        if hvd.rank() == 0:
            step(optimizer, parameters)
            base.state[parameters[1]]["momentum_buffer"] = torch.full((3,), 1 / 3)  # in another dtype
        hvd.broadcast_parameters(model.state_dict())
        with pytest.raises(MismatchError, match=f"check_consistency: {first}"):
            hvd.check_consistency(model, optimizer)
        hvd.broadcast_optimizer_state(optimizer)
        hvd.check_consistency(model, optimizer)
        assert base.state[parameters[0]]["momentum_buffer"].tolist() == [1.0] * 3, first
        assert base.state[parameters[1]]["momentum_buffer"].dtype is torch.float32, first
        for _ in range(3):
            step(optimizer, parameters)
        hvd.check_consistency(model, optimizer)
        if hvd.rank():
            base.param_groups[1]["lr"] = 0.25
        with pytest.raises(MismatchError, match=r"option 'lr' of parameter group . differs"):
            hvd.check_consistency(model, optimizer)


@on_ranks(2)
def test_what_a_state_dict_alone_knows() -> None:
    p = leaf(1.0)
    optimizer = ScheduleFreeWrapper(torch.optim.SGD([p], lr=0.5))
    if hvd.rank() == 0:
        optimizer.train()
    model = nn.ParameterList([p])
    with pytest.raises(MismatchError, match="optimizer state_dict 'train_mode' differs"):
        hvd.check_consistency(model, optimizer)
    hvd.broadcast_optimizer_state(optimizer)
    assert optimizer.train_mode
    with pytest.raises(MismatchError, match=r"only rank 0 has Lookahead"):
        hvd.broadcast_optimizer_state(
            torch.optim.SGD([p], lr=0.5) if hvd.rank() else Lookahead(torch.optim.SGD([p], lr=0.5))
        )


@on_ranks(2)
def test_state_by_parameters_one_level_down() -> None:
    p = leaf()
    optimizer = torch.optim.SGD([p], lr=1.0)
    optimizer.state["common"] = {p: torch.full((2,), float(hvd.rank())), "of": [p]}  # type: ignore[index]
    optimizer.state[0] = {"calls": hvd.rank()}  # type: ignore[index]
    with pytest.raises(MismatchError, match=r"optimizer state 'common' 'weight' differs"):
        hvd.check_consistency(nn.ParameterDict({"weight": p}), optimizer)
    hvd.broadcast_optimizer_state(optimizer)
    assert optimizer.state["common"][p].tolist() == [0.0, 0.0]  # type: ignore[index]
    assert optimizer.state["common"]["of"][0] is p  # type: ignore[index]
    assert optimizer.state[0] == {"calls": 0}  # type: ignore[index]
    hvd.check_consistency(nn.ParameterDict({"weight": p}), optimizer)


@on_ranks(2)
def test_elastic_states() -> None:
    for make, _ in HOLDERS:
        parameters = [leaf(1.0)]
        optimizer = make(torch.optim.SGD(parameters, lr=0.5, momentum=0.9))
        model = nn.ParameterList(parameters)
        state = hvd.elastic.TorchState(model, optimizer)
        step(optimizer, parameters)
        state.save()
        step(optimizer, parameters)
        after = parameters[0].tolist()
        state.restore()
        step(optimizer, parameters)
        assert parameters[0].tolist() == after, make
