"""`DistributedOptimizer(sync=...)` of Keras: ranks that take steps of their own, and meet."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest

import horovodish
import horovodish.keras as hvd
from horovodish.gradients import windows
from horovodish.runtime.process import part
from support.documents import python_blocks
from support.keras_models import BATCH, CLOSE, adam, data, fit, mlp, only_on, sgd
from support.on_ranks import on_ranks
from support.threads import await_comparison

pytestmark = pytest.mark.usefixtures("backend")

LR = 0.05
STEPS = 9
SIZES = [(3, 4), (4,), (2, 5)]
Step = Callable[[list[np.ndarray]], None]
"""Applies gradients."""


def starts() -> list[np.ndarray]:
    return [np.linspace(-1, 1, int(np.prod(shape))).reshape(shape).astype(np.float32) for shape in SIZES]


def gradients(values: list[np.ndarray], step: int, rank: int) -> list[np.ndarray]:
    """The gradients of the squared distance to a target of this step and rank."""
    random = np.random.default_rng([step, rank])
    return [2 * (value - random.standard_normal(value.shape).astype(np.float32)) for value in values]


class Play:
    """All ranks in one process, with plain SGD within and the outer optimizer of DiLoCo between."""

    def __init__(self, every: int, after: int = 0, lr: float = 1.0, momentum: float = 0.0):
        self.every, self.after, self.lr, self.momentum = every, after, lr, momentum
        self.common = [np.array(value, np.float64) for value in starts()]
        self.velocity = [value * 0 for value in self.common]
        self.ranks = [list(self.common) for _ in range(hvd.size())]
        self.steps = 0

    def step(self) -> list[np.ndarray]:
        """The values of this rank after a step of all."""
        of_ranks = [gradients(values, self.steps, rank) for rank, values in enumerate(self.ranks)]
        if self.steps < self.after:
            of_ranks = [[np.mean(each, 0) for each in zip(*of_ranks, strict=True)]] * hvd.size()
        self.ranks = [
            [value - LR * its for value, its in zip(*each, strict=True)]
            for each in zip(self.ranks, of_ranks, strict=True)
        ]
        self.steps += 1
        number = self.steps - self.after
        if number <= 0:
            self.common = self.ranks[0]
        elif number % self.every == 0:
            changes = [
                np.mean(each, 0) - start for each, start in zip(zip(*self.ranks, strict=True), self.common, strict=True)
            ]
            self.velocity = [self.momentum * old + change for old, change in zip(self.velocity, changes, strict=True)]
            self.common = [
                start + self.lr * (change + self.momentum * velocity)
                for start, change, velocity in zip(self.common, changes, self.velocity, strict=True)
            ]
            self.ranks = [list(self.common) for _ in self.ranks]
        return self.ranks[hvd.rank()]


def variables() -> list[Any]:
    return [keras.Variable(value, name=f"v{place}") for place, value in enumerate(starts())]


def step_of(optimizer: Any, trained: list[Any], compiled: bool) -> Step:
    def tensors(arrays: list[np.ndarray]) -> list[Any]:
        return [keras.ops.convert_to_tensor(array) for array in arrays]

    if compiled and keras.config.backend() == "tensorflow":
        import tensorflow as tf

        apply = tf.function(lambda *given: optimizer.apply(list(given), trained))
        return lambda arrays: apply(*tensors(arrays))
    if compiled and keras.config.backend() == "jax":
        import jax

        stateless = jax.jit(optimizer.stateless_apply)

        def step(arrays: list[np.ndarray]) -> None:
            kept = optimizer.variables, trained
            state, values = ([each.value for each in those] for those in kept)
            values, state = stateless(state, tensors(arrays), values)
            for each, value in zip([*trained, *kept[0]], [*values, *state], strict=True):
                each.assign(value)

        return step
    return lambda arrays: optimizer.apply(tensors(arrays), trained)


def values_of(those: list[Any]) -> list[np.ndarray]:
    return [np.array(keras.ops.convert_to_numpy(each)) for each in those]


def train(step: Step, trained: list[Any], steps: range) -> None:
    for number in steps:
        step(gradients(values_of(trained), number, hvd.rank()))


def built(inner: Any, **options: Any) -> tuple[Any, list[Any]]:
    trained = variables()
    optimizer = hvd.DistributedOptimizer(inner, **options)
    optimizer.build(trained)
    return optimizer, trained


def plain(rate: float = LR) -> Any:
    return keras.optimizers.SGD(rate)


POLICIES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "every 1": (lambda: hvd.LocalSGD(1), {"every": 1}),
    "every 4": (lambda: hvd.LocalSGD(4), {"every": 4}),
    "after 4": (lambda: hvd.LocalSGD(every=3, after=4), {"every": 3, "after": 4}),
    "DiLoCo": (lambda: hvd.DiLoCo(2), {"every": 2, "lr": 0.7, "momentum": 0.9}),
    "DiLoCo without momentum": (
        lambda: hvd.DiLoCo(3, hvd.OuterSGD(0.5, 0.0), after=2),
        {"every": 3, "after": 2, "lr": 0.5},
    ),
}


@on_ranks((2, "mpi_ring"))
@pytest.mark.parametrize("name", POLICIES)
def test_against_the_definition(name: str) -> None:
    policy, played = POLICIES[name]
    for compiled in (False, True):
        optimizer, trained = built(plain(), sync=policy())
        step, play = step_of(optimizer, trained, compiled), Play(**played)
        for number in range(STEPS):
            train(step, trained, range(number, number + 1))
            for value, expected in zip(values_of(trained), play.step(), strict=True):
                np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5, err_msg=f"compiled={compiled}")


@on_ranks(1)
def test_a_world_of_one_rank() -> None:
    """Nothing is reduced, but an outer optimizer steps."""
    optimizer, trained = built(plain(), sync=hvd.DiLoCo(2))
    play = Play(2, lr=0.7, momentum=0.9)
    step = step_of(optimizer, trained, True)
    for number in range(5):
        train(step, trained, range(number, number + 1))
        for value, expected in zip(values_of(trained), play.step(), strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_rounds_of_one_step_are_synchronous_training_in_fit() -> None:
    for jit_compile in ("auto", True) if keras.config.backend() == "tensorflow" else ("auto",):
        trained = []
        for sync in (None, hvd.LocalSGD(1), hvd.LocalSGD(8, after=20)):
            keras.utils.set_random_seed(7)
            optimizer = hvd.DistributedOptimizer(plain(), sync=sync)
            trained.append(fit(mlp(), optimizer, hvd.rank(), BATCH, jit_compile=jit_compile))
        for weights in zip(*trained, strict=True):
            for weight in weights[1:]:
                np.testing.assert_allclose(weight, weights[0], **CLOSE, err_msg=f"jit_compile={jit_compile}")


@on_ranks(2)
def test_ranks_meet_in_fit_and_at_its_end() -> None:
    equal: list[bool] = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            first, *others = hvd.allgather_object(self.model.get_weights())
            equal.append(all(np.array_equal(*pair) for other in others for pair in zip(first, other, strict=True)))

    keras.utils.set_random_seed(hvd.rank())
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), Look()]
    optimizer = hvd.DistributedOptimizer(sgd(), sync=hvd.LocalSGD(4))
    model = mlp()
    ends = fit(model, optimizer, hvd.rank(), BATCH, callbacks)
    assert [step for step, each in enumerate(equal, 1) if each] == [4, 8]
    assert not optimizer._distribution.rounds.is_open()
    everyones = hvd.allgather_object(ends)
    assert all(np.array_equal(*pair) for pair in zip(everyones[0], everyones[-1], strict=True))


@on_ranks(2)
def test_a_fit_ends_with_the_average() -> None:
    """Each rank's gradient is the mean of its inputs."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(
        hvd.DistributedOptimizer(plain(1.0), sync=hvd.LocalSGD(100)),
        loss=lambda _, predicted: keras.ops.mean(predicted),
    )
    x = np.full((6, 1), hvd.rank() + 1.0, np.float32)
    model.fit(x, x, batch_size=2, verbose=0, callbacks=[hvd.callbacks.MetricAverageCallback()])
    np.testing.assert_allclose(model.get_weights()[0], [[-4.5]], rtol=1e-6)


@on_ranks(2)
def test_a_rank_with_fewer_batches_and_mixed_precision() -> None:
    """The ranks end with the weights of the one with most steps."""
    for policy in ("float32", "mixed_float16"):
        keras.config.set_dtype_policy(policy)
        try:
            model = mlp()
        finally:
            keras.config.set_dtype_policy("float32")
        model.compile(hvd.DistributedOptimizer(sgd(), sync=hvd.LocalSGD(2)), loss="mse")
        x, y = (array[: 5 - 2 * hvd.rank(), hvd.rank()].reshape(-1, array.shape[-1]) for array in data())
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        model.fit(x, y, epochs=2, batch_size=BATCH, verbose=0, callbacks=callbacks)
        everyones = hvd.allgather_object(model.get_weights())
        assert all(np.array_equal(*pair) for pair in zip(everyones[0], everyones[-1], strict=True))
        assert model.optimizer._distribution.rounds.steps == 10


@on_ranks(2)
def test_an_elastic_job_commits_between_rounds() -> None:
    model = mlp()
    part(windows._Windows).clear()  # of other tests
    model.compile(hvd.DistributedOptimizer(sgd(), sync=hvd.LocalSGD(2)), loss="mse")
    state = hvd.elastic.KerasState(model)
    x, y = (array[0, hvd.rank()] for array in data())
    for is_open in (True, False, True):
        model.train_on_batch(x, y)
        assert state._has_open_window() == is_open
    committed: list[int] = []
    with mock.patch.object(state, "commit") as commit:
        commit.side_effect = lambda: committed.append(model.optimizer._distribution.rounds.steps)
        callback = hvd.elastic.CommitStateCallback(state, 3)
        model.fit(x, y, batch_size=1, epochs=2, verbose=0, callbacks=[callback])
    assert committed == [6, 10]
    model.compile(hvd.DistributedOptimizer(sgd(), sync=hvd.Hierarchical(every=2)), loss="mse")
    with pytest.raises(ValueError, match="within= needs process sets"):
        hvd.elastic.KerasState(model)


@on_ranks(2)
def test_looking_does_not_change_training_and_rounds_may_end_early() -> None:
    runs = []
    for looks in (False, True):
        optimizer, trained = built(adam(), sync=hvd.DiLoCo(3))
        step = step_of(optimizer, trained, True)
        for number in range(STEPS):
            if looks:
                with optimizer.synchronized():
                    shown = hvd.allgather_object([value.tolist() for value in values_of(trained)])
                    assert shown[0] == shown[-1]
                    with pytest.raises(RuntimeError, match="within"):
                        optimizer.synchronized().__enter__()
            train(step, trained, range(number, number + 1))
        runs.append(values_of([*trained, *optimizer.variables]))
    assert all(np.array_equal(*pair) for pair in zip(*runs, strict=True))
    optimizer, trained = built(plain(1.0), sync=hvd.LocalSGD(100))
    for rounds in (1, 2):
        for _ in range(4):
            optimizer.apply([keras.ops.full(shape, 2.0 ** hvd.rank()) for shape in SIZES], trained)
        assert optimizer._distribution.rounds.is_open()  # an elastic job commits nothing
        optimizer.end_round()
        optimizer.end_round()
        assert not optimizer._distribution.rounds.is_open()
        for value, start in zip(values_of(trained), starts(), strict=True):
            np.testing.assert_allclose(value, start - 6 * rounds, rtol=1e-6)


@on_ranks(2)
def test_a_step_while_looking_is_refused() -> None:
    for compiled in (False, True):
        optimizer, trained = built(plain(), sync=hvd.LocalSGD(8))
        step = step_of(optimizer, trained, compiled)
        train(step, trained, range(2))
        kept = values_of(trained)
        with pytest.raises(RuntimeError, match="step within synchronized"), optimizer.synchronized():
            train(step, trained, range(2, 3))
        assert all(np.array_equal(*pair) for pair in zip(values_of(trained), kept, strict=True))


@on_ranks(2)
@pytest.mark.parametrize("policy", ["LocalSGD", "DiLoCo"])
def test_a_model_that_was_saved_within_a_round_goes_on(policy: str, tmp_path: Path) -> None:
    sync = {"LocalSGD": lambda: hvd.LocalSGD(4), "DiLoCo": lambda: hvd.DiLoCo(4)}[policy]()
    file = str(tmp_path / f"{policy}{hvd.rank()}.keras")
    x, y = (array[:, hvd.rank()] for array in data())

    def go_on(model: Any, steps: range) -> list[np.ndarray]:
        for step in steps:
            model.train_on_batch(x[step % len(x)], y[step % len(y)])
        return [*model.get_weights(), *values_of(model.optimizer.variables)]

    keras.utils.set_random_seed(7)
    model = mlp()
    model.compile(hvd.DistributedOptimizer(adam(), sync=sync), loss="mse")
    for saved_after in (2, 6, 8):
        go_on(model, range(int(model.optimizer.iterations), saved_after))
        model.save(file)
        with_rounds = hvd.load_model(file, sync=sync)
        assert with_rounds.optimizer._distribution.rounds.steps == saved_after
        without = keras.saving.load_model(file)
        assert int(without.optimizer.iterations) == saved_after
        assert "rounds" not in vars(without.optimizer)
        expected = go_on(model, range(saved_after, saved_after + 5))
        found = go_on(with_rounds, range(saved_after, saved_after + 5))
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_array_equal(one, other)
        model = hvd.load_model(file, sync=sync)
    with pytest.raises(ValueError, match=r"round of another policy.*pass the sync="):
        hvd.load_model(file, sync=hvd.LocalSGD(4) if policy == "DiLoCo" else hvd.DiLoCo(4))


@on_ranks(2)
def test_ranks_with_different_policies() -> None:
    optimizer, trained = built(plain(), sync=[hvd.LocalSGD(1), hvd.LocalSGD(2)][hvd.rank()])
    with pytest.raises(horovodish.MismatchError, match=r"LocalSGD\(every=[12]\)"):
        train(step_of(optimizer, trained, False), trained, range(2))


class Anchored(hvd.Sync):
    """A policy that remembers where training began."""

    def begin(self, parameter: Any) -> tuple[Any, ...]:
        return (parameter,)

    def merge(self, start: Any, change: Any, memory: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        return (memory[0] + start + change) / 2, memory


class Growing(hvd.Sync):
    """Rounds of 1, 2, 4 ... steps."""

    def is_due(self, step: Any, fragment: int = 0) -> Any:
        return (step & (step + 1)) == 0


@on_ranks(2)
def test_policies_of_ones_own() -> None:
    for compiled in (False, True):
        optimizer, trained = built(plain(1.0), sync=Anchored(2, after=1))
        step = step_of(optimizer, trained, compiled)
        for _ in range(5):
            step([np.ones(shape, np.float32) for shape in SIZES])
        for value, start in zip(values_of(trained), starts(), strict=True):
            np.testing.assert_allclose(value - start, -2.5, rtol=1e-5)  # -1; (-1 - 3) / 2 = -2; (-1 - 4) / 2
        optimizer, trained = built(plain(), sync=Growing(1))
        step = step_of(optimizer, trained, compiled)
        met = []
        for number in range(8):
            train(step, trained, range(number, number + 1))
            one, other = hvd.allgather_object(values_of(trained)[0].tolist())
            if one == other:
                met.append(number + 1)
        assert met == [1, 3, 7]


@on_ranks(2)
def test_passes_and_scaling_are_each_ranks_own() -> None:
    """A rank whose gradients are not finite skips its step, and the others take theirs."""
    for compiled in (False, True):
        optimizer, trained = built(plain(1.0), sync=hvd.LocalSGD(2), backward_passes_per_step=2)
        step = step_of(optimizer, trained, compiled)
        for _ in range(5):
            step([np.full(shape, hvd.rank() + 1, np.float32) for shape in SIZES])
        for value, start in zip(values_of(trained), starts(), strict=True):
            np.testing.assert_allclose(value - start, -6, rtol=1e-5)
        if keras.config.backend() == "jax" and not compiled:
            continue  # Keras's scaler works in compiled steps only
        scaling = keras.optimizers.LossScaleOptimizer(plain(1.0), initial_scale=4.0)
        optimizer, trained = built(scaling, sync=hvd.LocalSGD(2))
        step = step_of(optimizer, trained, compiled)
        for number in range(2):
            step([np.full(shape, np.inf if hvd.rank() == number == 1 else 4, np.float32) for shape in SIZES])
        for value, start in zip(values_of(trained), starts(), strict=True):
            np.testing.assert_allclose(value - start, -1.5, rtol=1e-5)
        assert float(scaling.dynamic_scale) == (4.0 if hvd.rank() == 0 else 2.0)


@on_ranks(2)
def test_sets_that_step_alike() -> None:
    """The ranks of a host average their gradients in every step."""
    for compiled in (False, True):
        optimizer, trained = built(plain(1.0), sync=hvd.Hierarchical("host", every=2))
        step = step_of(optimizer, trained, compiled)
        for number in range(3):
            step([np.full(shape, hvd.rank() + 1, np.float32) for shape in SIZES])
            for value, start in zip(values_of(trained), starts(), strict=True):
                np.testing.assert_allclose(value - start, -1.5 * (number + 1), rtol=1e-5)


@on_ranks((2, "mpi_ring"))
def test_changes_travel_as_codes() -> None:
    for options in ({"compression": hvd.Compression.int8}, {"sync": hvd.DiLoCo(2, compression=hvd.Compression.int8)}):
        optimizer, trained = built(plain(), **{"sync": hvd.LocalSGD(2), **options})
        train(step_of(optimizer, trained, True), trained, range(4))
        one, other = hvd.allgather_object([value.tolist() for value in values_of(trained)])
        assert one == other


@on_ranks(2)
def test_ranks_that_begin_with_different_variables_are_warned() -> None:
    for differs, compiled in ((False, False), (True, False), (False, True), (True, True)):
        optimizer, trained = built(plain(), sync=hvd.LocalSGD(2))
        if differs:
            trained[1].assign(np.full(SIZES[1], hvd.rank(), np.float32))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(step_of(optimizer, trained, compiled), trained, range(4))
            await_comparison()
        said = [str(each.message) for each in caught if "different parameters" in str(each.message)]
        assert len(said) == (differs and hvd.rank() == 0), said
        assert all("v1" in each for each in said)


@on_ranks(2)
def test_what_is_not_there_is_refused() -> None:
    for sync, text in (
        (hvd.DiLoCo(4, fragments=2), "fragments=2 is not available in Keras. Remedy: leave fragments= out"),
        (hvd.DiLoCo(4, overlap=1), "overlap=1 is not available in Keras"),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(plain(), sync=sync)
    with pytest.raises(TypeError, match="sync=8 is not a policy"):
        hvd.DistributedOptimizer(plain(), sync=8)
    with pytest.raises(ValueError, match=r"with sync= all variables meet"):
        hvd.PartialDistributedOptimizer(plain(), sync=hvd.LocalSGD(2), local_layers=mlp().layers[1])


@on_ranks(2)
@only_on("tensorflow")
def test_what_takes_no_steps_of_keras_refuses() -> None:
    import tensorflow as tf

    import horovodish.tensorflow as hvd_tf

    with pytest.raises(TypeError, match=r"'sync'; DistributedOptimizer of PyTorch, JAX, Keras takes it"):
        hvd_tf.DistributedGradientTape(tf.GradientTape(), sync=hvd.LocalSGD(2))  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"sync= needs a Keras optimizer"):
        hvd_tf.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0), sync=hvd.LocalSGD(2))
    optimizer = hvd_tf.DistributedOptimizer(plain(1.0), sync=hvd_tf.LocalSGD(2))
    variable = keras.Variable(np.zeros(2, "float32"))
    for _ in range(2):
        optimizer.apply_gradients([(tf.fill([2], hvd.rank() + 1.0), variable)])
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), [-3, -3])


@on_ranks(2)
@only_on("torch")
def test_the_guide() -> None:
    (block,) = (block for block in python_blocks("docs/slow_machines.md") if "model.compile" in block)
    x, y = (array[0, hvd.rank()] for array in data())
    given = {"keras": keras, "model": mlp(), "x": x, "y": y}
    exec(block, given)
    assert hvd.allgather_object(given["results"])[hvd.rank()] == given["results"]
