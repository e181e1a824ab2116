"""The callbacks of horovodish.keras in `fit`, and files."""

from __future__ import annotations

import functools
import json
import re
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import horovodish.keras as hvd
from horovodish.errors import MismatchError
from support.keras_models import compiled, examples, mlp, only_on, same_everywhere, sgd, three_ranks_too
from support.on_ranks import on_ranks
from support.threads import await_comparison

pytestmark = pytest.mark.usefixtures("backend")


class StopsAlone(keras.callbacks.Callback):
    """Has the last rank stop at the end of an epoch, or after a batch."""

    def __init__(self, epoch: int, batch: int | None = None) -> None:
        super().__init__()
        self.epoch, self.batch, self.now = epoch, batch, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.now = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._stop_if(self.now == self.epoch and batch == self.batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._stop_if(epoch == self.epoch and self.batch is None)

    def _stop_if(self, due: bool) -> None:
        if due and hvd.rank() == hvd.size() - 1:
            self.model.stop_training = True


@pytest.mark.soak
@on_ranks()
@three_ranks_too
def test_ranks_stop_together() -> None:
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    x, y = examples(24)
    # A rank's own callback, before and after ours in the list, and in the middle of an epoch.
    for callbacks in (
        [broadcast, StopsAlone(1)],
        [StopsAlone(1), broadcast],
        [keras.callbacks.History(), broadcast, StopsAlone(1)],
        [broadcast, hvd.callbacks.MetricAverageCallback(), StopsAlone(1, batch=2)],
    ):
        model = compiled(seed=hvd.rank())
        history = model.fit(x, y, epochs=4, batch_size=4, verbose=0, callbacks=callbacks)
        assert history.epoch == [0, 1], history.epoch
        assert same_everywhere(model)

    # EarlyStopping by figures of the rank: it is best in the first epoch on the last rank, later on the others.
    validation = (x, y if hvd.rank() < hvd.size() - 1 else -y)
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    model = compiled()
    history = model.fit(
        x, y, epochs=9, batch_size=4, verbose=0, validation_data=validation, callbacks=[broadcast, stopping]
    )
    assert len(set(hvd.allgather_object(len(history.epoch)))) == 1
    assert len(history.epoch) < 9
    weights, *others = hvd.allgather_object(model.get_weights())
    assert all(np.array_equal(*pair) for other in others for pair in zip(weights, other, strict=True))


@pytest.mark.soak
@on_ranks()
@three_ranks_too
def test_nan_stops_all_ranks() -> None:
    """It is in the second batch of the last rank, and in everybody's weights after it."""
    x, y = examples(24)
    if hvd.rank() == hvd.size() - 1:
        y[5] = np.nan
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), keras.callbacks.TerminateOnNaN()]
    model = compiled(seed=hvd.rank())
    history = model.fit(x, y, epochs=4, batch_size=4, shuffle=False, verbose=0, callbacks=callbacks)
    assert history.epoch == [0], history.epoch
    weights = model.get_weights()
    assert all(np.isnan(weight).all() for weight in weights), weights
    assert same_everywhere(model)
    assert {len(logs) for logs in hvd.allgather_object(history.history["loss"])} == {1}


@pytest.mark.soak
@on_ranks()
@three_ranks_too
def test_ranks_may_have_different_numbers_of_batches() -> None:
    x, y = examples(12 + 8 * hvd.rank())
    model = compiled(seed=hvd.rank())
    before = int(model.optimizer.iterations)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    history = model.fit(x, y, epochs=3, batch_size=4, verbose=0, callbacks=callbacks)
    assert int(model.optimizer.iterations) - before == 3 * (3 + 2 * (hvd.size() - 1))
    assert same_everywhere(model)
    assert len({tuple(values) for values in hvd.allgather_object(history.history["loss"])}) == 1


class Adversaries(keras.Model):
    """As many are written: two models, two optimizers, a `train_step` and no `call`, so that Keras never builds it."""

    def __init__(self) -> None:
        super().__init__()
        self.one = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
        self.other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])

    def compile(self, *optimizers: Any) -> None:
        super().compile()
        self.optimizers = list(optimizers)

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        for model, optimizer, sign in zip((self.one, self.other), self.optimizers, (1.0, -1.0), strict=False):
            loss = functools.partial(self.loss_of, x, y, sign)
            apply_gradients(optimizer, loss, model.trainable_variables)
        return {"loss": keras.ops.zeros(())}

    def loss_of(self, x: Any, y: Any, sign: float) -> Any:
        return sign * keras.ops.mean((self.other(self.one(x)) - y) ** 2)


def apply_gradients(optimizer: Any, loss: Callable[[], Any], variables: Any) -> None:
    if keras.config.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            value = loss()
        optimizer.apply(tape.gradient(value, variables), variables)
    else:
        import torch

        for variable in variables:
            variable.value.grad = None
        loss().backward()
        with torch.no_grad():
            optimizer.apply([variable.value.grad for variable in variables], variables)


class Untracked(keras.Model):
    """Whatever it trains, Keras does not know it."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": keras.ops.zeros(())}


@pytest.mark.soak
@on_ranks(2)
@only_on("torch", "tensorflow")  # JAX's `train_step` has no side effects
def test_models_with_several_optimizers() -> None:
    keras.utils.set_random_seed(hvd.rank())
    model, untracked = Adversaries(), Untracked()
    model.built = untracked.built = keras.config.backend() == "torch"  # where Keras asks for it
    model.compile(*(hvd.DistributedOptimizer(sgd()) for _ in range(2)))
    states: list[Any] = []

    def keep(epoch: int, logs: Any) -> None:
        variables = [*model.weights, *(variable for one in model.optimizers for variable in one.variables)]
        states.append([keras.ops.convert_to_numpy(variable).tobytes() for variable in variables])

    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        keras.callbacks.LambdaCallback(on_epoch_end=keep),  # fit ends with equal weights, whatever was before
    ]
    for count in (4, 4 + 4 * hvd.rank()):
        model.fit(*examples(count), batch_size=4, verbose=0, callbacks=callbacks)
    assert len(states) == 2
    for epoch, (first, *others) in enumerate(zip(*hvd.allgather_object(states), strict=True)):
        assert all(first == other for other in others), f"epoch {epoch}"
    assert [int(one.iterations) for one in model.optimizers] == [1 + hvd.size()] * 2

    with pytest.raises(ValueError, match="is trained by 2 optimizers, and none was passed to compile"):
        model.fit(*examples(4), verbose=0, callbacks=[hvd.callbacks.LearningRateWarmupCallback(1.0)])
    only = hvd.DistributedOptimizer(sgd())
    model.compile(only)
    model.fit(*examples(4), verbose=0, callbacks=[hvd.callbacks.LearningRateScheduleCallback(1.0, 0.25)])
    assert float(only.learning_rate) == 0.25
    untracked.compile()
    with pytest.raises(ValueError, match="has no weights that Keras knows"):
        untracked.fit(*examples(4), batch_size=4, verbose=0, callbacks=callbacks[:1])


@on_ranks(2)
def test_a_model_may_have_been_fitted_before_it_is_wrapped() -> None:
    model, states = mlp(), []
    model.compile(sgd(), loss="mse")
    model.fit(*examples(4), batch_size=4, verbose=0)
    hvd.DistributedOptimizer(model.optimizer)

    class Keep(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # before fit makes the ranks equal
            states.append(self.model.get_weights())

    model.fit(
        *examples(4), batch_size=4, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), Keep()]
    )
    everyones = hvd.allgather_object(states[0])
    assert all(np.array_equal(*pair) for pair in zip(everyones[0], everyones[-1], strict=True))


@on_ranks(2)
def test_a_model_may_be_built_by_its_first_batch() -> None:
    """Also where that is the last one of a rank."""
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(2)])
    model.compile(hvd.DistributedOptimizer(sgd()), loss="mse")
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(*examples(4 + 4 * hvd.rank()), batch_size=4, verbose=0, callbacks=callbacks)
    assert same_everywhere(model)
    assert int(model.optimizer.iterations) == hvd.size()


@on_ranks(2)
def test_logs_are_averaged() -> None:
    average = hvd.callbacks.MetricAverageCallback()
    seen: list[float] = []
    before = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["loss"]))
    x, y = examples(8)
    history = compiled().fit(
        x, y, epochs=1, batch_size=4, verbose=0, callbacks=[before, average], validation_data=examples(4)
    )
    assert np.isclose(history.history["loss"][0], np.mean(hvd.allgather_object(seen[0])), rtol=1e-6)
    assert {len(set(hvd.allgather_object(history.history[key][0]))) for key in ("mae", "val_loss", "val_mae")} == {1}
    validation = examples(4) if hvd.rank() == 0 else None
    with pytest.raises(MismatchError, match=r"val_mae.*validate alike on every rank"):
        compiled().fit(x, y, epochs=1, batch_size=4, verbose=0, callbacks=[average], validation_data=validation)


class Watch(keras.callbacks.Callback):
    """Keeps the learning rate of every batch, or of every call of a compiled step."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.rates.append(float(self.model.optimizer.learning_rate))


@on_ranks(2)
def test_learning_rates_follow_the_ranks() -> None:
    x, y = examples(8)
    model, watch = compiled(), Watch()
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.1 * hvd.size(), warmup_epochs=2)
    decay = hvd.callbacks.LearningRateScheduleCallback(0.1 * hvd.size(), multiplier=0.5, start_epoch=2)
    history = model.fit(x, y, epochs=3, batch_size=4, verbose=0, callbacks=[warmup, decay, watch])
    steps = np.minimum(np.arange(1, 7) / 4, 1.0)
    expected = 0.1 * (1 + steps * (hvd.size() - 1))
    expected[4:] /= 2
    np.testing.assert_allclose(watch.rates, expected, rtol=1e-6)
    np.testing.assert_allclose(history.history["learning_rate"], expected[1::2], rtol=1e-6)

    scheduled = mlp()
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    scheduled.compile(hvd.DistributedOptimizer(sgd(learning_rate=schedule)), loss="mse")
    with pytest.raises(ValueError, match="make it with a number"):
        scheduled.fit(x, y, verbose=0, callbacks=[decay, warmup])


@pytest.mark.soak
@on_ranks(2)
def test_learning_rates_are_equal_whatever_the_number_of_batches() -> None:
    """The rank with the most batches decides, also for a rank that does not know its own number."""
    batches = 2 + hvd.rank()
    inputs, targets = examples(4 * batches)
    known = {"x": inputs, "y": targets, "batch_size": 4}
    unknown = {"x": ((inputs[i : i + 4], targets[i : i + 4]) for i in range(0, len(inputs), 4))}
    for data in (known, unknown if hvd.rank() == 0 else known):
        watch = Watch()
        schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 1 - epoch, staircase=False)
        compiled().fit(**data, epochs=1, verbose=0, shuffle=False, callbacks=[schedule, watch])
        expected = 0.1 * (1 - np.arange(batches) / (1 + hvd.size()))
        # A generator's end is found in a batch that is none.
        np.testing.assert_allclose(watch.rates[:batches], expected, rtol=1e-6)


@pytest.mark.soak
@on_ranks(2)
@only_on("jax", "tensorflow")  # PyTorch has no such steps
def test_a_warmup_reaches_its_end_in_steps_of_several_batches() -> None:
    model, watch = mlp(), Watch()
    model.compile(hvd.DistributedOptimizer(sgd()), loss="mse", steps_per_execution=2)
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.1 * hvd.size(), warmup_epochs=1)
    history = model.fit(*examples(16), epochs=2, batch_size=4, verbose=0, callbacks=[warmup, watch])
    expected = 0.1 * (1 + np.array([0.25, 0.75, 1.0, 1.0]) * (hvd.size() - 1))
    np.testing.assert_allclose(watch.rates, expected, rtol=1e-6)
    np.testing.assert_allclose(history.history["learning_rate"], [0.1 * hvd.size()] * 2, rtol=1e-6)


@on_ranks(2)
def test_momentum_contains_the_learning_rate() -> None:
    """Plain SGD in which the step of momentum is divided by the learning rate gives what the correction gives."""
    rates, weight, velocity = [0.1, 0.3, 0.3], 0.0, 0.0
    for rate in rates:
        velocity = 0.9 * velocity + 1.0
        weight -= rate * velocity
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(hvd.DistributedOptimizer(sgd(learning_rate=0.1)), loss=lambda y, prediction: prediction)
    schedule = hvd.callbacks.LearningRateScheduleCallback(1.0, lambda epoch: rates[int(epoch)])
    ones = np.ones((1, 1), "float32")
    model.fit(ones, ones, epochs=3, verbose=0, callbacks=[schedule])
    np.testing.assert_allclose(model.get_weights()[0], [[weight]], rtol=1e-5)


@pytest.mark.soak
@on_ranks(2)
def test_files_are_those_of_keras(tmp_path: Path) -> None:
    x, y = examples(8)
    keras.utils.set_random_seed(hvd.rank())
    model = mlp()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    best = hvd.callbacks.BestModelCheckpoint(tmp_path / "best.keras", monitor="loss")
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), best]
    model.fit(x, y, epochs=2, batch_size=4, verbose=0, callbacks=callbacks)
    hvd.barrier()
    path = tmp_path / f"{hvd.rank()}.keras"
    model.save(path)
    with zipfile.ZipFile(path) as archive:
        saved = json.loads(archive.read("config.json"))["compile_config"]["optimizer"]
    assert saved == keras.saving.serialize_keras_object(keras.optimizers.Adam(0.01)) | {"config": saved["config"]}

    for file in (path, tmp_path / "best.keras"):
        plain, wrapped = keras.saving.load_model(file), hvd.load_model(file, compression=hvd.Compression.bf16)
        assert int(plain.optimizer.iterations) > 0
        assert type(plain.optimizer) is plain.optimizer.__class__
        assert type(wrapped.optimizer) is not wrapped.optimizer.__class__
        for one, other in zip(plain.optimizer.variables, wrapped.optimizer.variables, strict=True):
            assert np.array_equal(*map(keras.ops.convert_to_numpy, (one, other)))
    # Training goes on from a file as it would have without.
    again = hvd.load_model(path)
    for trained in (model, again):
        trained.fit(x, y, epochs=1, batch_size=4, shuffle=False, verbose=0)
    for one, other in zip(model.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert same_everywhere(again)

    windows = hvd.load_model(path, backward_passes_per_step=2)
    windows.fit(x, y, epochs=1, batch_size=4, verbose=0)
    assert int(windows.optimizer.iterations) == 5
    assert len(windows.optimizer.variables) > len(model.optimizer.variables)
    windows.save(path)
    assert int(keras.saving.load_model(path).optimizer.iterations) == 5  # Keras leaves out a state that does not fit


@on_ranks(2)
def test_ranks_that_begin_with_different_weights_are_warned() -> None:
    broadcast, average = hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()
    model = mlp()
    for weight in model.trainable_weights:
        weight.assign(np.full(weight.shape, hvd.rank()))
    deferred = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(2)])
    x, y = examples(8)
    cases: list[Any] = [(model, average, True), (model, broadcast, False), (deferred, broadcast, False)]
    for trained, callback, warns in cases:
        trained.compile(hvd.DistributedOptimizer(sgd()), "mse")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trained.fit(x, y, epochs=2, batch_size=4, verbose=0, callbacks=[callback])
            await_comparison()
        said = [str(each.message) for each in caught if "different parameters" in str(each.message)]
        assert len(said) == (warns and hvd.rank() == 0), said
        assert all("kernel) differs: rank 0 has" in text and "BroadcastGlobalVariables" in text for text in said), said


class Parts(keras.callbacks.Callback):
    """Has the last rank change a weight after its second step."""

    steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        if self.steps == 2 and hvd.rank() == hvd.size() - 1:
            kernel = self.model.trainable_weights[0]
            kernel.assign(keras.ops.ones(kernel.shape))


def fit_and_part() -> None:
    model = mlp()
    hvd.broadcast_variables(model.variables, root_rank=0)
    model.compile(hvd.DistributedOptimizer(sgd()), "mse", jit_compile=False)
    x, y = examples(24)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=[Parts()])


def train_apart_in_a_function(window: int = 1) -> None:
    import tensorflow as tf

    variable = keras.Variable(np.full(3, hvd.rank(), np.float32), name="weights")
    optimizer = hvd.DistributedOptimizer(sgd(), backward_passes_per_step=window)
    optimizer.build([variable])

    @tf.function
    def step() -> None:
        optimizer.apply([variable.value * 2], [variable])

    for _ in range(5 * window):
        step()


@on_ranks(2)
@only_on("tensorflow")
def test_compiled_steps_are_compared_again() -> None:
    begun_apart = r"the ranks begin to train with different parameters: variable 0 \(weights\) differs"
    for train, begin in (
        (fit_and_part, r"the ranks train different parameters at step 4: variable 0 \(.*kernel\) differs"),
        (train_apart_in_a_function, begun_apart),
        (lambda: train_apart_in_a_function(window=2), begun_apart),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train()
            await_comparison()
            hvd.barrier()
        said = [str(each.message) for each in caught if "different parameters" in str(each.message)]
        assert len(said) == (hvd.rank() == 0), said
        assert all(re.match(begin, text) for text in said), said


class OwnStep(keras.Model):
    """May reduce its gradients, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = keras.layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.layer(x)

    def train_step(self, *arguments: Any) -> Any:
        return super().train_step(*arguments)


@on_ranks(2)
def test_ranks_do_not_train_alone() -> None:
    """In a model whose optimizer is not wrapped."""
    model = mlp()
    model.compile(sgd(), loss="mse")
    state = hvd.elastic.KerasState(model, batch=0)
    for callback in (
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.elastic.CommitStateCallback(state),
    ):
        with pytest.raises(ValueError, match=r"is not wrapped, so each rank would train alone.*hvd\.load_model"):
            model.fit(*examples(4), verbose=0, callbacks=[callback])
    model.evaluate(*examples(4), verbose=0, callbacks=[hvd.callbacks.MetricAverageCallback()])

    own = OwnStep()
    own.compile(sgd(), loss="mse")
    own(examples(4)[0])
    with pytest.warns(RuntimeWarning, match="different weights of own_step after an epoch, and none of its optimizers"):
        own.fit(*examples(4), verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

    unbuilt = OwnStep()
    unbuilt.compile(sgd(), loss="mse")
    with pytest.warns(RuntimeWarning, match="different weights of own_step_1 after an epoch"):
        # On TensorFlow the weights are broadcast after the only step of the first epoch, so they are equal at its end.
        unbuilt.fit(*examples(4), epochs=2, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])


@on_ranks(2)
def test_learning_rates_do_not_part() -> None:
    """ReduceLROnPlateau halves that of the last rank, whose figures grow worse."""
    model, watch = compiled(), Watch()
    x, y = examples(8)
    plateau = keras.callbacks.ReduceLROnPlateau("own", mode="min", factor=0.5, patience=1, min_delta=0.0)
    figures = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: logs.update(own=float(epoch * (2 * hvd.rank() - 1)))
    )
    callbacks = [figures, plateau, hvd.callbacks.BroadcastGlobalVariablesCallback(0), watch]
    with pytest.warns(RuntimeWarning, match=r"learning rates differ after an epoch.*MetricAverageCallback\(\) before"):
        model.fit(x, y, epochs=3, batch_size=4, verbose=0, callbacks=callbacks)
    np.testing.assert_allclose(watch.rates, 0.05, rtol=1e-6)
    assert same_everywhere(model)


@on_ranks(2)
def test_an_epoch_that_goes_on_has_the_rates_of_its_rest() -> None:
    model, state = compiled(), hvd.elastic.KerasState(compiled(), batch=0, epoch=0)
    rates: list[list[float]] = []
    for done in (0, 3):
        watch, state.batch = Watch(), done
        warmup = hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2)
        updates = hvd.elastic.UpdateBatchStateCallback(state)
        model.fit(*examples(16), epochs=2, initial_epoch=1, batch_size=4, verbose=0, callbacks=[warmup, updates, watch])
        rates.append(watch.rates)
    np.testing.assert_allclose(rates[1], rates[0][3:], rtol=1e-6)


@on_ranks(2)
@only_on("torch")
def test_all_ranks_begin_with_the_same_epoch() -> None:
    with pytest.raises(MismatchError, match=r"different epochs on ranks \[0, 1\]: \[0, 1\].*BackupAndRestore"):
        compiled().fit(
            *examples(4),
            epochs=3,
            initial_epoch=hvd.rank(),
            verbose=0,
            callbacks=[hvd.callbacks.MetricAverageCallback()],
        )


@on_ranks(2)
@only_on("torch", "jax")
def test_files_have_no_window_in_mixed_precision(tmp_path: Path) -> None:
    """Also where the LossScaleOptimizer that `compile` puts around the optimizer is built before `fit`."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = mlp()
        model.compile(hvd.DistributedOptimizer(sgd(), backward_passes_per_step=2), loss="mse")
        model.optimizer.build(model.trainable_variables)
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        model.fit(*examples(16), batch_size=4, verbose=0, callbacks=callbacks)
        path = tmp_path / f"{hvd.rank()}.keras"
        model.save(path)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Skipping variable loading")
            plain = keras.saving.load_model(path)
        momenta = [
            [keras.ops.convert_to_numpy(each) for each in one.optimizer.inner_optimizer.momentums]
            for one in (model, plain)
        ]
        assert all(map(np.array_equal, *momenta)) and any(map(np.any, momenta[1]))
        assert int(plain.optimizer.iterations) == int(model.optimizer.iterations)
    finally:
        keras.config.set_dtype_policy("float32")
