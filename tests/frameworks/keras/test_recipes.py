"""The code of the page "Recipes" for Keras does what the page says."""

from __future__ import annotations

import io
import os
import pathlib
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import horovodish.keras as hvd
from support.documents import recipes
from support.on_ranks import on_ranks

pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.parametrize("backend", ["jax"], indirect=True)]
GLOBAL = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)


def make_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])


def scope(**more: Any) -> dict[str, Any]:
    """The names that the page takes for granted. Each rank has its own samples."""
    x = GLOBAL[hvd.rank() :: hvd.size()]
    model = make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), loss="mse")
    return {"hvd": hvd, "keras": keras, "make_model": make_model, "model": model, "x": x, "y": x[:, :3], **more}


def fit(names: dict[str, Any]) -> None:
    """One epoch, from the weights of rank 0."""
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    names["model"].fit(names["x"], names["y"], batch_size=6, shuffle=False, callbacks=callbacks, verbose=0)


def are_equal(names: dict[str, Any]) -> bool:
    everybody = hvd.allgather_object(names["model"].get_weights()[0])
    return all((each == everybody[0]).all() for each in everybody)


@on_ranks(2)
def test_recipes(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    code = recipes("docs/recipes.md", "Keras")
    saving, resuming = code.pop("Checkpoint: save and resume").split("# when the job starts again")
    saved = scope(pathlib=pathlib, epochs=2)
    exec(saving, saved)
    hvd.barrier()
    names = saved | {"x": saved["x"][:2], "y": saved["y"][:2]}  # an epoch of another number of ranks; trains no further
    exec(resuming.partition("\n")[2], names)
    assert names["epoch"] == 2 and names["model"] is not saved["model"]
    names |= {"x": saved["x"], "y": saved["y"]}
    for each in (saved, names):
        fit(each)
    assert (names["model"].get_weights()[0] == saved["model"].get_weights()[0]).all() and are_equal(names)

    names = scope()
    exec(code.pop("Clipping"), names)
    assert names["optimizer"].global_clipnorm == 1.0
    names["model"].compile(names["optimizer"], loss="mse")
    fit(names)
    assert are_equal(names)

    names = scope()
    try:
        exec(code.pop("Mixed precision"), names)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    fit(names)
    assert names["model"].layers[0].compute_dtype == "float16" and are_equal(names)

    names = scope()
    rows = slice(None, None if hvd.rank() == 0 else 2)
    exec(code.pop("Uneven data"), names | {"x": names["x"][rows], "y": names["y"][rows]})
    assert are_equal(names)

    names = scope(test_inputs=GLOBAL[:7], test_labels=GLOBAL[:7, :3].argmax(1))
    exec(code.pop("Evaluation on all ranks"), names)
    right = names["model"].predict(GLOBAL[:7], verbose=0).argmax(1) == names["test_labels"]
    assert names["accuracy"] == right.sum() / 7

    with redirect_stdout(io.StringIO()) as output:
        exec(code.pop("Logging once"), scope())
    assert ("loss: " in output.getvalue()) == (hvd.rank() == 0)

    names = scope(rate=0.1, epochs=3)
    exec(code.pop("Learning rate and batch size"), names)
    assert float(names["optimizer"].learning_rate) == pytest.approx(0.2)

    exec(code.pop("Seeds"), scope(seed=5))
    assert len(set(hvd.allgather_object(float(keras.random.normal([]))))) == hvd.size()

    encoded, meeting = code.pop("Slow links").split("# or\n")
    for block in (encoded, meeting):
        names = scope()
        exec(block, names)
        names["model"].compile(names["optimizer"], loss="mse")
        fit(names)
        assert are_equal(names)  # `fit` ends with a meeting
    assert not code
