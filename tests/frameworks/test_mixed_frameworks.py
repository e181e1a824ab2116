"""Three frameworks in one world: an operation is known by its name, and settings are read in init()."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np
import pytest

import horovodish
import horovodish.elastic
from horovodish.elastic import ObjectState
from support.elastic import Scene, run_elastic
from support.ranks import run_ranks

MISMATCH = r"dtype: ranks 0, 2 have float32, rank 1 has float64"


def one_rank_each() -> list[list[float]]:
    horovodish.init()
    return (with_torch, with_tensorflow, with_jax)[horovodish.rank()]()


def with_torch() -> list[list[float]]:
    import torch

    import horovodish.torch as hvd

    results = [
        hvd.allreduce(torch.tensor([1.0, 2.0]), name="x"),
        hvd.allreduce(torch.tensor([1.0, 2.0], dtype=torch.bfloat16), op=hvd.Sum, name="half"),
        hvd.broadcast(torch.tensor([5.0]), 0, name="sent"),
        *hvd.grouped_allreduce([torch.tensor([1.0]), torch.tensor([2.0])], op=hvd.Max, name="group"),
        hvd.reducescatter(torch.tensor([1.0, 2.0, 3.0]), op=hvd.Sum, name="scattered"),
        hvd.allgather(torch.tensor([[1.0, 2.0]]), name="rows"),
    ]
    with pytest.raises(hvd.MismatchError, match=MISMATCH):
        hvd.allreduce(torch.tensor([1.0]), name="different")
    return [result.float().flatten().tolist() for result in results]


def with_tensorflow() -> list[list[float]]:
    import tensorflow as tf

    import horovodish.tensorflow as hvd

    @tf.function
    def all_of_them() -> list[tf.Tensor]:
        return [
            hvd.allreduce(tf.constant([3.0, 4.0]), name="x"),
            hvd.allreduce(tf.constant([3.0, 4.0], tf.bfloat16), op=hvd.Sum, name="half"),
            hvd.broadcast(tf.constant([0.0]), 0, name="sent"),
            *hvd.grouped_allreduce([tf.constant([3.0]), tf.constant([1.0])], op=hvd.Max, name="group"),
            hvd.reducescatter(tf.constant([3.0, 4.0, 5.0]), op=hvd.Sum, name="scattered"),
            hvd.allgather(tf.constant([[3.0, 4.0], [5.0, 6.0]]), name="rows"),
        ]

    results = all_of_them()
    with pytest.raises(hvd.MismatchError, match=MISMATCH):
        hvd.allreduce(tf.constant([1.0], tf.float64), name="different")
    return [tf.cast(tf.reshape(result, [-1]), tf.float32).numpy().tolist() for result in results]


def with_jax() -> list[list[float]]:
    import jax
    from jax import numpy as jnp

    import horovodish.jax as hvd

    @jax.jit
    def all_of_them() -> list[jax.Array]:
        return [
            hvd.allreduce(jnp.array([8.0, 9.0]), name="x"),
            hvd.allreduce(jnp.array([8.0, 9.0], jnp.bfloat16), op=hvd.Sum, name="half"),
            hvd.broadcast(jnp.array([0.0]), 0, name="sent"),
            *hvd.grouped_allreduce([jnp.array([0.0]), jnp.array([7.0])], op=hvd.Max, name="group"),
            hvd.reducescatter(jnp.array([8.0, 9.0, 10.0]), op=hvd.Sum, name="scattered"),
        ]

    results = all_of_them()
    results.append(hvd.allgather(jnp.array([[7.0, 8.0]]), name="rows"))  # within jit, ranks must have equally many
    with pytest.raises(hvd.MismatchError, match=MISMATCH):
        hvd.allreduce(jnp.array([1.0]), name="different")
    return [np.asarray(result, np.float32).flatten().tolist() for result in results]


@pytest.mark.soak
def test_torch_tensorflow_and_jax() -> None:
    results = run_ranks(one_rank_each, 3, fresh=True)
    rows = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    shared = [[4.0, 5.0], [12.0, 15.0], [5.0], [3.0], [7.0]]
    assert results == [[*shared, [own], rows] for own in (12.0, 15.0, 18.0)]


def settings_that_change_after_init() -> None:
    horovodish.init()
    os.environ["HOROVODISH_SPINUS"] = "7"
    if horovodish.rank() == 1:
        os.environ["HOROVODISH_FUSION_THRESHOLD_MB"] = "0"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reduce_two_gradients_in_torch()
        reduce_two_gradients_in_tensorflow()
        in_one_bucket = starts_in_a_jax_program()
    assert [str(warning.message) for warning in caught if "HOROVODISH" in str(warning.message)] == []
    horovodish.shutdown()
    os.environ["HOROVODISH_FUSION_THRESHOLD_MB"] = "0"
    horovodish.init()
    assert (in_one_bucket, starts_in_a_jax_program()) == (1, 2)


def reduce_two_gradients_in_torch() -> None:
    import torch

    import horovodish.torch as hvd

    for op in (hvd.Average, hvd.Adasum):
        model = torch.nn.Linear(4, 2)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=op)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()


def reduce_two_gradients_in_tensorflow() -> None:
    import tensorflow as tf

    import horovodish.tensorflow as hvd

    variables = [tf.Variable([1.0, 2.0]), tf.Variable([3.0])]
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = sum(tf.reduce_sum(variable) for variable in variables)
    tape.gradient(loss, variables)


def starts_in_a_jax_program() -> int:
    import jax

    import horovodish.jax as hvd

    program = jax.jit(lambda tree: hvd.allreduce(tree, name="tree"))
    text: str = program.lower([jax.numpy.ones(3), jax.numpy.ones(2)]).compile().as_text()
    return text.count('custom_call_target="horovodish_start"')


@pytest.mark.soak
def test_settings_are_those_of_init() -> None:
    run_ranks(settings_that_change_after_init, 2)


def train_with_a_framework_each(scene: Scene) -> list[float]:
    """Processes 0 and 3 compute gradients with PyTorch, 1 with JAX, 2 with NumPy. Process 1 dies in a step."""
    weights = np.zeros(3, np.float32)
    state = ObjectState(weights=weights, step=0)
    reduced = (reduced_by_torch, reduced_by_jax, horovodish.allreduce, reduced_by_torch)[scene.me]

    @horovodish.elastic.run
    def train(state: ObjectState) -> None:
        while state.step < 6:
            if scene.me == 1 and state.step == 3 and scene.first_time("dies"):
                scene.die("dies")
            state.weights += reduced(np.full(3, float(state.step), np.float32), name="gradient")
            state.step += 1

    train(state)
    return [*state.weights.tolist(), horovodish.size()]


def reduced_by_torch(values: np.ndarray, name: str) -> np.ndarray:
    import torch

    import horovodish.torch as hvd

    return hvd.allreduce(torch.from_numpy(values), name=name).numpy()


def reduced_by_jax(values: np.ndarray, name: str) -> np.ndarray:
    from jax import numpy as jnp

    import horovodish.jax as hvd

    return np.asarray(hvd.allreduce(jnp.asarray(values), name=name))


@pytest.mark.soak
def test_ranks_of_other_frameworks_go_on_without_one(tmp_path: Path) -> None:
    ended = run_elastic(train_with_a_framework_each, tmp_path, 4, flags=["--min-np", "2"])
    assert ended.status == 0, ended.said
    assert ended.fired == {"dies 1"}
    assert ended.results == [[15.0, 15.0, 15.0, 3]] * 3
