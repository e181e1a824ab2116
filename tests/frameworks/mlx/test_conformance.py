"""MLX's shim does what every shim must do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX's build for CPUs has no wheel for this Python or machine")

import mlx.core as mx
from mlx import nn, optimizers
from mlx.utils import tree_flatten

import horovodish.mlx as hvd
from support.conformance import RATE, Conformance
from support.elastic import Scene
from support.model import Array
from support.on_ranks import on_ranks
from support.ranks import run_ranks


class Network(nn.Module):
    def __init__(self, values: dict[str, mx.array]):
        super().__init__()
        for name, value in values.items():
            layer, key = name.split(".")
            self.setdefault(layer, {})[key] = value

    def __call__(self, inputs: mx.array) -> mx.array:
        hidden = mx.tanh(inputs @ self.hidden["weight"] + self.hidden["bias"])
        return hidden @ self.out["weight"] + self.out["bias"]


class Mlx(Conformance):
    hvd = hvd
    noun = "array"

    def tensor(self, array: Array) -> mx.array:
        name = "bool_" if array.dtype == bool else array.dtype.name
        data = mx.array(np.ascontiguousarray(array).reshape(-1).view(np.uint8))  # MLX makes float32 of float64
        return data.view(getattr(mx, name)).reshape(array.shape)

    def array(self, tensor: mx.array) -> Array:
        if tensor.dtype == mx.bfloat16:
            return np.array(tensor.view(mx.uint16)).view(ml_dtypes.bfloat16)
        return np.array(tensor)

    def gradients(self, function: Callable[[list[mx.array]], mx.array], at: list[mx.array]) -> list[mx.array]:
        found: list[mx.array] = mx.grad(function)(at)
        return found

    def model(self, values: dict[str, Array]) -> Network:
        return Network({name: mx.array(value) for name, value in values.items()})

    def optimizer(self, model: Network) -> optimizers.Optimizer:
        return optimizers.SGD(RATE)

    def step(self, model: Network, optimizer: optimizers.Optimizer, inputs: Array, targets: Array) -> None:
        def loss() -> mx.array:
            return mx.square(model(mx.array(inputs)) - mx.array(targets)).mean()

        _, gradients = nn.value_and_grad(model, loss)()
        optimizer.update(model, gradients)

    def values(self, model: Network) -> dict[str, Array]:
        return {name: np.array(value) for name, value in tree_flatten(model.parameters())}

    def state(self, model: Network, optimizer: optimizers.Optimizer, **attributes: Any) -> Any:
        return hvd.elastic.MlxState(model=model, optimizer=optimizer, **attributes)


@pytest.mark.shows("Gradients of collectives")
@on_ranks(3)
@pytest.mark.parametrize("check", Mlx.checks())
def test_conformance(check: str) -> None:
    getattr(Mlx(), check)()


@on_ranks((2, "collective_gradients=horovod"))
def test_horovods_gradients_of_collectives() -> None:
    Mlx().check_gradients_of_collectives()


def lone_training() -> list[list[str]]:
    return Mlx().lone_training()


def test_lone_training_is_warned_of() -> None:
    Mlx().warn_of_lone_training(run_ranks(lone_training, 2))


def train_through_a_loss(scene: Scene) -> dict[str, Any]:
    return Mlx().train_through_a_loss(scene)


@pytest.mark.parametrize("copies", ["always", "never"])
def test_survivors_go_on(copies: str, tmp_path: Path) -> None:
    Mlx().survive(train_through_a_loss, copies, tmp_path)
