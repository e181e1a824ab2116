"""The code of the page "Recipes" for TensorFlow does what the page says."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import horovodish.tensorflow as hvd
from support.documents import recipes
from support.on_ranks import on_ranks

GLOBAL = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])


def scope(**more: Any) -> dict[str, Any]:
    """The names that the page takes for granted. Each rank has its own samples."""
    model = make_model()
    own = GLOBAL[hvd.rank() :: hvd.size()]
    return {
        "hvd": hvd,
        "keras": keras,
        "tf": tf,
        "make_model": make_model,
        "model": model,
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.9),
        "loss_of": loss_of,
        "inputs": own,
        "labels": own[:, :3].argmax(1),
        **more,
    }


def step(names: dict[str, Any], tape: Any = None) -> None:
    """With the gradients of all ranks."""
    variables = names["model"].trainable_variables
    with tf.GradientTape() as own:
        loss = loss_of(names["labels"], names["model"](names["inputs"]))
    names["optimizer"].apply((tape or hvd.DistributedGradientTape)(own).gradient(loss, variables), variables)


def are_equal(names: dict[str, Any]) -> bool:
    everybody = hvd.allgather_object(names["model"].get_weights()[0])
    return all((each == everybody[0]).all() for each in everybody)


@on_ranks(2)
def test_recipes(tmp_path: Path) -> None:
    code = recipes("docs/recipes.md", "TensorFlow")
    check_resuming(code.pop("Checkpoint: save and resume"), tmp_path / str(hvd.rank()))

    names = scope(loss_of=lambda labels, outputs: 100 * loss_of(labels, outputs))
    exec(code.pop("Clipping"), names)
    assert names["norm"] > 1 and are_equal(names)
    np.testing.assert_allclose(tf.linalg.global_norm(names["gradients"]), 1, rtol=1e-5)

    names = scope()
    before = names["model"].get_weights()[0]
    try:
        exec(code.pop("Mixed precision"), names)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    names["step"](names["inputs"], names["labels"])
    assert are_equal(names) and (names["model"].get_weights()[0] != before).any()

    names = scope()
    batches = [(names["inputs"], names["labels"])] * (2 - hvd.rank())
    exec(code.pop("Uneven data"), names | {"batches": batches, "step": lambda *_: step(names)})
    assert are_equal(names) and names["optimizer"].iterations == 2

    names = scope(test_inputs=GLOBAL[:7], test_labels=GLOBAL[:7, :3].argmax(1))
    exec(code.pop("Evaluation on all ranks"), names)
    right = np.argmax(names["model"](GLOBAL[:7]), axis=1) == names["test_labels"]
    assert names["accuracy"] == right.sum() / 7

    with redirect_stdout(io.StringIO()) as output:
        exec(code.pop("Logging once"), scope(loss=tf.constant(float(hvd.rank()))))
    assert output.getvalue() == ("loss 0.5000\n" if hvd.rank() == 0 else "")

    names = scope(rate=0.1, warmup_steps=2, steps=10)
    exec(code.pop("Learning rate and batch size"), names)
    np.testing.assert_allclose([names["schedule"](number) for number in range(3)], [0.1, 0.15, 0.2], rtol=1e-5)

    exec(code.pop("Seeds"), scope(seed=5))
    assert len(set(hvd.allgather_object(float(tf.random.normal([]))))) == hvd.size()

    encoded, meeting = code.pop("Slow links").split("# or, with a Keras optimizer instead of the tape\n")
    for block, same in ((encoded, True), (meeting, False)):
        names = scope(tape=tf.GradientTape())
        exec(block, names)
        step(names, tape=hvd.DistributedGradientTape if same else lambda tape: tape)
        assert are_equal(names) == same
    assert not code


def check_resuming(code: str, path: Path) -> None:
    """Only rank 0 has the file, and the others begin with other weights."""
    saved = scope(path=str(path))
    objects, rest = code.split("# after each epoch\n")
    saving, resuming = rest.split("# when the job starts again\n")
    exec(objects, saved)
    step(saved)
    saved["epoch"].assign(3)
    exec(saving, saved)
    names = scope(path=str(path))
    exec(objects, names)
    names["model"].set_weights([weight + hvd.rank() for weight in names["model"].get_weights()])
    exec(resuming, names)
    assert names["epoch"].numpy() == 3
    for each in (saved, names):
        step(each)
    assert (names["model"].get_weights()[0] == saved["model"].get_weights()[0]).all()
    assert bool(list(path.parent.glob(f"{path.name}.*"))) == (hvd.rank() == 0)
