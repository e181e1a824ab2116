"""`TorchState`: what it keeps of models, optimizers and tensors, and what begins anew when the ranks have changed."""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import horovodish.torch as hvd
from horovodish.elastic.memory import Schedule
from horovodish.elastic.state import _Budget
from horovodish.gradients import windows
from horovodish.torch.elastic import TorchState
from support.ranks import run_ranks
from support.scripts import output_of
from support.sources import ROOT


def kept(value: Any) -> Any:
    """The value after it was committed, replaced and restored."""
    state = TorchState(value=value)
    state.commit()
    state.value = None
    state.restore()
    return state.value


def same(one: Tensor, other: Tensor) -> None:
    assert one.dtype == other.dtype
    assert one.layout == other.layout
    assert one.requires_grad == other.requires_grad
    assert one.is_leaf
    if one.layout == torch.strided:
        assert one.stride() == other.stride()
    torch.testing.assert_close(one.detach(), other.detach(), rtol=0, atol=0, equal_nan=True)


TENSORS = {
    "plain": torch.randn(5, 3),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.randn(3, 4).t(),
    "bfloat16": torch.randn(4, dtype=torch.bfloat16),
    "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
    "booleans": torch.tensor([True, False]),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0),
    "no rows": torch.empty(0, 3, dtype=torch.int64),
    "with gradient": torch.randn(2, 3, requires_grad=True),
    "sparse": torch.eye(4).to_sparse(),
    "sparse without values": torch.zeros(3, 3).to_sparse(),
    "not finite": torch.tensor([float("nan"), float("inf")]),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_a_tensor_is_kept(tensor: Tensor) -> None:
    same(kept(tensor), tensor)


def test_a_part_of_a_tensor_is_kept_alone() -> None:
    part = torch.arange(10_000)[::1000]
    back = kept(part)
    assert back.tolist() == part.tolist()
    assert back.untyped_storage().nbytes() == 80


def test_a_parameter_and_what_holds_tensors_are_kept() -> None:
    state, parameter = TorchState(), nn.Parameter(torch.zeros(3))
    state.several = [parameter]
    state.commit()
    with torch.no_grad():
        parameter.fill_(1)
    state.restore()
    assert state.several[0] is parameter, "optimizers refer to it"
    assert parameter.tolist() == [0, 0, 0]
    tensor = torch.randn(3)
    one, other, numbers = kept([tensor, tensor, np.arange(3)])
    assert one is other
    same(one, tensor)
    np.testing.assert_array_equal(numbers, np.arange(3))


def test_the_kept_tensor_does_not_change_with_the_live_one() -> None:
    state = TorchState(value=torch.zeros(3))
    state.commit()
    for _ in range(2):
        state.value += 1
        state.restore()
        assert state.value.tolist() == [0, 0, 0]


class Versioned(nn.Module):
    """Was saved otherwise in its first version."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *args: Any) -> None:
        assert metadata.get("version") == 2
        super()._load_from_state_dict(state_dict, prefix, metadata, *args)


def test_models_optimizers_and_schedulers_go_back() -> None:
    torch.manual_seed(0)
    first = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
    model = nn.Sequential(first, nn.BatchNorm2d(4), Versioned(), nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 4))
    model[5].weight = model[4].weight
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = TorchState(model, optimizer, scheduler=scheduler)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 2, 3, 3)).square().mean().backward()
        optimizer.step()
        scheduler.step()

    state.commit()  # of an optimizer without state
    step()
    state.restore()
    assert not optimizer.state_dict()["state"]
    step()
    state.commit()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    step()
    after = {name: value.clone() for name, value in model.state_dict().items()}
    rates = [group["lr"] for group in optimizer.param_groups]
    state.restore()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, values[name], rtol=0, atol=0)
    assert model[5].weight is model[4].weight
    assert first.weight.is_contiguous(memory_format=torch.channels_last)
    step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, after[name], rtol=0, atol=0)
    assert [group["lr"] for group in optimizer.param_groups] == rates


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits are held, and not copied unless they must be."""
    monkeypatch.setattr(Schedule, "is_due", lambda *_: False)
    monkeypatch.setattr(_Budget, "allows", lambda _: True)


@pytest.mark.usefixtures("held")
def test_statistics_of_any_size_go_back() -> None:
    """Batch normalization does not count what it writes to them."""
    layer = nn.BatchNorm1d(8192)
    state = TorchState(layers=[layer])
    state.commit()
    layer(torch.randn(4, 8192))
    state.restore()
    assert not layer.running_mean.any()
    assert int(layer.num_batches_tracked) == 0


WRITES = {
    "in place": lambda p, _: p.add_(1),
    "a collective into an alias": lambda p, _: hvd.broadcast_(p.data, 0),
    "a step": lambda _, optimizer: optimizer.step(),
}


def write_after_a_commit() -> list[str]:
    hvd.init()
    seen = []
    for name, write in WRITES.items():
        parameter = nn.Parameter(torch.zeros(10_000))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        state = TorchState(optimizer=optimizer, parameter=parameter)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Schedule, "is_due", lambda *_: False)
            patched.setattr(_Budget, "allows", lambda _: True)
            state.commit()
        with torch.no_grad():
            state.restore()
            write(parameter, optimizer)  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError, match="commit 1 was not copied"):
            state.restore()
        seen.append(name)
    return seen


def test_writes_after_a_commit_are_seen() -> None:
    assert run_ranks(write_after_a_commit, 1) == [list(WRITES)]


def test_an_optimizer_keeps_the_types_of_its_tensors() -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter]["master"] = torch.full((3,), 0.998)
    state = TorchState(optimizer=optimizer)
    state.commit()
    optimizer.state[parameter]["master"] = torch.zeros(3)
    state.restore()
    same(optimizer.state[parameter]["master"], torch.full((3,), 0.998))


def test_what_cannot_be_kept_is_named() -> None:
    with pytest.raises(TypeError, match=r"state\.value cannot be kept: .*lambda.* name it _value"):
        kept([torch.zeros(1), lambda: 0])
    with pytest.raises(TypeError, match=r"state\.value cannot be kept"):
        kept(torch.zeros(3, device="meta"))


def test_a_dictionary_that_is_no_state_of_an_object_stays_what_it_is() -> None:
    back = kept(OrderedDict(a=torch.ones(1), b=1))
    assert type(back) is OrderedDict
    assert back["a"].tolist() == [1]


def begin_among_other_ranks(op: str, sparse: bool) -> list[list[float]]:
    """The optimizer goes on after another `init()`, though a rank lacks what others have compared or accumulated."""
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Embedding(4, 3, sparse=sparse), nn.Linear(3, 2))
    wrapped = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        wrapped, model.named_parameters(), op=getattr(hvd, op), backward_passes_per_step=2 if op == "Average" else 1
    )
    state = TorchState(model, optimizer, step=0)
    state.sync()

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(2 if op == "Average" else 1):
            model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()

    step()
    if hvd.rank() == 0 and op == "Average":
        model(torch.tensor([3])).sum().backward()  # half of a window
    state.save() if not state._has_open_window() else None
    hvd.shutdown()
    hvd.init()
    if hvd.rank() == 1:  # as a rank that has just come
        model = nn.Sequential(nn.Embedding(4, 3, sparse=sparse), nn.Linear(3, 2))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            op=getattr(hvd, op),
            backward_passes_per_step=2 if op == "Average" else 1,
        )
        number, state = state._number, TorchState(model, optimizer, step=0)
        state._number = number
    else:
        TorchState()  # the ranks of the next test count alike
        windows.restart()
        assert all(parameter.grad is None for parameter in model.parameters())
    state.sync()
    for _ in range(3):
        step()
    hvd.check_consistency(model, optimizer)
    return [parameter.flatten().tolist() for parameter in model.parameters()]


@pytest.mark.parametrize(("op", "sparse"), [("Average", False), ("Average", True), ("Adasum", False)])
def test_optimizers_begin_anew(op: str, sparse: bool) -> None:
    results = run_ranks(begin_among_other_ranks, 2, args=(op, sparse))
    assert results[0] == results[1]


def settle_samples() -> list[int]:
    hvd.init()
    sampler = hvd.elastic.ElasticSampler(range(22), shuffle=False)
    state = TorchState(sampler=sampler, step=0)
    state.sync()
    samples = iter(sampler)
    if hvd.rank() == 1:  # in the last step, the other ranks had one sample less
        assert [next(samples) for _ in range(2)] == [1, 4]
        sampler.record(2)
    state.commit()
    state.sync()
    state.on_reset()
    return list(sampler)


def test_the_rank_that_knows_most_says_which_samples_are_left() -> None:
    assert run_ranks(settle_samples, 3) == [list(range(6 + rank, 22, 3)) for rank in range(3)]


@pytest.mark.soak
def test_the_example() -> None:
    output = output_of(ROOT / "examples/elastic_torch.py", np=2, flags=["--min-np", "1"])
    accuracy = re.search(r"^test accuracy (\d\.\d+) on 2 ranks$", output, re.MULTILINE)
    assert accuracy is not None, output
    assert float(accuracy[1]) >= 0.95
