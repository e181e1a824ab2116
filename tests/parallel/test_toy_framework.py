"""A framework that the core has never seen: its shim trains as one process does that sees all data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import horovodish
from horovodish.collectives.arrays import Array
from horovodish.gradients.compression import NoneCompressor
from horovodish.gradients.options import GradientOptions
from support import toy_framework as toy
from support.on_ranks import on_ranks
from support.toy_framework import SGD, Tensor

SHAPES = {"hidden.weight": (8, 16), "hidden.bias": (16,), "out.weight": (16, 4), "out.bias": (4,)}
SMALL_BUCKETS = {"HOROVODISH_FUSION_THRESHOLD_MB": str(300 / 2**20)}  # the gradients have 512, 64, 256 and 16 bytes
STEPS, BATCH = 20, 12


def model(seed: int) -> dict[str, Tensor]:
    random = np.random.default_rng(seed)
    return {name: Tensor(random.normal(0, 0.3, shape).astype(np.float32)) for name, shape in SHAPES.items()}


def gradients_of(parameters: dict[str, Tensor], inputs: Array, targets: Array) -> dict[str, Tensor]:
    """Those of the mean of the squared error of a network with one hidden layer."""
    weight, bias, out_weight, out_bias = (parameters[name].data for name in SHAPES)
    hidden = np.tanh(inputs @ weight + bias)
    error = 2 * (hidden @ out_weight + out_bias - targets) / targets.size
    before = error @ out_weight.T * (1 - hidden**2)
    values = (inputs.T @ before, before.sum(0), hidden.T @ error, error.sum(0))
    return {name: Tensor(value) for name, value in zip(SHAPES, values, strict=True)}


def train(optimizer: Any, parameters: dict[str, Tensor], share: slice) -> None:
    """Take the steps with a part of each batch."""
    random = np.random.default_rng(7)
    for _ in range(STEPS):
        inputs = random.normal(size=(BATCH, 8)).astype(np.float32)
        targets = np.sin(inputs[:, :4])
        optimizer.step(gradients_of(parameters, inputs[share], targets[share]))


def share_of_this_rank() -> slice:
    rows = BATCH // toy.size()
    return slice(toy.rank() * rows, (toy.rank() + 1) * rows)


@on_ranks(2, 3, env=SMALL_BUCKETS)
@pytest.mark.parametrize(
    ("compression", "grouped", "buckets", "tolerance"),
    [
        ("none", (), [["out.bias", "out.weight"], ["hidden.bias"], ["hidden.weight"]], 1e-5),
        ("fp16", (), [["out.bias", "out.weight", "hidden.bias"], ["hidden.weight"]], 2e-4),
        ("none", ("hidden.weight", "out.bias"), [["out.weight"], ["hidden.bias"], ["out.bias", "hidden.weight"]], 1e-5),
    ],
    ids=["plain", "compressed", "grouped"],
)
def test_it_trains_as_one_process_with_all_data(
    compression: str, grouped: Sequence[str], buckets: list[list[str]], tolerance: float
) -> None:
    parameters, alone = model(seed=toy.rank()), model(seed=0)
    toy.broadcast_parameters(parameters, root_rank=0)
    groups = [[parameters[name] for name in grouped]] if grouped else None
    optimizer = toy.DistributedOptimizer(
        SGD(parameters, 0.5), compression=getattr(toy.Compression, compression), groups=groups
    )
    with patch.object(toy.GRADIENTS, "reduce", wraps=toy.GRADIENTS.reduce) as reduce:
        train(optimizer, parameters, share_of_this_rank())
    planned = [[label.removeprefix(".") for label in bucket.labels] for bucket in reduce.call_args.args[1]]
    assert planned == buckets

    train(SGD(alone, 0.5), alone, slice(BATCH))
    for name, parameter in parameters.items():
        moved = np.abs(alone[name].data - model(seed=0)[name].data).max()
        assert moved > 100 * tolerance
        np.testing.assert_allclose(parameter.data, alone[name].data, rtol=0, atol=tolerance, err_msg=name)
        everywhere = toy.allgather(Tensor(parameter.data[np.newaxis])).data
        assert all(values.tobytes() == parameter.data.tobytes() for values in everywhere)


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


@on_ranks(2, 3)
def test_collectives() -> None:
    rank, ranks = toy.rank(), range(toy.size())
    ours = Tensor(np.full(3, rank))
    assert toy.allreduce(ours, op=toy.Sum).data.tolist() == [sum(ranks)] * 3
    assert toy.broadcast(ours, root_rank=1).data.tolist() == [1] * 3
    assert ours.data.tolist() == [rank] * 3
    rows = toy.allgather(Tensor(np.full((rank, 2), rank)))
    assert rows.data.tolist() == [[each, each] for each in ranks for _ in range(each)]
    assert toy.allgather(Tensor(np.array(rank))).data.tolist() == list(ranks)


@on_ranks(2)
def test_mistakes_have_the_words_of_every_framework() -> None:
    parameters = model(seed=0)
    wrong = ({"op": "mean"}, {"compression": "fp16"}, {"groups": -1}, {"groups": [list(parameters.values())] * 2})
    for arguments in wrong:
        with pytest.raises(ValueError) as expected:
            GradientOptions.checked(**{"compression": NoneCompressor, **arguments})
        with pytest.raises(ValueError) as found:
            toy.DistributedOptimizer(SGD(parameters, 0.1), **arguments)
        assert str(found.value) == str(expected.value)
    with pytest.raises(ValueError, match=r"groups: a Tensor of shape \(2,\) is none of the parameters that the optim"):
        toy.DistributedOptimizer(SGD(parameters, 0.1), groups=[[Tensor(np.zeros(2))]])

    error = horovodish.UnsupportedTensorError if toy.rank() == 0 else horovodish.MismatchError
    with pytest.raises(error, match=r"x: expected a Tensor, got ndarray; pass Tensor\(value\)"):
        toy.allreduce(np.zeros(2) if toy.rank() == 0 else Tensor(np.zeros(2)), name="x")

    del parameters["out.bias"]
    with pytest.raises(toy.MismatchError, match=r"the names of the parameters differ: only rank 0 has out.bias, only"):
        toy.broadcast_parameters(model(seed=0) if toy.rank() == 0 else parameters)


@on_ranks(2)
def test_a_mismatch_names_the_gradient() -> None:
    parameters = {
        "first": Tensor(np.zeros(2)),
        "second": Tensor(np.zeros(2 + toy.rank())),
        "third": Tensor(np.zeros(2)),
    }
    optimizer = toy.DistributedOptimizer(SGD(parameters, 1.0))
    with pytest.raises(toy.MismatchError, match=r"'gradients\.second': the ranks disagree about its shape"):
        optimizer.step({name: Tensor(value.data) for name, value in parameters.items()})
