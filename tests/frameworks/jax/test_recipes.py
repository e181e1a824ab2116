"""The code of the page "Recipes" for JAX does what the page says."""

from __future__ import annotations

import io
import pathlib
import pickle
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax import numpy as jnp

import horovodish.jax as hvd
from support.documents import recipes
from support.on_ranks import on_ranks

GLOBAL = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)


def scope(**more: Any) -> dict[str, Any]:
    return {"hvd": hvd, "jax": jax, "jnp": jnp, "optax": optax, **more}


def model(parameters: Any, inputs: Any) -> Any:
    return inputs @ parameters["weights"]


def loss_of(parameters: Any, inputs: Any, labels: Any) -> Any:
    return cross_entropy(model(parameters, inputs), labels)


def cross_entropy(outputs: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(outputs, labels).mean()


def own(rows: Any = GLOBAL) -> tuple[Any, Any]:
    mine = rows[hvd.rank() :: hvd.size()]
    return mine, mine[:, :3].argmax(1)


def stepped(optimizer: Any, parameters: Any, state: Any, inputs: Any, labels: Any, loss: Any = loss_of) -> Any:
    updates, state = optimizer.update(jax.grad(loss)(parameters, inputs, labels), state, parameters)
    return optax.apply_updates(parameters, updates), state


def first() -> Any:
    return {"weights": jnp.ones((4, 3)) / 2}


def are_equal(parameters: Any) -> bool:
    everybody = hvd.allgather_object(np.asarray(parameters["weights"]))
    return all((each == everybody[0]).all() for each in everybody)


@on_ranks(2)
def test_recipes(tmp_path: Path) -> None:
    code = recipes("docs/recipes.md", "JAX")
    optimizer = hvd.DistributedOptimizer(optax.adam(0.1))
    check_resuming(code.pop("Checkpoint: save and resume"), optimizer, tmp_path / f"{hvd.rank()}")

    names = scope()
    exec(code.pop("Clipping"), names)
    steep = lambda *arguments: 100 * loss_of(*arguments)  # noqa: E731
    ours, _ = stepped(names["optimizer"], first(), names["optimizer"].init(first()), *own(), loss=steep)
    alone = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    theirs, _ = stepped(alone, first(), alone.init(first()), GLOBAL, GLOBAL[:, :3].argmax(1), loss=steep)
    np.testing.assert_allclose(ours["weights"], theirs["weights"], rtol=1e-6)

    names = scope(model=model, cross_entropy=cross_entropy)
    exec(code.pop("Mixed precision"), names)
    gradients = jax.grad(names["loss_of"])(first(), *own())
    assert gradients["weights"].dtype == jnp.float32
    np.testing.assert_allclose(gradients["weights"], jax.grad(loss_of)(first(), *own())["weights"], atol=0.05)

    batches = [own(), own()][: 2 - hvd.rank()]
    step = jax.jit(lambda *arguments: stepped(optimizer, *arguments))
    names = scope(batches=batches, step=step, parameters=first(), state=optimizer.init(first()))
    exec(code.pop("Uneven data"), names)
    assert names["last"] == 0 and are_equal(names["parameters"])
    assert names["state"][0].count == 2

    tested = GLOBAL[:7]
    names = scope(model=model, parameters=first(), test_inputs=tested, test_labels=tested[:, :3].argmax(1))
    exec(code.pop("Evaluation on all ranks"), names)
    assert names["accuracy"] == float((model(first(), tested).argmax(1) == names["test_labels"]).sum()) / 7

    with redirect_stdout(io.StringIO()) as output:
        exec(code.pop("Logging once"), scope(loss=jnp.float32(hvd.rank())))
    assert output.getvalue() == ("loss 0.5000\n" if hvd.rank() == 0 else "")

    names = scope(rate=0.1, warmup_steps=2, steps=10)
    exec(code.pop("Learning rate and batch size"), names)
    np.testing.assert_allclose([names["schedule"](step) for step in range(3)], [0.1, 0.15, 0.2], rtol=1e-6)

    names = scope(seed=5)
    exec(code.pop("Seeds"), names)
    assert len(set(hvd.allgather_object(float(jax.random.normal(names["key"]))))) == hvd.size()

    encoded, meeting = code.pop("Slow links").split("# or\n")
    for block, same in ((encoded, True), (meeting, False), (code.pop("Models that do not fit"), True)):
        names = scope()
        exec(block, names)
        parameters, _ = stepped(names["optimizer"], first(), names["optimizer"].init(first()), *own())
        assert are_equal(parameters) == same
    assert not code


def check_resuming(code: str, optimizer: Any, path: Path) -> None:
    """Only rank 0 has the file, and the others begin with other weights."""
    saved = scope(pickle=pickle, pathlib=pathlib, path=path, epoch=3)
    saved["parameters"], saved["state"] = stepped(optimizer, first(), optimizer.init(first()), *own())
    saving, resuming = code.split("# when the job starts again\n")
    exec(saving, saved)
    names = scope(pickle=pickle, pathlib=pathlib, path=path)
    exec(resuming, names)
    assert names["epoch"] == 3
    after = [stepped(optimizer, each["parameters"], each["state"], *own())[0]["weights"] for each in (saved, names)]
    assert (after[0] == after[1]).all()
    assert path.exists() == (hvd.rank() == 0)
