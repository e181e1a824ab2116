"""A framework that the core has never seen: its shim does what every shim must do, and plans what travels together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from horovodish.collectives.arrays import Array
from horovodish.gradients import plan
from support import conformance
from support import toy_framework as toy
from support.conformance import RATE, SHAPES, Conformance
from support.elastic import Scene
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from support.toy_framework import SGD, Tensor

SMALL_BUCKETS = {"HOROVODISH_FUSION_THRESHOLD_MB": str(300 / 2**20)}  # the gradients have 512, 64, 256 and 16 bytes

Model = dict[str, Tensor]


class Toy(Conformance):
    hvd = toy
    noun = "array"

    def tensor(self, array: Array) -> Tensor:
        return Tensor(array.copy())

    def array(self, tensor: Tensor) -> Array:
        return tensor.data

    def model(self, values: dict[str, Array]) -> Model:
        return {name: Tensor(value.copy(), name) for name, value in values.items()}

    def optimizer(self, model: Model) -> SGD:
        return SGD(model, RATE)

    def step(self, model: Model, optimizer: Any, inputs: Array, targets: Array) -> None:
        weight, bias, out_weight, out_bias = (model[name].data for name in SHAPES)
        hidden = np.tanh(inputs @ weight + bias)
        error = 2 * (hidden @ out_weight + out_bias - targets) / targets.size
        before = error @ out_weight.T * (1 - hidden**2)
        values = (inputs.T @ before, before.sum(0), hidden.T @ error, error.sum(0))
        optimizer.step({name: Tensor(value) for name, value in zip(SHAPES, values, strict=True)})

    def values(self, model: Model) -> dict[str, Array]:
        return {name: tensor.data for name, tensor in model.items()}

    def state(self, model: Model, optimizer: Any, **attributes: Any) -> Any:
        return toy.ToyState(sgd=getattr(optimizer, "wrapped", optimizer), **attributes)


@on_ranks(3)
@pytest.mark.parametrize("check", Toy.checks())
def test_conformance(check: str) -> None:
    getattr(Toy(), check)()


def lone_training() -> list[list[str]]:
    return Toy().lone_training()


def test_lone_training_is_warned_of() -> None:
    Toy().warn_of_lone_training(run_ranks(lone_training, 2))


def train_through_a_loss(scene: Scene) -> dict[str, Any]:
    return Toy().train_through_a_loss(scene)


def test_survivors_go_on(tmp_path: Path) -> None:
    Toy().survive(train_through_a_loss, "", tmp_path)


@on_ranks(2, env=SMALL_BUCKETS)
@pytest.mark.parametrize(
    ("compression", "grouped", "buckets"),
    [
        ("none", (), [["out.bias", "out.weight"], ["hidden.bias"], ["hidden.weight"]]),
        ("fp16", (), [["out.bias", "out.weight", "hidden.bias"], ["hidden.weight"]]),
        ("none", ("hidden.weight", "out.bias"), [["out.weight"], ["hidden.bias"], ["out.bias", "hidden.weight"]]),
    ],
    ids=["plain", "compressed", "grouped"],
)
def test_buckets(compression: str, grouped: Sequence[str], buckets: list[list[str]]) -> None:
    model = Toy().model(conformance.parameters(seed=0))
    groups = [[model[name] for name in grouped]] if grouped else None
    optimizer = toy.DistributedOptimizer(
        SGD(model, RATE), compression=getattr(toy.Compression, compression), groups=groups
    )
    with patch.object(toy.GRADIENTS, "reduce", wraps=toy.GRADIENTS.reduce) as reduce:
        Toy().step(model, optimizer, *conformance.batch(0))
    planned = [[label.removeprefix(".") for label in bucket.labels] for bucket in reduce.call_args.args[1]]
    assert planned == buckets


@on_ranks(2)
def test_a_gradient_that_only_some_ranks_have() -> None:
    parameters = {name: Tensor(np.zeros(2)) for name in ("everywhere", "somewhere", "nowhere")}
    optimizer = toy.DistributedOptimizer(SGD(parameters, 1.0), op=toy.Sum)
    ours = ["everywhere", "somewhere"] if toy.rank() == 1 else ["everywhere"]
    with patch.object(SGD, "step", autospec=True, side_effect=SGD.step) as step:
        optimizer.step({name: Tensor(np.ones(2)) for name in ours})
    assert step.call_args.args[1]["nowhere"] is None
    assert {name: value.data.tolist() for name, value in parameters.items()} == {
        "everywhere": [-2.0, -2.0],
        "somewhere": [-1.0, -1.0],
        "nowhere": [0.0, 0.0],
    }


@on_ranks(2)
def test_groups_of_other_parameters() -> None:
    for groups, text in (
        (-1, "groups=-1 is not possible"),
        ([[Tensor(np.zeros(2))]], r"groups: a Tensor of shape \(2,\) is not among the parameters that the optimizer"),
    ):
        with pytest.raises(ValueError, match=text):
            toy.DistributedOptimizer(SGD(Toy().model(conformance.parameters(seed=0)), RATE), groups=groups)


@on_ranks(2)
def test_layouts_are_compared_until_the_ranks_know_them() -> None:
    """In the first two reductions, in the fourth, and after one that brings a gradient which no rank had before."""
    parameters = {name: Tensor(np.zeros(2)) for name in ("always", "later", "never")}
    optimizer = toy.DistributedOptimizer(SGD(parameters, 1.0), op=toy.Sum)
    comparisons = []
    with (
        patch.object(plan, "compare_layouts", side_effect=plan.compare_layouts) as compare,
        patch.object(SGD, "step", autospec=True, side_effect=SGD.step) as step,
    ):
        for number in range(7):
            comes = number == 4 and toy.rank() == 1
            optimizer.step({name: Tensor(np.ones(2)) for name in (("always", "later") if comes else ("always",))})
            comparisons.append(compare.call_count)
            reduced = step.call_args.args[1]
            assert reduced["never"] is None
            assert (reduced["later"] is None) is (number != 4)
    assert comparisons == [1, 2, 2, 3, 3, 4, 4]
    assert parameters["later"].data.tolist() == [-1.0, -1.0]
