"""`KerasState` and its callbacks: what is kept, epochs that go on in their middle, and ranks that go on, by backend."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import horovodish.keras as hvd
from horovodish.gradients import windows
from support.elastic import Scene, run_elastic
from support.keras_models import long_on, only_on
from support.ranks import run_ranks
from support.scripts import output_of
from support.sources import ROOT

BATCHES, BATCH, EPOCHS = 6, 4, 3


def network() -> Any:
    """With statistics and random seeds."""
    keras.utils.set_random_seed(os.getpid())
    layers = [keras.Input((5,)), keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization()]
    return keras.Sequential([*layers, keras.layers.Dropout(0.25), keras.layers.Dense(2)])


def compiled(**options: Any) -> Any:
    model = network()
    optimizer = keras.optimizers.Adam(0.01)
    model.compile(hvd.DistributedOptimizer(optimizer, **options), loss="mse", metrics=["mae"])
    return model


def examples(rank: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(rank).normal(size=(BATCHES * BATCH, 5)).astype("float32")
    return x, x[:, :2] ** 2


def values(model: Any) -> list[np.ndarray]:
    variables = [*model.weights, *model.optimizer.variables]
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def alike(ones: list[np.ndarray], others: list[np.ndarray]) -> bool:
    return len(ones) == len(others) and all(map(np.array_equal, ones, others))


class At(keras.callbacks.Callback):
    """Calls a function after a batch, the numbers counted from 0 in one `fit`."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self._function = function
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._function(self._epoch, batch)


class BatchError(Exception):
    """A failure in the middle of an epoch."""


def keep_a_model() -> None:
    """Weights and optimizers go back, in the middle of `fit` and in a model whose optimizer was not built."""
    hvd.init()
    model = compiled()
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    x, y = examples(0)
    kept: list[list[np.ndarray]] = []

    def fail(epoch: int, batch: int) -> None:
        if (epoch, batch) == (1, 3):
            model.jax_state_sync() if keras.config.backend() == "jax" else None
            kept.append(values(model))
            state.commit()
        if (epoch, batch) == (1, 4):
            raise BatchError

    callbacks = [
        hvd.elastic.CommitStateCallback(state, 100),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        At(fail),
    ]
    with pytest.raises(BatchError):
        model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    assert (state.epoch, state.batch) == (1, 5)
    assert not alike(values(model), kept[0])
    state._let_go()
    state.restore()
    assert (state.epoch, state.batch) == (1, 4)
    assert alike(values(model), kept[0])

    fresh = hvd.elastic.KerasState(compiled(), batch=0, epoch=0)
    assert len(fresh.model.optimizer.variables) == 2
    fresh._copies, fresh._position = state._copies, state._position
    fresh.restore()
    assert alike(values(fresh.model), kept[0])

    seen: list[tuple[int, int]] = []
    callbacks[-1] = At(lambda epoch, batch: seen.append((epoch, batch)))
    history = model.fit(
        x, y, batch_size=BATCH, epochs=EPOCHS, initial_epoch=state.epoch, verbose=0, callbacks=callbacks
    )
    assert seen == [(1, 0), (1, 1), *((2, batch) for batch in range(BATCHES))], "the epoch was shortened"
    assert history.epoch == [1, 2]
    assert (state.epoch, state.batch) == (EPOCHS, 0)
    state.epoch = 1
    model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks)
    assert state.epoch == 3, "fit() may also count the epochs that are left"

    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build(model.trainable_variables)
    state = hvd.elastic.KerasState(model, optimizer)
    state.commit()
    optimizer.learning_rate = 1.0
    state.restore()
    assert float(optimizer.learning_rate) == 0.5

    model = compiled()
    state = hvd.elastic.KerasState(model)
    state.commit()
    model.optimizer.build(model.trainable_variables)
    with pytest.raises(ValueError, match=r"before the first commit, call model\.optimizer\.build\("):
        state.restore()


def test_a_model_is_kept(backend: str) -> None:
    run_ranks(keep_a_model, 1)


def commit_in_any_order(backwards: bool) -> None:
    """A commit after a batch counts the batch, wherever its callback stands."""
    hvd.init()
    model = compiled()
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    callbacks = [hvd.elastic.CommitStateCallback(state, 4), hvd.elastic.UpdateBatchStateCallback(state)]
    x, y = examples(0)
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=callbacks[::-1] if backwards else callbacks)
    assert state.batch == 0
    state.restore()
    assert state.batch == 4


@only_on("torch")
@pytest.mark.parametrize("backwards", [False, True])
def test_a_commit_knows_the_batch(backend: str, backwards: bool) -> None:
    run_ranks(commit_in_any_order, 1, args=(backwards,))


def begin_windows_anew() -> list[str]:
    """A window that was open when the ranks lost touch is not applied; the variables of it are no part of the state."""
    hvd.init()
    model = compiled(backward_passes_per_step=2)
    model.optimizer.build(model.trainable_variables)
    state = hvd.elastic.KerasState(model)
    state.sync()
    x, y = examples(hvd.rank())
    model.fit(x, y, batch_size=BATCH, steps_per_epoch=3, epochs=1, verbose=0)
    state.commit()
    assert state._position[2] == 0, "it does not count within a window"
    hvd.shutdown()
    hvd.init()
    state._let_go()
    windows.restart()
    state.sync()
    window = model.optimizer._distribution.window
    assert int(window._count) == 0 and not any(np.any(keras.ops.convert_to_numpy(each)) for each in window._sums)
    model.fit(x, y, batch_size=BATCH, steps_per_epoch=4, epochs=1, verbose=0)
    assert int(model.optimizer.iterations) == 2, "the step of before was not committed"
    return [hashlib.sha256(value.tobytes()).hexdigest() for value in values(model)]


@pytest.mark.soak
def test_windows_begin_anew(backend: str) -> None:
    digests = run_ranks(begin_windows_anew, 2)
    assert digests[0][:2] == digests[1][:2]


def train_through_a_loss(scene: Scene, every: int) -> dict[str, Any]:
    """Process 1 dies after a batch, while the others are in the next one."""
    model = None
    begun: list[tuple[int, int]] = []

    def count(epoch: int, batch: int) -> None:
        begun.append((epoch, batch))
        if scene.me == 1 and len(begun) == BATCHES + 2 and scene.first_time("dies"):
            scene.die("dies")

    hvd.init()
    model = compiled()

    @hvd.elastic.run
    def train(state: Any) -> None:
        callbacks = [
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state, every),
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            At(count),
        ]
        x, y = examples(hvd.rank())
        model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, initial_epoch=state.epoch, verbose=0, callbacks=callbacks)

    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    train(state)
    return {
        "values": [np.array(keras.ops.convert_to_numpy(each)) for each in [*model.weights, *model.optimizer.variables]],
        "steps": int(model.optimizer.iterations),
        "begun": len(begun),
        "at": (state.epoch, state.batch),
        "start": scene.start,
    }


def go_on(tmp_path: Path, ranks: int, start: int, every: int) -> None:
    ended = run_elastic(train_through_a_loss, tmp_path, ranks, every, flags=["--min-np", "2"])
    assert ended.status == 0, ended.said
    assert ended.fired == {"dies 1"}
    assert [result["start"] for result in ended.results] == [start] * 2, ended.said
    for result in ended.results:
        assert result["at"] == (EPOCHS, 0)
        assert result["steps"] == EPOCHS * BATCHES, "no step is lost, and none counts twice"
        assert result["begun"] <= EPOCHS * BATCHES
        assert alike(result["values"], ended.results[0]["values"])


@long_on("jax", "tensorflow", "torch")
def test_survivors_go_on(backend: str, tmp_path: Path) -> None:
    go_on(tmp_path, 3, 0, every=1)


@pytest.mark.soak
@only_on("torch")
def test_new_processes_go_on(backend: str, tmp_path: Path) -> None:
    go_on(tmp_path, 2, 1, every=1)


@pytest.mark.soak
@only_on("tensorflow")
def test_the_example(backend: str) -> None:
    output = output_of(ROOT / "examples/elastic_keras.py", np=2, flags=["--min-np", "1"])
    accuracy = re.search(r"^test accuracy (\d\.\d+) on 2 ranks$", output, re.MULTILINE)
    assert accuracy is not None, output
    assert float(accuracy[1]) >= 0.93
