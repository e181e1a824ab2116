"""`check_consistency` passes what is equal and names what is not, on every rank."""

from __future__ import annotations

import enum
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import horovodish
import horovodish.torch as hvd
from horovodish.errors import MismatchError
from horovodish.torch import tensors
from support.on_ranks import on_ranks


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model.register_buffer("brain", torch.ones(3, dtype=torch.bfloat16))
    model.register_buffer("zero", torch.zeros(2))
    model.register_buffer("none", None)
    model.register_buffer("empty", torch.empty(0, 3))
    model.register_buffer("flag", torch.tensor(True))
    model.register_buffer("transposed", torch.arange(6.0).reshape(2, 3).t())
    model.register_buffer("rows", torch.eye(3).to_sparse())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@on_ranks(3)
def test_what_is_equal() -> None:
    model, optimizer = made()
    hvd.check_consistency(model)
    hvd.check_consistency(model, optimizer)
    hvd.check_consistency(model, optimizer=hvd.DistributedOptimizer(optimizer))
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    hvd.check_consistency(model)


def _next_float(value: torch.Tensor) -> None:
    value.flatten()[-1:].copy_(torch.nextafter(value.flatten()[-1:], torch.tensor([9.0])))


SPOILED: dict[str, tuple[Any, str]] = {
    "a bit of a parameter": (lambda m, o: _next_float(m[2].weight.data), "parameter '2.weight'"),
    "the sign of a zero": (lambda m, o: m.zero.neg_(), "buffer 'zero'"),
    "a buffer": (lambda m, o: m[1].running_var.mul_(2), "buffer '1.running_var'"),
    "a counter": (lambda m, o: m[1].num_batches_tracked.add_(1), "buffer '1.num_batches_tracked'"),
    "two bytes": (lambda m, o: m.brain.add_(1), "buffer 'brain'"),
    "a flag": (lambda m, o: m.flag.logical_not_(), "buffer 'flag'"),
    "other strides": (lambda m, o: m.transposed[2, 1].add_(1), "buffer 'transposed'"),
    "rows": (lambda m, o: m.rows._values().add_(1), "buffer 'rows'"),
    "an average": (
        lambda m, o: o.state[m[0].bias]["exp_avg"].add_(1),
        "optimizer state 'exp_avg' of parameter '0.bias'",
    ),
    "a step": (lambda m, o: o.state[m[0].bias]["step"].add_(1), "optimizer state 'step' of parameter '0.bias'"),
    "a rate": (lambda m, o: o.param_groups[0].update(lr=0.2), "option 'lr' of parameter group 0"),
    "a pair": (lambda m, o: o.param_groups[0].update(betas=(0.9, 0.5)), "option 'betas'[1] of parameter group 0"),
}


@pytest.mark.parametrize("name", SPOILED)
@on_ranks(3)
def test_what_differs(name: str) -> None:
    spoil, text = SPOILED[name]
    model, optimizer = made()
    last = hvd.size() - 1
    if hvd.rank() == last:
        spoil(model, optimizer)
    with pytest.raises(MismatchError) as raised:
        hvd.check_consistency(model, optimizer)
    others = "rank 0 has" if last == 1 else "ranks 0, 1 have"
    pattern = (
        rf"check_consistency: {re.escape(text)} differs: {others} .* checksum \w+; rank {last} has .* checksum \w+\. R"
    )
    assert re.search(pattern, str(raised.value)), f"{name}: {raised.value}"


@on_ranks(3)
def test_models_that_differ() -> None:
    last = hvd.rank() == hvd.size() - 1
    model = nn.Linear(3, 2, bias=not last)
    nn.init.ones_(model.weight)
    with pytest.raises(MismatchError, match=r"parameter 'bias' differs: rank.*shape \(2,\).*has none of it\."):
        hvd.check_consistency(model)
    model = nn.Linear(3 if last else 4, 2)
    with pytest.raises(MismatchError, match=r"parameter 'weight' differs: .*\(2, 4\).*\(2, 3\).* 1 more differ\."):
        hvd.check_consistency(model)


class Extra(nn.Module):
    """A module whose state is one object."""

    def __init__(self, value: Any):
        super().__init__()
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


class Box:
    """An object whose `repr()` says nothing about what it holds."""

    def __init__(self, value: Any):
        self.value = value
        self.itself = self

    def __repr__(self) -> str:
        return "a box"


class Slot:
    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value


def _numbers(rank: int) -> np.ndarray:
    numbers = np.arange(5000.0)
    numbers[2500] += rank
    return numbers


OBJECTS: dict[str, Callable[[int], Any]] = {
    "an array, in its middle": _numbers,
    "an array, in its last bits": lambda rank: np.array([1.0 + 1e-12 * rank, 2]),
    "a number of NumPy": lambda rank: np.float64(1 + 1e-12 * rank),
    "an array of objects": lambda rank: np.array([Box(rank), None]),
    "a float": lambda rank: 1 + 2e-16 * rank + 1e-15 * rank,
    "an object": Box,
    "an object within objects": lambda rank: Box({"a": [Box((1, _numbers(rank)))]}),
    "an object with slots": Slot,
    "an object of an enumeration": lambda rank: Kind(1 + rank),
    "an object with a tensor": lambda rank: Box(torch.full((2000,), rank)),
    "a set": lambda rank: {"a", "b", str(rank)},
    "a generator": lambda rank: np.random.default_rng(rank),
}


@pytest.mark.parametrize("name", OBJECTS)
@on_ranks(2)
def test_objects(name: str) -> None:
    make = OBJECTS[name]
    hvd.check_consistency(Extra(make(1)))
    with pytest.raises(MismatchError, match=r"state '_extra_state' differs: rank 0 has \w+ with checksum"):
        hvd.check_consistency(Extra(make(hvd.rank())))


@on_ranks(2)
def test_objects_that_are_equal() -> None:
    """Sets of strings have another order in each process, and addresses differ."""
    names, rank = ["the", "order", "of", "these", "strings"], hvd.rank()
    padding = [Box(number) for number in range(rank * 1000)]
    for value in (
        set(names),
        {"within": frozenset(names)},
        {name: len(name) for name in (names if rank else reversed(names))},
        Box({name: {*names} for name in (names if rank else reversed(names))}),
        {Slot: object(), lambda: rank: 2},
        Box([threading.Lock(), lambda: rank, np.sum, Box]),
    ):
        hvd.check_consistency(Extra(value))
    del padding


def _nested(rank: int) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2 + rank), torch.ones(3 - rank)])


BUFFERS: dict[str, Callable[[int], torch.Tensor]] = {
    "rows": lambda rank: (torch.eye(4) * (1 + rank)).to_sparse_csr(),
    "columns": lambda rank: torch.eye(4).roll(rank, 0).to_sparse_csc(),
    "blocks": lambda rank: torch.eye(4).roll(2 * rank, 0).to_sparse_bsr((2, 2)),
    "nested": _nested,
    "jagged": lambda rank: torch.nested.nested_tensor([torch.ones(2) + rank, torch.ones(3)], layout=torch.jagged),
    "meta": lambda rank: torch.empty(3 + rank, device="meta"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", BUFFERS)
@on_ranks(2)
def test_buffers_of_other_kinds(name: str) -> None:
    model = nn.Module()
    model.register_buffer("own", BUFFERS[name](1))
    hvd.check_consistency(model)
    model.own = BUFFERS[name](hvd.rank())
    with pytest.raises(MismatchError, match="buffer 'own' differs: rank 0 has"):
        hvd.check_consistency(model)


@on_ranks(2)
def test_parameters_in_another_order() -> None:
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(3)) for name in "ab"})
    names = "ba" if hvd.rank() else "ab"
    text = "parameter 0 of parameter group 0 differs: rank 0 has 'a' with .* rank 1 has 'b' with .* 1 more differ"
    for optimizer in (
        torch.optim.SGD([model[name] for name in names], lr=0.1),
        torch.optim.SGD([{"params": [model[name]]} for name in names], lr=0.1),
    ):
        with pytest.raises(MismatchError, match=text):
            hvd.check_consistency(model, optimizer)


@on_ranks(3)
def test_process_sets() -> None:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, float(hvd.rank()))
    nn.init.ones_(model.bias)
    single = horovodish.add_process_set([0])
    if single.included():
        hvd.check_consistency(model, process_set=single)
    else:
        with pytest.raises(ValueError, match="is not in process set"):
            hvd.check_consistency(model, process_set=single)
    horovodish.remove_process_set(single)


def test_a_world_of_one_is_consistent() -> None:
    hvd.init()
    try:
        hvd.check_consistency(*made())
    finally:
        hvd.shutdown()


@pytest.mark.parametrize("checksum", [tensors.checksum_of, lambda tensor: int(tensors.sum_of_words(tensor))])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex128, torch.int8])
def test_checksums_differ_if_all_elements_differ_alike(checksum: Callable[[torch.Tensor], int], dtype: Any) -> None:
    """Their bits then differ by a number with many zeros at its end, as do sums of them."""
    values = [torch.full((4096, 2), value, dtype=dtype) for value in (0, 1, 2)]
    assert len({*map(checksum, values)}) == 3


@pytest.mark.parametrize("checksum", [tensors.checksum_of, lambda tensor: int(tensors.sum_of_words(tensor))])
def test_checksums_do_not_depend_on_how_a_tensor_lies_in_memory(checksum: Callable[[torch.Tensor], int]) -> None:
    images = torch.randn(2, 3, 4, 5)
    assert checksum(images) == checksum(images.contiguous(memory_format=torch.channels_last))
    numbers = torch.randn(3, dtype=torch.complex64)
    assert checksum(numbers.conj()) == checksum(numbers.conj().resolve_conj())


@pytest.mark.parametrize("checksum", [tensors.checksum_of, lambda tensor: int(tensors.sum_of_words(tensor))])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_checksums_see_where_elements_are(
    checksum: Callable[[torch.Tensor], int], dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "_WORDS_OF_A_BLOCK", 64)
    square = torch.randint(-99, 99, (24, 24)).to(dtype)
    changed = [square.T, square.flip(0), square.roll(1, 0), square.roll(1, 1), torch.cat([square[12:], square[:12]])]
    swapped = square.clone()
    swapped[0, 0], swapped[23, 23] = 100, -100
    changed += [swapped, swapped.rot90(2)]
    assert len({*map(checksum, [square, *changed])}) == 8


def test_a_checksum_sees_steps_of_one_bit_up_and_down() -> None:
    values = torch.tensor([1.0, 2.0])
    moved = torch.nextafter(values, torch.tensor([2.0, 1.0]))
    assert int(tensors.sum_of_words(values)) != int(tensors.sum_of_words(moved))
