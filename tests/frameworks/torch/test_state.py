"""The same start on every rank: parameters, buffers and optimizer state come from the root, which stays as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import horovodish.torch as hvd
from horovodish.errors import MismatchError, UnsupportedTensorError
from support.expect import one_rank_is_wrong
from support.leaves import leaf
from support.on_ranks import on_ranks


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))


@on_ranks(3)
def test_parameters_and_buffers() -> None:
    torch.manual_seed(hvd.rank())
    for root in range(hvd.size()):
        own = model()
        own[1].running_mean.fill_(hvd.rank())
        own[1].num_batches_tracked.fill_(hvd.rank() + 5)
        before = copy.deepcopy(own.state_dict())
        hvd.broadcast_parameters(own.state_dict(), root_rank=root)
        expected = hvd.broadcast_object(before, root)
        for name, tensor in own.state_dict().items():
            assert torch.equal(tensor, expected[name]), name
        assert own[1].num_batches_tracked.item() == root + 5


@on_ranks(3)
def test_named_parameters() -> None:
    own = model()
    hvd.broadcast_parameters(own.named_parameters(), root_rank=0)
    hvd.broadcast_parameters(list(own.named_parameters()))
    hvd.broadcast_parameters({"weight": torch.ones(2), "none": None})
    flags = torch.tensor([hvd.rank() == 0, True])
    hvd.broadcast_parameters([("flags", flags)])
    assert flags.all()
    leaf = nn.Parameter(torch.full((2,), float(hvd.rank())))
    hvd.broadcast_parameters([("leaf", leaf)], root_rank=hvd.size() - 1)
    assert leaf.detach().tolist() == [hvd.size() - 1] * 2


@on_ranks(3)
def test_plain_parameters() -> None:
    """Without names, as a list or as what `parameters()` gives."""
    for take in (list, iter):
        own = nn.Linear(3, 2)
        hvd.broadcast_parameters(take(own.parameters()), root_rank=1)
        hvd.check_consistency(own)
    with pytest.raises(MismatchError, match=r"tensor 0 is of shape \(1,\) on rank 0 and of shape \(2,\) on rank 1;"):
        hvd.broadcast_parameters([torch.ones(hvd.rank() + 1)])


@on_ranks(3)
def test_process_sets() -> None:
    """The last two ranks among themselves; the first one keeps its own values, and need not call."""
    last = hvd.size() - 1
    subset = hvd.add_process_set([last - 1, last])
    own = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(own.parameters(), lr=1.0 + hvd.rank(), momentum=0.9)
    own(torch.ones(2)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(own.state_dict())
    if subset.included():
        hvd.broadcast_parameters(own.state_dict(), last, process_set=subset)
        hvd.broadcast_optimizer_state(optimizer, last, process_set=subset)
        hvd.check_consistency(own, optimizer, process_set=subset)
        assert optimizer.param_groups[0]["lr"] == 1.0 + last
        with pytest.raises(ValueError, match="root_rank=0 is not in the process set"):
            hvd.broadcast_parameters(own.state_dict(), 0, process_set=subset)
    else:
        with pytest.raises(ValueError, match="process set"):
            hvd.broadcast_parameters(own.state_dict(), last, process_set=subset)
    if hvd.rank() in (0, last):
        assert all(torch.equal(before[name], tensor) for name, tensor in own.state_dict().items())
    hvd.barrier()
    hvd.remove_process_set(subset)


@on_ranks(3)
def test_tensors_of_other_strides() -> None:
    last = hvd.rank() == hvd.size() - 1
    image = torch.arange(24.0).reshape(1, 2, 3, 4) * (1 if hvd.rank() == 0 else 0)
    own = image.to(memory_format=torch.channels_last) if last else image
    strides = own.stride()
    hvd.broadcast_parameters({"image": own})
    assert torch.equal(own, torch.arange(24.0).reshape(1, 2, 3, 4))
    assert own.stride() == strides


@on_ranks(3)
def test_tensors_of_dtypes_that_no_collective_takes() -> None:
    rotations = torch.polar(torch.ones(2, 3), torch.arange(6.0).reshape(2, 3))
    for expected in (rotations, rotations.t(), rotations.conj(), torch.tensor(1j), rotations[:0]):
        own = expected if hvd.rank() == 0 else torch.zeros_like(expected).conj()
        hvd.broadcast_parameters({"own": own})
        assert torch.equal(own, expected)
    for dtype in (torch.uint16, torch.float8_e4m3fn):
        own = torch.full((3,), hvd.rank() + 1).to(dtype)
        hvd.broadcast_parameters({"own": own}, root_rank=1)
        assert own.float().tolist() == [2.0] * 3
    last = hvd.rank() == hvd.size() - 1
    with pytest.raises(MismatchError, match=r"own is of torch.complex64 .* and of torch.float8_e5m2 .* on rank"):
        hvd.broadcast_parameters({"own": torch.zeros(2).to(torch.float8_e5m2 if last else torch.complex64)})

    parameter = nn.Parameter(torch.zeros(2, dtype=torch.cfloat))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.full((2,), 1j * (hvd.rank() + 1))
    optimizer.step()
    hvd.broadcast_optimizer_state(optimizer)
    torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], torch.full((2,), 0.1j))


@on_ranks(3)
def test_tensors_that_repeat_their_elements() -> None:
    own = torch.full((1, 4), float(hvd.rank())).expand(3, 4)
    hvd.broadcast_parameters({"own": own}, root_rank=1)
    assert own.tolist() == [[1.0] * 4] * 3
    with pytest.raises(MismatchError, match=r"'broadcast_parameters.own'.*shape"):
        hvd.broadcast_parameters({"own": own if hvd.rank() else own.clone()})

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))])
    optimizer.state["common"] = {"expanded": torch.tensor([hvd.rank() + 5]).expand(2)}
    hvd.broadcast_optimizer_state(optimizer)
    assert optimizer.state["common"]["expanded"].tolist() == [5, 5]


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}


@on_ranks(3)
def test_extra_state_is_passed_over() -> None:
    own = nn.Sequential(WithExtraState(2, 2))
    nn.init.constant_(own[0].weight, hvd.rank())
    hvd.broadcast_parameters(own.state_dict(), root_rank=1)
    hvd.broadcast_parameters(own[0].state_dict())
    assert own[0].weight.tolist() == [[1.0, 1.0]] * 2
    with pytest.raises(UnsupportedTensorError, match=r"my_extra_state: expected a torch.Tensor, got dict"):
        hvd.broadcast_parameters({"my_extra_state": {}})


@on_ranks(3)
def test_wrong_parameters() -> None:
    with pytest.raises(TypeError, match=r"or model.named_parameters\(\), not an iterable of int"):
        hvd.broadcast_parameters([1])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"or model.named_parameters\(\), not Parameter"):
        hvd.broadcast_parameters(leaf())
    with pytest.raises(TypeError, match=r"pass model.state_dict\(\) .* not Sequential"):
        hvd.broadcast_parameters(model())
    with pytest.raises(TypeError, match=r"takes a torch.optim.Optimizer, not dict"):
        hvd.broadcast_optimizer_state(torch.optim.SGD(model().parameters()).state_dict())
    with pytest.raises(TypeError, match=r"the state of an optimizer; for it call broadcast_optimizer_state"):
        hvd.broadcast_parameters(torch.optim.SGD(model().parameters()).state_dict())
    with pytest.raises(UnsupportedTensorError, match=r"extra: expected a torch.Tensor, got int"):
        hvd.broadcast_parameters({"extra": 3})
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(
        UnsupportedTensorError, match=r"got a quantized one; model.load_state_dict\(hvd.broadcast_object"
    ):
        hvd.broadcast_parameters({"quantized": quantized})
    scheduler: Any = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model().parameters()), 1)
    with pytest.raises(TypeError, match=r"not StepLR; other.load_state_dict\(hvd.broadcast_object"):
        hvd.broadcast_optimizer_state(scheduler)
    with pytest.raises(ValueError, match="root_rank=7 does not exist"):
        hvd.broadcast_parameters({}, root_rank=7)


@on_ranks(3)
def test_wrong_on_one_rank() -> None:
    tensors = model().state_dict()
    one_rank_is_wrong(
        ValueError,
        "root_rank=7 does not exist",
        lambda: hvd.broadcast_parameters(tensors, 0),
        lambda: hvd.broadcast_parameters(tensors, 7),
    )
    one_rank_is_wrong(
        TypeError,
        "takes names and tensors",
        lambda: hvd.broadcast_parameters(tensors),
        lambda: hvd.broadcast_parameters([*tensors]),  # type: ignore[arg-type]
    )
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    one_rank_is_wrong(
        ValueError,
        "root_rank=-1 does not exist",
        lambda: hvd.broadcast_optimizer_state(optimizer, 0),
        lambda: hvd.broadcast_optimizer_state(optimizer, -1),
    )
    root = hvd.size() - 1
    strange = torch.optim.SGD(model().parameters(), lr=0.1)
    if hvd.rank() == root:
        strange.param_groups[0]["mask"] = torch.eye(2).to_sparse()
    one_rank_is_wrong(
        UnsupportedTensorError,
        "broadcast_optimizer_state",
        lambda: hvd.broadcast_optimizer_state(strange, root),
        lambda: hvd.broadcast_optimizer_state(strange, root),
    )


@on_ranks(3)
def test_different_names() -> None:
    last = hvd.rank() == hvd.size() - 1
    own = {"a": torch.ones(1), "only here" if last else "only there": torch.ones(1)}
    with pytest.raises(
        MismatchError, match=rf"rank 0 has only there of .*, only rank {hvd.size() - 1} has only here of"
    ):
        hvd.broadcast_parameters(own)
    with pytest.raises(MismatchError, match=r"a is of shape \(1,\) on rank 0 and of shape \(2,\) on rank"):
        hvd.broadcast_parameters({"a": torch.ones(1 + last)})


Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1 * (hvd.rank() + 1), momentum=0.9),
    "SGD without state": lambda p: torch.optim.SGD(p, lr=0.1 * (hvd.rank() + 1)),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8 + hvd.rank() / 100, 0.9), amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1 * hvd.rank()),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=hvd.rank()),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "lr in a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1 * (hvd.rank() + 1)), foreach=False),
}


@on_ranks(3)
@pytest.mark.parametrize(("root", "wraps"), [(0, False), (2, True)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state(name: str, root: int, wraps: bool) -> None:
    """The root has trained, the others not at all, or for some more steps."""
    torch.manual_seed(0)
    own = model().to(memory_format=torch.channels_last)
    parameters = list(own.parameters())
    optimizer = OPTIMIZERS[name]([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.5}])
    steps = 2 if hvd.rank() == root else 3 * (hvd.rank() % 2)
    for _ in range(steps):
        optimizer.zero_grad()
        own(torch.randn(4, 1, 3, 3)).pow(2).sum().backward()
        optimizer.step()
    if wraps:
        optimizer = hvd.DistributedOptimizer(optimizer, own.named_parameters())
    weights = [parameter.detach().clone() for parameter in parameters]
    before = copy.deepcopy(optimizer.state_dict())

    hvd.broadcast_optimizer_state(optimizer, root_rank=root)

    expected = hvd.broadcast_object(before, root)
    assert same(optimizer.state_dict(), expected), name
    assert all(torch.equal(a, b) for a, b in zip(weights, parameters, strict=True)), "parameters must not move"
    if hvd.rank() == root:
        assert same(optimizer.state_dict(), before), name
    for parameter, state in optimizer.state.items():
        for value in state.values():
            if torch.is_tensor(value) and value.shape == parameter.shape:
                assert value.stride() == parameter.stride()


def same(one: Any, other: Any) -> bool:
    """Whether two structures are equal, their tensors bit for bit."""
    if torch.is_tensor(one):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@on_ranks(3)
def test_no_state_at_all() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.Adam(parameters)
    hvd.broadcast_optimizer_state(optimizer)
    assert not optimizer.state
    assert parameters[0].tolist() == [1.0, 1.0]


@on_ranks(3)
def test_a_state_of_many_kinds() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    if hvd.rank() == 0:
        nested = {"history": [torch.arange(3), (torch.tensor(True), None)], "name": "x", "empty": torch.empty(0, 2)}
        optimizer.state[parameter] = nested
        optimizer.state["common"] = {"count": 3}
    hvd.broadcast_optimizer_state(optimizer)
    state = optimizer.state[parameter]
    assert torch.equal(state["history"][0], torch.arange(3))
    assert state["history"][1][0].item() is True
    assert (state["name"], tuple(state["empty"].shape), optimizer.state["common"]) == ("x", (0, 2), {"count": 3})


@on_ranks(3)
def test_different_optimizers() -> None:
    parameters = list(model().parameters())
    last = hvd.rank() == hvd.size() - 1
    with pytest.raises(MismatchError, match="only rank 0 has SGD"):
        hvd.broadcast_optimizer_state((torch.optim.Adam if last else torch.optim.SGD)(parameters, lr=0.1))
    with pytest.raises(MismatchError, match=r"only rank 0 has \[6\]"):
        hvd.broadcast_optimizer_state(torch.optim.Adam(parameters[last:]))


def in_two_orders(first: int) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
    """A model of equal shapes, and an optimizer that lists its parameters in another order on the last rank."""
    torch.manual_seed(first)
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "ab"})
    names = "ba" if hvd.rank() == hvd.size() - 1 else "ab"
    return model, torch.optim.SGD([{"params": [model[name].weight]} for name in names], lr=0.1, momentum=0.9)


@on_ranks(2, 3)
def test_parameters_in_another_order() -> None:
    last = hvd.size() - 1
    remedy = "; build them alike on every rank, with the parameters in the same order"
    model, optimizer = in_two_orders(0)
    kind = r"of torch.float32 and shape \(2, 2\), checksum \w+ on rank"
    place = r"broadcast_optimizer_state: .* differ: parameter 0 in group 0 is"
    with pytest.raises(MismatchError, match=rf"{place} {kind} 0 and {kind} {last}, and 1 more differ{remedy}"):
        hvd.broadcast_optimizer_state(optimizer)

    # Names tell also where the models differ. They need not be there on all ranks.
    model, optimizer = in_two_orders(hvd.rank())
    hvd.broadcast_optimizer_state(optimizer)
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    named = r"of name '{}.weight', torch.float32 and shape \(2, 2\) on rank"
    with pytest.raises(MismatchError, match=rf"{place} {named.format('a')} 0 and {named.format('b')} {last}, and 1"):
        hvd.broadcast_optimizer_state(wrapped)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    hvd.broadcast_optimizer_state(
        plain if hvd.rank() else hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    )
    last_has_another_shape = torch.optim.SGD([torch.zeros(3 if hvd.rank() == last else 2)])
    with pytest.raises(MismatchError, match=r"parameter 0 in group 0 is of torch.float32 and shape \(2,\), checksum"):
        hvd.broadcast_optimizer_state(last_has_another_shape)


@on_ranks(2)
def test_parameters_named_by_torch() -> None:
    model, _ = in_two_orders(hvd.rank())
    try:
        optimizer = torch.optim.SGD(sorted(model.named_parameters(), reverse=hvd.rank() == 1), lr=0.1)
    except TypeError:
        return  # PyTorch before 2.6 takes no names
    with pytest.raises(MismatchError, match=r"parameter 0 in group 0 is of name 'a.weight', .* of name 'b.weight'"):
        hvd.broadcast_optimizer_state(optimizer)
