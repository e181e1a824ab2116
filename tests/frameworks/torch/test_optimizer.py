"""The wrapped optimizer as an optimizer: class, state, hooks, schedulers, names, copies."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

import horovodish.torch as hvd
from horovodish.errors import NotInitializedError, UnsupportedTensorError
from support.on_ranks import on_ranks


def small_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 3), float(step + 1))).sum().backward()
        optimizer.step()


@pytest.fixture
def world_of_one() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


@on_ranks(2)
def test_the_class() -> None:
    for make in (torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad):
        original = make(small_model().parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(original)
        assert optimizer is original
        assert isinstance(optimizer, make)
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert repr(optimizer).startswith(f"Distributed{make.__name__} (")
    other = hvd.DistributedOptimizer(torch.optim.Adagrad(small_model().parameters(), lr=0.1))
    assert type(other) is type(optimizer)

    class Own(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            self.called = True
            return super().step(closure)

    model = small_model()
    own = hvd.DistributedOptimizer(Own(model.parameters(), lr=0.1))
    train(model, own)
    assert own.called


@on_ranks(2)
def test_existing_state() -> None:
    model, twin = small_model(), small_model()
    optimizer, expected = (torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, twin))
    for m, o in ((model, optimizer), (twin, expected)):
        train(m, o, 3)
    state, groups = optimizer.state, optimizer.param_groups
    averages = {p: optimizer.state[p]["exp_avg"].clone() for p in model.parameters()}
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    assert optimizer.state is state
    assert optimizer.param_groups is groups
    assert all(torch.equal(optimizer.state[p]["exp_avg"], average) for p, average in averages.items())
    for m, o in ((model, optimizer), (twin, expected)):
        train(m, o, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@on_ranks(2)
def test_zero_grad() -> None:
    model = small_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, optimizer)
    before = [p.grad for p in model.parameters()]
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is b for p, b in zip(model.parameters(), before, strict=True))
    assert not any(p.grad.any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    train(model, optimizer)
    model.zero_grad()
    train(model, optimizer)


class KeepsGradients(torch.optim.SGD):
    def zero_grad(self) -> None:
        super().zero_grad(set_to_none=False)


@on_ranks(2)
def test_zero_grad_without_an_argument() -> None:
    model = small_model()
    optimizer = hvd.DistributedOptimizer(KeepsGradients(model.parameters(), lr=0.1))
    train(model, optimizer)
    optimizer.zero_grad()
    assert not any(p.grad.any() for p in model.parameters())


@on_ranks(2)
def test_hooks_on_step() -> None:
    model = small_model()
    original = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []

    def pre_hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        seen.append(next(model.parameters()).grad.clone())

    original.register_step_pre_hook(pre_hook)
    original.register_step_post_hook(lambda *_: seen.append("post"))
    optimizer = hvd.DistributedOptimizer(original, backward_passes_per_step=2)
    (model(torch.ones(1, 3)).sum() * (hvd.rank() + 1)).backward()
    own = next(model.parameters()).grad.clone()
    optimizer.step()
    mean = own / (hvd.rank() + 1) * sum(range(1, hvd.size() + 1)) / hvd.size()
    torch.testing.assert_close(seen[0], mean)
    assert seen[1] == "post"
    assert len(seen) == 2


@on_ranks(2)
def test_schedulers() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for before in (True, False):
            for make in (
                lambda optimizer: StepLR(optimizer, 1, 0.5),
                lambda optimizer: LambdaLR(optimizer, lambda epoch: 0.5**epoch),
            ):
                model = small_model()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                scheduler = make(optimizer) if before else None
                optimizer = hvd.DistributedOptimizer(optimizer)
                scheduler = scheduler or make(optimizer)
                for _ in range(2):
                    train(model, optimizer)
                    scheduler.step()
                assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        scheduler = OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
        train(model, optimizer)
        scheduler.step()


@on_ranks(2)
def test_grad_scaler() -> None:
    """An infinite gradient on one rank: every rank skips the step, because every rank has the reduced gradient."""
    model = small_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [p.detach().clone() for p in model.parameters()]
    for step in range(2):
        optimizer.zero_grad()
        infinite = step == 0 and hvd.rank() == 0
        scaler.scale(model(torch.ones(1, 3)).sum() * (float("inf") if infinite else 1.0)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        unchanged = all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        assert unchanged == (step == 0)
    assert scaler.get_scale() == 2.0


@on_ranks(2)
def test_state_dicts() -> None:
    model, twin = small_model(), small_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model.named_parameters())
    plain = torch.optim.Adam(twin.parameters(), lr=0.3)
    train(model, optimizer, 2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    plain.load_state_dict(torch.load(file, weights_only=True))
    twin.load_state_dict(model.state_dict())
    train(model, optimizer)
    train(twin, plain)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    optimizer.load_state_dict(plain.state_dict())
    train(model, optimizer)


@on_ranks(2)
def test_copies_and_pickles() -> None:
    model = small_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model.named_parameters())
    train(model, optimizer, 2)
    model_copy, optimizer_copy = copy.deepcopy((model, optimizer))
    assert type(optimizer_copy) is torch.optim.Adam
    assert optimizer_copy.param_groups[0]["params"][0] is next(model_copy.parameters())
    assert type(pickle.loads(pickle.dumps(optimizer))) is torch.optim.Adam
    again = hvd.DistributedOptimizer(optimizer_copy, model_copy.named_parameters())
    for m, o in ((model, optimizer), (model_copy, again)):
        train(m, o, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), model_copy.parameters(), strict=True))


@on_ranks(2)
def test_names() -> None:
    model = small_model()
    parameters = list(model.parameters())

    def wrap(named: Any) -> Any:
        return hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), named)

    with pytest.raises(ValueError, match="these names more than once: same"):
        wrap([("same", parameter) for parameter in parameters])
    with pytest.raises(ValueError, match=r"does not name parameter 0 of group 0, of shape \(4, 3\)"):
        wrap(list(model.named_parameters())[1:])
    for wrong in (parameters, model, model.state_dict()):
        with pytest.raises(ValueError, match="pairs of a name and a parameter"):
            wrap(wrong)
    train(model, wrap([*model.named_parameters(), ("another", nn.Parameter(torch.ones(1)))]))
    train(model, wrap(model.named_parameters(remove_duplicate=False)))
    train(model, wrap(iter(model.named_parameters())))
    train(model, wrap(None))


@on_ranks(2)
def test_refusals() -> None:
    parameters = list(small_model().parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    with pytest.raises(ValueError, match=r"gradient_predivide_factor=2.0 needs op=Average"):
        hvd.DistributedOptimizer(optimizer, op=hvd.Sum, gradient_predivide_factor=2.0)
    for options, text in [
        ({"backward_passes_per_step": 0}, "backward_passes_per_step=0 must be a whole number, 1 or more"),
        ({"backward_passes_per_step": 2.5}, "backward_passes_per_step=2.5 must be a whole number"),
        ({"gradient_predivide_factor": 0.0}, "gradient_predivide_factor=0.0 is not positive"),
        ({"compression": "fp16"}, "compression='fp16' is not a compression; use Compression.none, .fp16"),
        ({"op": "sum"}, "op='sum' is not a reduce op"),
    ]:
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(optimizer, **options)
    with pytest.raises(TypeError, match=r"process_set must be a ProcessSet, such as .* not list"):
        hvd.DistributedOptimizer(optimizer, process_set=[0, 1])
    with pytest.raises(TypeError, match=r"wraps a torch.optim.Optimizer, not Linear"):
        hvd.DistributedOptimizer(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="LBFGS decides by the loss"):
        hvd.DistributedOptimizer(torch.optim.LBFGS(parameters))
    assert type(optimizer) is torch.optim.SGD
    wrapped = hvd.DistributedOptimizer(optimizer)
    with pytest.raises(ValueError, match="DistributedSGD is wrapped already"):
        hvd.DistributedOptimizer(wrapped)
    small = nn.Parameter(torch.ones(2).to(torch.float8_e5m2))
    with pytest.raises(UnsupportedTensorError, match=r"gradient of group0.0: dtype torch.float8_e5m2"):
        hvd.DistributedOptimizer(torch.optim.SGD([small], lr=0.1))
    elsewhere = nn.Linear(2, 2, device="meta")
    with pytest.raises(UnsupportedTensorError, match="parameter weight: device meta"):
        hvd.DistributedOptimizer(torch.optim.SGD(elsewhere.parameters(), lr=0.1), elsewhere.named_parameters())


@on_ranks(2)
def test_nothing_stays_behind() -> None:
    model = small_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Sum)
    train(model, optimizer, 2)
    gone = weakref.ref(optimizer), weakref.ref(optimizer._reducer)
    del optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    model.zero_grad()
    model(torch.ones(1, 3)).sum().backward()


def test_in_a_world_of_one(world_of_one: None) -> None:
    model = small_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), backward_passes_per_step=2)
    train(model, optimizer, 2)
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    hvd.broadcast_parameters(model.state_dict())
    hvd.broadcast_optimizer_state(optimizer)
    assert hvd.broadcast_object(3) == 3


def test_before_init() -> None:
    with pytest.raises(NotInitializedError, match=r"call hvd.init\(\) before DistributedOptimizer\(\)"):
        hvd.DistributedOptimizer(torch.optim.SGD(small_model().parameters(), lr=0.1))


@on_ranks(3)
def test_a_rank_of_a_process_set_joins() -> None:
    """Rank 0 has one batch more and steps by its own gradient, also where a policy has made the set."""
    pair = hvd.add_process_set([0, 2])
    for options in ({"process_set": pair}, {"sync": hvd.Hierarchical(within="host", every=10)}):
        if hvd.rank() != 1 or "sync" in options:
            model = nn.Linear(1, 1, bias=False)
            nn.init.ones_(model.weight)
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), **options)
            for _ in range(1 + (hvd.rank() == 0)):
                optimizer.zero_grad()
                model(torch.full((1, 1), hvd.rank() + 1.0)).sum().backward()
                optimizer.step()
            assert model.weight.item() == (-2 if hvd.rank() == 0 else -1)
        hvd.join()
