"""The code of the guide "Elastic training" survives the loss of ranks in a function, in blocks and in an evaluation."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.documents import recipes
from support.elastic import Scene, run_elastic
from support.on_ranks import on_ranks

INPUTS = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
LABELS = INPUTS[:, :3].argmax(1)
EVALUATION = "An epoch with its evaluation"
SECTION = "GUIDE_SECTION"
"""The variable that tells the ranks which code to run."""


class Mortal:
    """Process 1 dies in its third batch, or in its first evaluation where there is one.

    Process 2 dies in a later batch, which is in the blocks where there are any.
    """

    def __init__(self, scene: Scene, later: int = 25) -> None:
        self._scene, self._later, self._batches = scene, later, 0
        self._has_evaluation = os.environ[SECTION] == EVALUATION

    def take_batch(self) -> None:
        self._batches += 1
        if (self._scene.me, self._batches) in ((1, None if self._has_evaluation else 3), (2, self._later)):
            self._scene.die("dies")

    def batch_of(self, step: int, rank: int, size: int) -> tuple[Any, Any]:
        self.take_batch()
        return INPUTS[rank::size], LABELS[rank::size]

    def __getitem__(self, rows: slice) -> Any:
        """The inputs of the evaluation."""
        if self._scene.me == 1:
            self._scene.die("dies")
        return self.test_inputs[rows]

    def run_code(self, tab: str, test_inputs: Any = INPUTS, test_labels: Any = LABELS, **names: Any) -> None:
        self.test_inputs = test_inputs
        code = recipes("docs/elastic.md", tab)["Elastic training"]
        if self._has_evaluation:
            code = code.partition("@hvd.elastic.run")[0] + recipes("docs/elastic.md", tab)[EVALUATION]
        exec(code.replace("1000", "20"), {"test_inputs": self, "test_labels": test_labels, **names})


def with_torch(scene: Scene) -> None:
    import torch

    mortal, model = Mortal(scene, later=5 if os.environ[SECTION] == EVALUATION else 25), torch.nn.Linear(4, 3)
    inputs, labels = torch.tensor(INPUTS), torch.tensor(LABELS)

    def loss_of(*given: Any) -> Any:
        mortal.take_batch()
        outputs, wanted = given if len(given) == 2 else (model(inputs), labels)  # the blocks pass a step
        return torch.nn.functional.cross_entropy(outputs, wanted)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {"model": model, "optimizer": optimizer, "loss_of": loss_of, "test_inputs": inputs, "test_labels": labels}
    mortal.run_code("PyTorch", torch=torch, dataset=torch.utils.data.TensorDataset(inputs, labels), **names)


def with_tensorflow(scene: Scene) -> None:
    import keras

    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    mortal = Mortal(scene)
    mortal.run_code("TensorFlow", model=model, optimizer=optimizer, loss_of=loss_of, batch_of=mortal.batch_of)


def with_keras(scene: Scene) -> None:
    import keras

    mortal = Mortal(scene, later=9)
    callback = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda *_, **__: mortal.take_batch())
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
    fit = model.fit
    model.fit = lambda *given, callbacks=(), **options: fit(*given, callbacks=[*callbacks, callback], **options)
    x = np.tile(INPUTS, (16, 1))
    mortal.run_code("Keras", model=model, x=x, y=x[:, :3])


def with_jax(scene: Scene) -> None:
    import jax
    import optax

    def logits_of(parameters: Any, inputs: Any) -> Any:
        return inputs @ parameters

    def loss_of(parameters: Any, inputs: Any, labels: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(logits_of(parameters, inputs), labels).mean()

    mortal = Mortal(scene)
    names = {"loss_of": loss_of, "logits_of": logits_of, "batch_of": mortal.batch_of}
    mortal.run_code("JAX", parameters=jax.numpy.ones((4, 3)), **names)


@pytest.mark.soak
@pytest.mark.parametrize("section", ["Elastic training", EVALUATION])
@pytest.mark.parametrize("follow", [with_torch, with_tensorflow, with_keras, with_jax])
def test_the_code(follow: Callable[[Scene], None], section: str, tmp_path: Path) -> None:
    env = {SECTION: section} | ({"KERAS_BACKEND": "jax"} if follow is with_keras else {})
    ended = run_elastic(follow, tmp_path, 3, flags=["--min-np", "1", "--reset-limit", "0"], env=env)
    assert ended.status == 0, ended.said
    assert ended.fired == {"dies 1", "dies 2"}, ended.said
    assert ended.results == [None], ended.said
    errors = re.findall(r"^epoch (\d+): (\d+) errors$", ended.said, re.MULTILINE)
    assert [int(epoch) for epoch, _ in errors] == (list(range(10)) if section == EVALUATION else []), ended.said
    assert errors == [] or int(errors[-1][1]) <= int(errors[0][1]) <= len(INPUTS), ended.said


@on_ranks(2)
@pytest.mark.parametrize("section", ["Elastic training", EVALUATION])
def test_ranks_are_equal_where_one_has_a_batch_more(section: str) -> None:
    import torch

    import horovodish.torch as hvd

    whole = recipes("docs/elastic.md", "PyTorch")["Elastic training"]
    code = whole.partition("state = hvd.elastic.TorchState(model, optimizer, step=0)")[0]
    if section == EVALUATION:
        code = whole.partition("@hvd.elastic.run")[0] + recipes("docs/elastic.md", "PyTorch")[EVALUATION]
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(65, 4, generator=generator)  # in batches of 32: two on rank 0, and one on rank 1
    labels = inputs[:, :3].argmax(1)
    model = torch.nn.Linear(4, 3)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    names = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}
    names |= {"torch": torch, "dataset": torch.utils.data.TensorDataset(inputs, labels)}
    exec(code, {"loss_of": torch.nn.functional.cross_entropy, "test_inputs": inputs, "test_labels": labels, **names})
    hvd.check_consistency(model)
