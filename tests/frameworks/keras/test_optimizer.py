"""The optimizer of horovodish.keras: what it reduces, and that ranks train as one process does."""

from __future__ import annotations

import functools
import importlib
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest

import horovodish.keras as hvd
from horovodish.keras import backends
from support.keras_models import BATCH, CLOSE, adam, data, fit, long_on, mlp, only_on, sgd, three_ranks_too
from support.on_ranks import on_ranks

pytestmark = pytest.mark.usefixtures("backend")

Make = Callable[[], Any]


def embeddings() -> Any:
    """Its gradients are sparse where the backend has sparse ones."""
    inputs = keras.Input((6,))
    numbers = keras.ops.cast(keras.ops.floor(keras.ops.abs(inputs) * 4), "int32")
    rows = keras.layers.Embedding(16, 3)(keras.ops.clip(numbers, 0, 15))
    return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Flatten()(rows)))


def moves() -> Any:
    return sgd(nesterov=True, weight_decay=1e-3)


def clips() -> Any:
    return adam(global_clipnorm=0.1, use_ema=True)


def still() -> Any:
    return sgd(momentum=0.0)


def accumulates() -> Any:
    """5 steps an epoch: a window of 2 goes on in the next epoch."""
    return sgd(gradient_accumulation_steps=2)


CASES: dict[str, tuple[Make, Make, Make, dict[str, Any]]] = {
    "SGD": (mlp, moves, moves, {"num_groups": 2, "gradient_predivide_factor": 3.0}),
    "Adam": (mlp, clips, clips, {}),
    "embeddings": (embeddings, sgd, sgd, {}),
    "accumulated by Keras": (mlp, accumulates, accumulates, {}),
    "windows of 2": (
        mlp,
        sgd,
        accumulates,
        {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
    ),
}
"""The model, the optimizers of the ranks and of one process, and options of the wrapper."""


@on_ranks(2)
@long_on("tensorflow")
@pytest.mark.parametrize("case", CASES)
def test_ranks_train_as_one_process(case: str) -> None:
    train_as_one_process(*CASES[case])


@pytest.mark.soak
@on_ranks(2)
@only_on("tensorflow")
def test_sparse_gradients_that_are_made_dense_train_as_one_process() -> None:
    train_as_one_process(embeddings, still, still, {"sparse_as_dense": True})


def train_as_one_process(make_model: Make, make: Make, make_alone: Make, options: dict[str, Any]) -> None:
    # On TensorFlow XLA compiles by default only where there is a GPU, on JAX always.
    for jit_compile in ("auto", True) if keras.config.backend() == "tensorflow" else ("auto",):
        keras.utils.set_random_seed(7)
        expected = fit(make_model(), make_alone(), slice(None), BATCH * hvd.size())
        keras.utils.set_random_seed(7 if hvd.rank() == 0 else 100 + hvd.rank())
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        optimizer = hvd.DistributedOptimizer(make(), **options)
        weights = fit(make_model(), optimizer, hvd.rank(), BATCH, [broadcast], jit_compile)
        for weight, other in zip(weights, expected, strict=True):
            np.testing.assert_allclose(weight, other, **CLOSE, err_msg=f"jit_compile={jit_compile}")
        everyones = hvd.allgather_object(weights)
        assert all(np.array_equal(*pair) for pair in zip(everyones[0], everyones[-1], strict=True))


@pytest.mark.shows("Collectives in compiled programs")
@on_ranks(2)
@only_on("torch")
def test_a_compiled_step_reduces() -> None:
    """Without the compiler of machine code, which takes long: what could pass the reduction by is PyTorch's tracer."""
    import torch

    gradient = torch.tensor([hvd.rank() + 1.0, 4.0 - 3 * hvd.rank()])
    results = []
    for traced in (lambda step: step, functools.partial(torch.compile, backend="eager")):
        variable = keras.Variable(np.zeros(2, "float32"))
        optimizer = hvd.DistributedOptimizer(adam(), backward_passes_per_step=2)
        optimizer.build([variable])

        @traced
        def step(optimizer: Any = optimizer, variable: Any = variable) -> None:
            with torch.no_grad():
                optimizer.apply([gradient], [variable])

        for _ in range(4):
            step()
        assert int(optimizer.iterations) == 2
        results.append(keras.ops.convert_to_numpy(variable).tolist())
    assert results[0] == results[1]


@pytest.mark.soak
@on_ranks(3)
@only_on("jax")
def test_fit_gives_the_same_bits_again() -> None:
    runs = []
    for _ in range(2):
        keras.utils.set_random_seed(hvd.rank())
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        optimizer = hvd.DistributedOptimizer(adam(), num_groups=2)
        runs.append(fit(mlp(), optimizer, hvd.rank(), BATCH, callbacks))
    assert all(np.array_equal(*pair) for pair in zip(*runs, strict=True))


def applied(
    optimizer: Any, gradients: list[Any], times: int = 1, in_jit: bool = True, **options: Any
) -> list[np.ndarray]:
    """The values of variables that were 0, after some steps with gradients; on JAX in compiled ones or not."""
    variables = [keras.Variable(np.zeros(2, "float32"), name=f"v{place}") for place in range(len(gradients))]
    options = {
        key: value(variables) if callable(value) and key == "groups" else value for key, value in options.items()
    }
    wrap = hvd.DistributedOptimizer(optimizer, **options)
    wrap.build(variables)
    tensors = [None if g is None else keras.ops.convert_to_tensor(np.asarray(g, "float32")) for g in gradients]
    for _ in range(times):
        if keras.config.backend() == "jax" and in_jit:
            import jax

            state = [variable.value for variable in wrap.variables], tensors, [v.value for v in variables]
            values = jax.jit(wrap.stateless_apply)(*state)
            for variable, value in zip([*variables, *wrap.variables], [*values[0], *values[1]], strict=True):
                variable.assign(value)
        else:
            wrap.apply_gradients(zip(tensors, variables, strict=True))
    return [keras.ops.convert_to_numpy(variable) for variable in variables]


def plain() -> Any:
    """Moves a variable by the opposite of its gradient."""
    return keras.optimizers.SGD(learning_rate=1.0)


def own_gradient() -> list[float]:
    return [hvd.rank() + 1.0, 4.0 - hvd.rank()]


@on_ranks(2)
def test_ops() -> None:
    expected = {
        hvd.Average: [1.5, 3.5],
        hvd.Sum: [3, 7],
        hvd.Min: [1, 3],
        hvd.Max: [2, 4],
        hvd.Product: [2, 12],
    }
    for op, values in expected.items():
        for result in applied(plain(), [own_gradient()], op=op):
            np.testing.assert_allclose(-result, values, rtol=1e-6, err_msg=op.name)
    orthogonal = applied(plain(), [[1.0, 0.0] if hvd.rank() == 0 else [0.0, 1.0]], op=hvd.Adasum)
    np.testing.assert_allclose(-orthogonal[0], [1, 1], rtol=1e-6)


@on_ranks(2)
def test_groups() -> None:
    by_list = lambda variables: [variables[1:], variables[:1]]  # noqa: E731
    for options, sizes in (({}, [3]), ({"num_groups": 2}, [1, 2]), ({"groups": by_list}, [2, 1])):
        adapter = backends.gradients()
        with mock.patch.object(adapter, "reduce", wraps=adapter.reduce) as reductions:
            for result in applied(plain(), [own_gradient()] * 3, op=hvd.Sum, **options):
                np.testing.assert_allclose(-result, [3, 7], rtol=1e-6)
        _, buckets, *_ = reductions.call_args.args
        assert [len(bucket.tensors) for bucket in buckets] == sizes


@on_ranks(2)
def test_compression() -> None:
    big = applied(plain(), [[1.0 + 2.0**-12, 1.0]], compression=hvd.Compression.fp16)
    np.testing.assert_array_equal(-big[0], [1, 1])


@on_ranks(2)
def test_a_process_set() -> None:
    first = hvd.add_process_set([0])
    np.testing.assert_array_equal(-applied(plain(), [own_gradient()], process_set=first)[0], own_gradient())


@on_ranks(2)
def test_windows() -> None:
    for in_jit in (True, False):
        window = applied(plain(), [own_gradient()], times=5, in_jit=in_jit, backward_passes_per_step=2)
        np.testing.assert_allclose(-window[0], [6, 14], rtol=1e-6)


@on_ranks(2)
def test_local_variables() -> None:
    optimizer = hvd.DistributedOptimizer(plain())
    shared, local = (keras.Variable(np.zeros(2, "float32"), name=name) for name in ("shared", "local"))
    optimizer.register_local_var(local)
    optimizer.build([shared, local])
    gradient = keras.ops.convert_to_tensor(np.asarray(own_gradient(), "float32"))
    optimizer.apply([gradient, gradient], [shared, local])
    np.testing.assert_allclose(keras.ops.convert_to_numpy(shared), [-1.5, -3.5], rtol=1e-6)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(local), np.divide(own_gradient(), -2), rtol=1e-6)


@on_ranks()
@three_ranks_too
def test_local_layers_are_each_ranks_own() -> None:
    """In one step: those in the list take their rank's gradient over the number of ranks, the other one the average."""
    start = [np.full_like(weight, 0.1) for weight in mlp().get_weights()]
    start = [weight + 0.1 * hvd.rank() if i < 4 else weight for i, weight in enumerate(start)]
    x, y = (array[0, hvd.rank()] for array in data())

    def moved(optimizer: Any, model: Any, callbacks: Any = ()) -> list[np.ndarray]:
        model.set_weights(start)
        model.compile(optimizer, loss="mse")
        model.fit(x, y, batch_size=len(x), verbose=0, callbacks=list(callbacks))
        return [after - before for after, before in zip(model.get_weights(), start, strict=True)]

    alone = moved(plain(), mlp())
    for options, divisor in (({}, hvd.size()), ({"scale_local_gradients": False}, 1)):
        model = mlp()
        optimizer = hvd.PartialDistributedOptimizer(plain(), local_layers=model.layers[1:3], **options)
        result = moved(optimizer, model, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        expected = [own / divisor if i < 4 else hvd.allreduce(own) for i, own in enumerate(alone)]
        for one, other in zip(result, expected, strict=True):
            np.testing.assert_allclose(one, other, **CLOSE)


@on_ranks(2)
def test_local_layers_stay_so_in_mixed_precision() -> None:
    """Also before a callback has moved the reduction to the LossScaleOptimizer that compile() makes."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        keras.utils.set_random_seed(hvd.rank())
        model = mlp()
    finally:
        keras.config.set_dtype_policy("float32")
    model.compile(hvd.PartialDistributedOptimizer(adam(), local_layers=model.layers[1]), loss="mse")
    before = model.get_weights()
    hvd.broadcast_global_variables(0, model)
    everyones = hvd.allgather_object(model.get_weights())
    assert all(np.array_equal(*pair) for pair in zip(before[:2], model.get_weights()[:2], strict=True))
    assert all(np.array_equal(*pair) for pair in zip(everyones[0][2:], everyones[-1][2:], strict=True))


@on_ranks(2)
@only_on("torch", "tensorflow")
def test_absent_gradients() -> None:
    """Weight decay moves every variable that has a gradient, and no other."""
    moves = keras.optimizers.SGD(learning_rate=1.0)
    here = [2.0, 4.0] if hvd.rank() == 0 else None
    result = applied(moves, [[1.0, 1.0], here, None])
    for value, expected in zip(result, [[-1, -1], [-1, -2], [0, 0]], strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-6)
    decays = keras.optimizers.SGD(learning_rate=1.0, weight_decay=0.5)
    variables = [keras.Variable(np.ones(2, "float32"), name=name) for name in ("used", "unused")]
    hvd.DistributedOptimizer(decays).apply([keras.ops.ones(2), None], variables)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(variables[0]), [-0.5, -0.5])
    np.testing.assert_allclose(keras.ops.convert_to_numpy(variables[1]), [1, 1])


@on_ranks(2)
@only_on("tensorflow")
def test_sparse_gradients_become_dense() -> None:
    """They have no maximum otherwise. In windows they become dense always, and local ones are divided."""
    import tensorflow as tf

    rank = hvd.rank()
    slices = tf.IndexedSlices(tf.ones((2, 1)), tf.constant([rank, rank]), tf.constant([3, 1]))
    for options, expected in (
        ({"op": hvd.Max, "sparse_as_dense": True}, [[-2], [-2], [0]]),
        ({}, [[-1], [-1], [0]]),
        ({"backward_passes_per_step": 2}, [[-2], [-2], [0]]),
    ):
        table = keras.Variable(np.zeros((3, 1), "float32"))
        optimizer = hvd.DistributedOptimizer(plain(), **options)
        for _ in range(options.get("backward_passes_per_step", 1)):
            optimizer.apply_gradients([(slices, table)])
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(table), expected)
    optimizer = hvd.DistributedOptimizer(plain())
    optimizer.register_local_var(table)
    optimizer.apply_gradients([(slices, table)])
    assert float(keras.ops.sum(table)) == -4.0 - 1.0


@on_ranks(2)
@only_on("tensorflow")
def test_sparse_gradients_train_as_dense_ones() -> None:
    """Also with an optimizer that squares them, where both ranks have the same row."""
    import tensorflow as tf

    rank = hvd.rank()
    slices = tf.IndexedSlices(tf.fill((2, 1), 2.0 + rank), tf.constant([1, rank]), tf.constant([3, 1]))
    tables = [keras.Variable(np.zeros((3, 1), "float32")) for _ in range(2)]
    for table, sparse_as_dense in zip(tables, (False, True), strict=True):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.1), sparse_as_dense=sparse_as_dense)
        for _ in range(3):
            optimizer.apply_gradients([(slices, table)])
    np.testing.assert_allclose(*map(keras.ops.convert_to_numpy, tables), rtol=1e-6)


@on_ranks(2)
@only_on("tensorflow")
def test_sparse_gradients_of_some_ranks() -> None:
    """The first rank has slices, the last one nothing or a dense gradient."""
    import tensorflow as tf

    slices = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([1]), tf.constant([3, 2]))
    for other, of_other in ((None, 0.0), (tf.ones((3, 2)), 1.0)):
        for sparse_as_dense in (False, True):
            table, weight = keras.Variable(np.zeros((3, 2), "float32")), keras.Variable(np.zeros(2, "float32"))
            optimizer = hvd.DistributedOptimizer(plain(), sparse_as_dense=sparse_as_dense)
            optimizer.apply([slices if hvd.rank() == 0 else other, tf.ones(2)], [table, weight])
            expected = -np.full((3, 2), of_other / 2)
            expected[1] -= 0.5
            np.testing.assert_array_equal(keras.ops.convert_to_numpy(table), expected)
            np.testing.assert_array_equal(keras.ops.convert_to_numpy(weight), [-1, -1])


@on_ranks(2)
def test_windows_lose_no_gradient() -> None:
    """Passes with gradients of other variables are added up when they run one by one, and refused where one is lost."""
    one = keras.ops.ones(2)

    def passes(*calls: Any, traced: bool) -> list[list[float]]:
        """Each call with the gradients of two variables."""
        variables = [keras.Variable(np.zeros(2, "float32"), name=name) for name in ("first", "second")]
        optimizer = hvd.DistributedOptimizer(plain(), backward_passes_per_step=2)
        optimizer.build(variables)
        for gradients in calls:
            step = functools.partial(optimizer.apply, gradients, variables[: len(gradients)])
            if traced:
                importlib.import_module("tensorflow").function(step, autograph=False)()
            else:
                step()
        return [keras.ops.convert_to_numpy(variable).tolist() for variable in variables]

    assert passes([one, None], [None, one], traced=False) == [[-1, -1], [-1, -1]]
    with pytest.raises(ValueError, match="second: some passes have a gradient for it"):
        passes([one, one], [one], traced=False)
    if keras.config.backend() == "tensorflow":
        assert passes([one, one], [one, None], traced=True) == [[-2, -2], [-1, -1]]
        with pytest.raises(ValueError, match="second: some passes have a gradient for it"):
            passes([one, None], [None, one], traced=True)


@on_ranks(2)
def test_loss_scaling_is_agreed_upon() -> None:
    """A gradient that overflows on one rank makes all ranks skip the step and halve the scale; without, all get it."""
    for wrong in (np.inf, np.nan):
        gradient = [wrong, 1.0] if hvd.rank() == hvd.size() - 1 else [1.0, 1.0]
        scaling = keras.optimizers.LossScaleOptimizer(plain(), initial_scale=8.0)
        np.testing.assert_array_equal(applied(scaling, [gradient])[0], [0, 0])
        assert float(scaling.dynamic_scale) == 4.0
        np.testing.assert_array_equal(applied(plain(), [gradient])[0], [-wrong, -1])
    scaling = keras.optimizers.LossScaleOptimizer(plain(), initial_scale=8.0)
    np.testing.assert_array_equal(applied(scaling, [[8.0, 16.0]])[0], [-1, -2])


@on_ranks(2)
def test_mixed_precision_in_fit() -> None:
    """Where compile() puts a LossScaleOptimizer around ours, the callback moves the reduction; else it is an error."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model, optimizer = mlp(), hvd.DistributedOptimizer(sgd())
        fit(model, optimizer, hvd.rank(), BATCH, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        assert model.optimizer.inner_optimizer is optimizer
        everyones = hvd.allgather_object(model.get_weights())
        assert all(np.array_equal(*pair) for pair in zip(everyones[0], everyones[-1], strict=True))
        assert int(optimizer.iterations) > 0

        before, steps = model.get_weights(), int(optimizer.iterations)
        scale = float(model.optimizer.dynamic_scale)
        x, y = (array[0, hvd.rank()] for array in data())
        if hvd.rank() == hvd.size() - 1:
            y[0] = np.nan
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        assert all(np.array_equal(*pair) for pair in zip(model.get_weights(), before, strict=True))
        assert int(optimizer.iterations) == steps
        assert float(model.optimizer.dynamic_scale) == scale / 2
        with pytest.raises(ValueError, match=r"DistributedOptimizer\(keras.optimizers.LossScaleOpt"):
            fit(mlp(), hvd.DistributedOptimizer(keras.optimizers.SGD(1e-6)), hvd.rank(), BATCH)
    finally:
        keras.config.set_dtype_policy("float32")


@on_ranks(2)
def test_a_wrapped_optimizer_is_what_it_was() -> None:
    with pytest.raises(TypeError, match=r"this SGD is one of Keras 2 .*unset TF_USE_LEGACY_KERAS"):
        hvd.DistributedOptimizer(type("SGD", (), {"__module__": "tf_keras.src.optimizers.sgd"})())
    optimizer = adam()
    before = keras.saving.serialize_keras_object(optimizer)
    assert hvd.DistributedOptimizer(optimizer) is optimizer
    assert isinstance(optimizer, keras.optimizers.Adam)
    assert keras.saving.serialize_keras_object(optimizer) == before
    for again in (type(optimizer).from_config(optimizer.get_config()), pickle.loads(pickle.dumps(optimizer))):
        assert type(again) is optimizer.__class__
        assert float(again.learning_rate) == float(optimizer.learning_rate)
