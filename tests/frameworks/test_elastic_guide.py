"""The code of the guide "Elastic training" survives the loss of a rank in its function, and of one in its blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.documents import recipes
from support.elastic import Scene, run_elastic

INPUTS = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
LABELS = INPUTS[:, :3].argmax(1)


class Mortal:
    """Process 1 dies in its third batch, and process 2 in a later one, which is in the blocks where there are any."""

    def __init__(self, scene: Scene, later: int = 25) -> None:
        self._scene, self._later, self._batches = scene, later, 0

    def take_batch(self) -> None:
        self._batches += 1
        if (self._scene.me, self._batches) in ((1, 3), (2, self._later)):
            self._scene.die("dies")

    def batch_of(self, step: int, rank: int, size: int) -> tuple[Any, Any]:
        self.take_batch()
        return INPUTS[rank::size], LABELS[rank::size]


def run_code(tab: str, **names: Any) -> None:
    exec(recipes("docs/elastic.md", tab)["Elastic training"].replace("1000", "20"), names)


def with_torch(scene: Scene) -> None:
    import torch

    mortal, model = Mortal(scene), torch.nn.Linear(4, 3)
    inputs, labels = torch.tensor(INPUTS), torch.tensor(LABELS)

    def loss_of(*given: Any) -> Any:
        mortal.take_batch()
        outputs, wanted = given if len(given) == 2 else (model(inputs), labels)  # the blocks pass a step
        return torch.nn.functional.cross_entropy(outputs, wanted)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = torch.utils.data.TensorDataset(inputs, labels)
    run_code("PyTorch", torch=torch, model=model, optimizer=optimizer, dataset=dataset, loss_of=loss_of)


def with_tensorflow(scene: Scene) -> None:
    import keras

    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.1)
    run_code("TensorFlow", model=model, optimizer=optimizer, loss_of=loss_of, batch_of=Mortal(scene).batch_of)


def with_keras(scene: Scene) -> None:
    import keras

    mortal = Mortal(scene, later=9)
    callback = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda *_, **__: mortal.take_batch())
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
    fit = model.fit
    model.fit = lambda *given, callbacks, **options: fit(*given, callbacks=[*callbacks, callback], **options)
    x = np.tile(INPUTS, (16, 1))
    run_code("Keras", model=model, x=x, y=x[:, :3])


def with_jax(scene: Scene) -> None:
    import jax
    import optax

    def loss_of(parameters: Any, inputs: Any, labels: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(inputs @ parameters, labels).mean()

    run_code("JAX", parameters=jax.numpy.ones((4, 3)), loss_of=loss_of, batch_of=Mortal(scene).batch_of)


@pytest.mark.soak
@pytest.mark.parametrize("follow", [with_torch, with_tensorflow, with_keras, with_jax])
def test_the_code(follow: Callable[[Scene], None], tmp_path: Path) -> None:
    backend = {"KERAS_BACKEND": "jax"} if follow is with_keras else {}
    ended = run_elastic(follow, tmp_path, 3, flags=["--min-np", "1", "--reset-limit", "0"], env=backend)
    assert ended.status == 0, ended.said
    assert ended.fired == {"dies 1", "dies 2"}, ended.said
    assert ended.results == [None], ended.said
