"""Tapes and optimizers: N ranks train to what one process makes of the joined batch; and what else they promise."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovodish.tensorflow as hvd
from horovodish.collectives.consistency import FIRST_APART
from horovodish.errors import MismatchError
from horovodish.gradients import parameters
from support.autotuned import autotune_warnings, run_with_autotune
from support.expect import one_rank_is_wrong
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from support.tensorflow_tensors import EAGER, GRAPH, XLA, called

STEPS, RATE = 4, 0.2
_random = np.random.default_rng(0)
INPUTS = _random.integers(0, 12, (12, 3))
TARGETS = _random.normal(size=(12, 1)).astype(np.float32)


class Model:
    """An embedding and two layers: 37 float32 weights, some of which no batch needs."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        shapes = {"table": (12, 2), "kernel": (6, 4), "bias": (4,), "last": (4, 1), "unused": (2,)}
        self.variables = [tf.Variable(random.normal(size=s), dtype=tf.float32, name=n) for n, s in shapes.items()]

    def loss(self, inputs: Any, targets: Any) -> tf.Tensor:
        table, kernel, bias, last, _ = self.variables
        rows = tf.reshape(tf.gather(table, inputs), [-1, 6])
        return tf.reduce_mean((tf.tanh(rows @ kernel + bias) @ last - targets) ** 2)

    def apply(self, gradients: list[Any]) -> None:
        assert gradients[-1] is None
        for variable, gradient in zip(self.variables, gradients[:-1], strict=False):
            variable.assign_sub(RATE * tf.convert_to_tensor(gradient))

    def weights(self) -> list[Any]:
        return [variable.numpy() for variable in self.variables]


def own_part() -> tuple[Any, Any]:
    return tf.constant(INPUTS[hvd.rank() :: hvd.size()]), tf.constant(TARGETS[hvd.rank() :: hvd.size()])


def alone() -> list[Any]:
    model = Model(0)
    for _ in range(STEPS):
        with tf.GradientTape() as tape:
            loss = model.loss(INPUTS, TARGETS)
        model.apply(tape.gradient(loss, model.variables))
    return model.weights()


def same(weights: list[Any], expected: list[Any]) -> None:
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("way", [EAGER, GRAPH, XLA])
def test_tapes_train_as_one_process(way: str) -> None:
    options: list[dict[str, Any]] = [{}, {"sparse_as_dense": True, "groups": 2}, {"gradient_predivide_factor": 4.0}]
    for number, chosen in enumerate(options):
        model = Model(hvd.rank())
        hvd.broadcast_variables(model.variables, root_rank=0, inplace=bool(number))

        def step(inputs: Any, targets: Any, model: Model = model, chosen: dict[str, Any] = chosen) -> None:
            with tf.GradientTape() as tape:
                loss = model.loss(inputs, targets)
            model.apply(hvd.DistributedGradientTape(tape, **chosen).gradient(loss, model.variables))

        function = called(step, way)
        for _ in range(STEPS):
            function(*own_part())
        same(model.weights(), alone())


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("way", [EAGER, GRAPH, XLA])
def test_optimizers_train_as_one_process(way: str) -> None:
    model = Model(0)
    optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(RATE))

    def step(inputs: Any, targets: Any) -> None:
        optimizer.minimize(lambda: model.loss(inputs, targets), var_list=model.variables[:-1])

    function = called(step, way)
    for _ in range(STEPS):
        function(*own_part())
    same(model.weights(), alone())


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("way", [EAGER, GRAPH, XLA])
def test_batch_normalization_is_that_of_the_joined_batch(way: str) -> None:
    random = np.random.default_rng(2)
    shift, everything = 1000.0, random.normal(size=(4 * hvd.size(), 3, 5)).astype(np.float32)
    weights = random.normal(size=everything.shape).astype(np.float32)
    mask = random.integers(0, 2, everything.shape[:2]).astype(bool)
    whole, shared = tf.keras.layers.BatchNormalization(), hvd.SyncBatchNormalization()
    for layer in (whole, shared):
        layer.build((None, 3, 5))

    def trained(layer: Any, x: tf.Tensor, w: tf.Tensor, m: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(layer(x + shift, training=True, mask=m) * w)
        return tape.gradient(loss, [x, layer.gamma.value])

    # The first rank has more samples than the others, and the last one may have none.
    begin = 0 if hvd.rank() == 0 else min(3 * hvd.rank() + 3, len(everything))
    end = 6 if hvd.rank() == 0 else min(begin + 3, len(everything))
    end = len(everything) if hvd.rank() == hvd.size() - 1 else end
    for masked in (None, mask):
        of_all = trained(whole, *map(tf.constant, (everything, weights)), masked)
        part = slice(begin, end)
        arguments = (everything[part], weights[part])
        own_mask = None if masked is None else tf.constant(masked[part])
        function = called(lambda x, w, m: trained(shared, x, w, m), way)
        of_part = function(*map(tf.constant, arguments), own_mask)
        if masked is None:  # with a mask, Keras adds its epsilon to the number of samples
            np.testing.assert_allclose(of_part[0], of_all[0][part], rtol=2e-3, atol=2e-3)
            total = hvd.allreduce(of_part[1], op=hvd.Sum, name="gamma")
            np.testing.assert_allclose(total, of_all[1], rtol=2e-3, atol=2e-3)
            np.testing.assert_allclose(shared.moving_mean, whole.moving_mean, rtol=1e-5)
            np.testing.assert_allclose(shared.moving_variance, whole.moving_variance, rtol=1e-3)
    assert np.all(np.isfinite(shared.moving_variance))
    np.testing.assert_allclose(shared.moving_mean, whole.moving_mean, rtol=1e-4)
    settings = shared.get_config()
    assert settings["momentum"] == 0.99 and type(shared).from_config(settings).process_set is hvd.global_process_set


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("way", [EAGER, GRAPH, XLA])
def test_local_sources(way: str) -> None:
    class Layer(tf.Module):
        def __init__(self) -> None:
            self.own = tf.Variable(2.0)

    layer, common = Layer(), tf.Variable(2.0)

    def step(scale: bool) -> Any:
        with tf.GradientTape() as tape:
            loss = (hvd.rank() + 1.0) * layer.own * common
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer, scale_local_gradients=scale)
        return tape.gradient(loss, {"own": layer.own, "common": [common]})

    for scale in (True, False):
        gradients = called(lambda scale=scale: step(scale), way)()
        own = 2.0 * (hvd.rank() + 1)
        assert np.isclose(gradients["own"], own / hvd.size() if scale else own)
        assert np.isclose(gradients["common"][0], hvd.size() + 1.0)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("way", [EAGER, GRAPH, XLA])
def test_data_that_ends_unevenly(way: str) -> None:
    """Rank 0 has one batch more; an average over the ranks that have not joined is rank 0's own gradient."""
    table = tf.Variable(tf.zeros([3, 2]))
    bias = tf.Variable(0.0)

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [0])) + (hvd.rank() + 1.0) * bias
        return hvd.DistributedGradientTape(tape, sparse_as_dense=way == XLA).gradient(loss, [table, bias])

    function = called(step, way)
    for _ in range(2 + (hvd.rank() == 0)):
        rows, of_bias = function()
    join = tf.function(hvd.join) if way == GRAPH else hvd.join  # which XLA cannot compile
    assert join() == 0
    assert tf.convert_to_tensor(rows).numpy().tolist() == [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    assert float(of_bias) == (1.0 if hvd.rank() == 0 else (hvd.size() + 1) / 2)


@on_ranks(1, 2, 3)
def test_gradients_of_some_ranks() -> None:
    """Only rank 0 has a gradient of the first variable. Of the second, rank 0 has slices and the others a dense one."""
    first, second, third = tf.Variable([1.0, 2.0]), tf.Variable(tf.ones([4, 2])), tf.Variable(5.0)
    with tf.GradientTape(persistent=True) as tape:
        if hvd.rank() == 0:
            loss = tf.reduce_sum(first) + tf.reduce_sum(tf.gather(second, [3]))
        else:
            loss = tf.reduce_sum(second)
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, [first, second, third])
    share = 1.0 / hvd.size()
    assert np.allclose(gradients[0], [share, share])
    expected = np.full([4, 2], 1.0 - share)
    expected[3] = 1.0
    np.testing.assert_allclose(tf.convert_to_tensor(gradients[1]), expected, rtol=1e-6)
    assert gradients[2] is None
    assert np.allclose(tape.gradient(loss, first), [share, share])


@on_ranks(2)
def test_layouts_that_change_between_eager_steps() -> None:
    """Rank 0 looks rows up from the fourth step on, and no rank does in the last one."""
    table = tf.Variable(tf.zeros([3, 1]))
    found = []
    for step in range(6):
        with tf.GradientTape() as plain:
            loss = tf.reduce_sum(tf.gather(table, [1])) if hvd.rank() == 0 and step in (2, 3, 4) else tf.constant(0.0)
        found.append(hvd.DistributedGradientTape(plain, op=hvd.Sum).gradient(loss, table))
    # It is dense where no rank knew of it, then sparse, and absent again.
    kinds = [type(gradient).__name__ for gradient in found]
    assert kinds == ["NoneType", "NoneType", "EagerTensor", "IndexedSlices", "IndexedSlices", "NoneType"]
    for gradient in found[2:5]:
        assert tf.convert_to_tensor(gradient).numpy().tolist() == [[0.0], [1.0], [0.0]]


@on_ranks(2)
def test_a_gradient_that_becomes_sparse_is_made_dense() -> None:
    table = tf.Variable(tf.zeros([2, 1]))
    for step in range(5):
        with tf.GradientTape() as plain:
            looks_up = hvd.rank() == 0 and step >= 3
            loss = tf.reduce_sum(tf.gather(table, [1])) if looks_up else tf.reduce_sum(table * 1.0)
        gradient = hvd.DistributedGradientTape(plain, op=hvd.Sum).gradient(loss, table)
        assert gradient.numpy().tolist() == ([[1.0], [2.0]] if step >= 3 else [[2.0], [2.0]])


@on_ranks(2)
def test_second_gradients_when_executing_eagerly() -> None:
    x = tf.Variable(float(hvd.rank() + 1))
    with tf.GradientTape() as outer:
        with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum) as inner:
            cube = x * x * x
        first = inner.gradient(cube, x)
    second = outer.gradient(first, x)
    assert float(first) == 15.0  # 3 * 1 + 3 * 4
    assert float(second) == 2 * 6.0 * (hvd.rank() + 1)  # of the sum of both ranks' results


@on_ranks(1, 2)
def test_predivided_and_compressed_gradients() -> None:
    variable = tf.Variable([1.5, 3.0])
    for options in ({"gradient_predivide_factor": 8.0}, {"compression": hvd.Compression.bf16}, {"op": hvd.Max}):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((hvd.rank() + 1.0) * variable)
        (gradient,) = hvd.DistributedGradientTape(tape, **options).gradient(loss, [variable])
        ranks = [rank + 1.0 for rank in range(hvd.size())]
        assert gradient.dtype == tf.float32
        assert np.allclose(gradient, max(ranks) if "op" in options else np.mean(ranks), rtol=1e-2)


@on_ranks(1, 2, 3)
def test_broadcast_variables() -> None:
    root = hvd.size() - 1
    for inplace in (False, True):
        kept = tf.Variable([0.1, float("nan"), hvd.rank()])
        number = tf.Variable(hvd.rank(), dtype=tf.int64)
        hvd.broadcast_variables([kept, None, number], root_rank=root, inplace=inplace)
        assert kept.numpy().tobytes() == np.array([0.1, float("nan"), root], np.float32).tobytes()
        assert number.numpy() == root
    assert hvd.broadcast_([number], 0)[0] is number
    tf.function(lambda: hvd.broadcast_variables([kept, number], root_rank=0))()
    with pytest.raises(ValueError, match="root_rank=99 does not exist"):
        hvd.broadcast_variables([kept], root_rank=99)


@on_ranks(2, 3)
def test_broadcast_variables_that_differ() -> None:
    kept, number = tf.Variable(0.5), tf.Variable(1, dtype=tf.int64)
    differing = [kept] if hvd.rank() == 0 else [kept, number]
    with pytest.raises(MismatchError, match=r"only rank 1 has Variable, number 1 of shape \(\) and dtype int64"):
        hvd.broadcast_variables(differing, root_rank=0)
    one_rank_is_wrong(
        ValueError,
        "root_rank=99 does not exist",
        lambda: hvd.broadcast_variables([kept], root_rank=0),
        lambda: hvd.broadcast_variables([kept], root_rank=99),
    )


@on_ranks(2)
def test_a_broadcast_of_nothing_and_one_of_arguments_in_the_wrong_order() -> None:
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    with pytest.warns(RuntimeWarning, match="was given no variables. Remedy: build the model") as caught:
        hvd.broadcast_variables(model.variables, root_rank=0)
    assert caught[0].filename == __file__
    with pytest.raises(TypeError, match="takes the variables and then root_rank, not int"):
        hvd.broadcast_variables(0, model.variables)  # type: ignore[arg-type]


@on_ranks(1, 2, 3)
def test_objects() -> None:
    assert hvd.broadcast_object({"rank": hvd.rank()}) == {"rank": 0}
    assert hvd.broadcast_object_fn(root_rank=hvd.size() - 1)(hvd.rank()) == hvd.size() - 1
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
    assert hvd.broadcast_object(hvd.rank(), session=object()) == 0


@on_ranks(1, 2, 3)
def test_what_is_wrapped() -> None:
    wrong: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: hvd.DistributedGradientTape("tape"), TypeError, "wraps a tf.GradientTape, not str"),  # type: ignore
        (lambda: hvd.DistributedOptimizer("sgd"), TypeError, "v1.train.Optimizer, not str"),
        (lambda: tape(op=hvd.Sum, gradient_predivide_factor=2.0), ValueError, "needs op=Average"),
        (lambda: tape(gradient_predivide_factor=0.0), ValueError, "not positive"),
        (lambda: tape(groups=2, num_groups=2), ValueError, "both given"),
        (lambda: tape(groups=-1), ValueError, "not possible"),
        (
            lambda: hvd.DistributedOptimizer(
                tf.compat.v1.train.GradientDescentOptimizer(0.1), backward_passes_per_step=2
            ),
            ValueError,
            "backward_passes_per_step=2 needs a Keras optimizer, .* apply hvd.grouped_allreduce",
        ),
        (lambda: hvd.DistributedGradientTape(tape()), ValueError, "wrapped already"),
        (lambda: hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=3), ValueError, "not int"),
        (lambda: hvd.SyncBatchNormalization(fused=True), ValueError, "has no fused=True; leave it out"),
    ]
    hvd.SyncBatchNormalization(fused=False)
    for call, kind, text in wrong:
        with pytest.raises(kind, match=text):
            call()
    wrapped = tape()
    for refused in (wrapped.jacobian, wrapped.batch_jacobian):
        with pytest.raises(NotImplementedError, match="use a tape that is not wrapped"):
            refused(tf.ones(2), tf.ones(2))
    assert isinstance(wrapped, tf.GradientTape) and type(wrapped).__name__ == "GradientTape"


def tape(**options: Any) -> Any:
    return hvd.DistributedGradientTape(tf.GradientTape(), **options)


def train_with_autotune() -> tuple[list[str], list[str]]:
    with autotune_warnings() as warned:
        hvd.init()
        weights = tf.Variable(tf.ones(3))
        for _ in range(20):
            with tf.GradientTape() as plain:
                loss = tf.reduce_sum(weights)
            hvd.DistributedGradientTape(plain).gradient(loss, weights)
    return warned, []


def train_in_a_function_with_autotune() -> tuple[list[str], list[str]]:
    with autotune_warnings() as warned:
        hvd.init()
        weights = tf.Variable(tf.ones(3))

        @tf.function
        def step() -> Any:
            with tf.GradientTape() as plain:
                loss = tf.reduce_sum(weights)
            return hvd.DistributedGradientTape(plain).gradient(loss, weights)

        for _ in range(20):
            step()
    return warned, []


def test_autotune_tries_settings(tmp_path: Path) -> None:
    run_with_autotune(train_with_autotune, tmp_path).check_search()


def test_autotune_warns_that_it_has_no_effect_on_functions(tmp_path: Path) -> None:
    run_with_autotune(train_in_a_function_with_autotune, tmp_path).check_no_search()


def went_on_apart(when_broadcast: int | None, run: Callable[[Any], Any], parts: bool = False) -> list[str]:
    """What was said while each rank trained a variable that it had made for itself, up to shutdown().

    Args:
        when_broadcast: the step after which it becomes the same on all ranks, -1 for before all.
        run: gets a step, and gives what is called.
        parts: whether the learning rates differ from the second step on.
    """
    hvd.init()
    rate = tf.Variable(0.1)
    variable = tf.Variable(tf.fill([2, 3], 1.0 + hvd.rank()), name="weights")

    def train() -> None:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(variable * variable)
        variable.assign_sub(rate * tape.gradient(loss, variable))

    step = run(train)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(-1, 5):
            if number >= 0:
                step()
            if number == 0 and parts:
                rate.assign(0.1 * (2 + hvd.rank()))
            if number == when_broadcast:  # Horovod's scripts do so after the first step
                hvd.broadcast_variables([variable], root_rank=0)
        hvd.shutdown()
    return [str(each.message) for each in caught if "different parameters" in str(each.message)]


def go_on_apart() -> list[list[str]]:
    ways = [lambda step: step, tf.function, lambda step: tf.function(step, jit_compile=True)]
    return [went_on_apart(when, run) for run in ways for when in (None, -1, 0)]


def test_ranks_that_go_on_with_different_variables_are_warned() -> None:
    first, second = run_ranks(go_on_apart, 2)
    assert [len(said) for said in first] == [1, 0, 0, 1, 0, 0, 0, 0, 0]  # what XLA compiles is not compared
    for (text,) in (first[0], first[3]):
        assert "variable 0 (weights" in text
        assert "hvd.broadcast_variables" in text
    assert second == [[]] * 9


def go_on_apart_with_a_slow_thread() -> list[str]:
    warn_of = parameters.warn_of

    def slow(*arguments: Any) -> None:
        if arguments[6] < FIRST_APART:  # the step
            time.sleep(0.5)
        warn_of(*arguments)

    parameters.warn_of = slow
    try:
        return went_on_apart(None, tf.function)
    finally:
        parameters.warn_of = warn_of


def test_the_first_comparison_warns_whichever_thread_is_first() -> None:
    (text,), nothing = run_ranks(go_on_apart_with_a_slow_thread, 2)
    assert "hvd.broadcast_variables" in text
    assert nothing == []


def part_in_the_second_step() -> list[list[str]]:
    return [went_on_apart(-1, run, parts=True) for run in (lambda step: step, tf.function)]


def test_ranks_that_part_later_are_warned_once() -> None:
    first, second = run_ranks(part_in_the_second_step, 2)
    for (text,) in first:
        assert text.startswith("the ranks train different parameters at step 4: variable 0 (weights"), text
    assert second == [[], []]


def go_on_asynchronously() -> list[str]:
    tf.config.experimental.set_synchronous_execution(False)
    return went_on_apart(None, tf.function)


@pytest.mark.soak
def test_functions_that_run_asynchronously_are_compared() -> None:
    first, second = run_ranks(go_on_asynchronously, 2, fresh=True)
    assert len(first) == 1
    assert second == []
