"""What programs do besides training alone: shapes that are not known, XLA, files, input pipelines, strategies."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovodish.tensorflow as hvd
from support.expect import the_engine_goes_on
from support.on_ranks import on_ranks
from support.tensorflow_tensors import EAGER, GRAPH, called

SMALL_BUCKETS = {"HOROVODISH_FUSION_THRESHOLD_MB": "0.001"}


@on_ranks(2, env=SMALL_BUCKETS)
@pytest.mark.parametrize("way", [EAGER, GRAPH])
def test_gradients_that_are_not_finite_or_not_there(way: str) -> None:
    """Rank 0 has a NaN; others have its place in the bucket right beside it. One tensor is empty, one has no shape."""
    first, empty, scalar = tf.Variable([1.0, 1.0]), tf.Variable(tf.zeros([0, 3])), tf.Variable(2.0)
    slopes = tf.constant([float("nan") if hvd.rank() == 0 else 1.0, 1.0])

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(slopes * first) + tf.reduce_sum(empty) + 3.0 * scalar
        return hvd.DistributedGradientTape(tape).gradient(loss, [first, empty, scalar])

    of_first, of_empty, of_scalar = called(step, way)()
    assert np.array_equal(of_first, [float("nan"), 1.0], equal_nan=True)
    assert (of_empty.shape, of_scalar.shape, float(of_scalar)) == ((0, 3), (), 3.0)


@on_ranks(2, env=SMALL_BUCKETS)
def test_shapes_that_are_not_known() -> None:
    @tf.function(input_signature=[tf.TensorSpec(None), tf.TensorSpec([None, None])])
    def step(anything: tf.Tensor, matrix: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([anything, matrix])
            loss = tf.reduce_sum(anything**2) + tf.reduce_sum(matrix**2)
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, [anything, matrix])
        moved = [hvd.allgather(matrix), hvd.broadcast(anything, 0), hvd.alltoall(matrix), hvd.reducescatter(matrix)]
        return gradients, moved

    for rows in (2, 4):
        (of_anything, of_matrix), moved = step(tf.ones([rows]), tf.ones([rows, 3]))
        assert (of_anything.numpy().tolist(), of_matrix.shape) == ([2.0] * rows, (rows, 3))
        assert [each.shape for each in moved] == [(2 * rows, 3), (rows,), (rows, 3), (rows // 2, 3)]


@on_ranks(2, env=SMALL_BUCKETS)
def test_a_shape_that_one_rank_does_not_know() -> None:
    """The buckets are the same on all ranks nevertheless: here each variable is one."""
    variables = [tf.Variable(tf.zeros([300])) for _ in range(3)]

    @tf.custom_gradient
    def forgetting(x: tf.Tensor) -> Any:
        return tf.identity(x), lambda gradient: tf.compat.v1.placeholder_with_default(gradient, None)

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(forgetting(each) if hvd.rank() == 0 else each) for each in variables])
        return hvd.DistributedGradientTape(tape).gradient(loss, variables)

    assert [gradient.numpy().tolist() for gradient in step()] == [[1.0] * 300] * 3
    collectives = [op for op in step.get_concrete_function().graph.get_operations() if op.type == "HorovodishAllreduce"]
    assert len(collectives) == 3


@on_ranks(2, env=SMALL_BUCKETS)
def test_what_is_no_tensor() -> None:
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    sparse = tf.sparse.from_dense([1.0, 0.0])
    with pytest.raises(hvd.UnsupportedTensorError, match="x: a SparseTensor cannot travel as a whole; pass its values"):
        hvd.allgather(sparse, name="x")
    reason = "y: a RaggedTensor cannot travel as a whole; pass its flat_values and row_splits, or make it dense"
    kind = hvd.UnsupportedTensorError if hvd.rank() == 0 else hvd.MismatchError
    with pytest.raises(kind, match=reason):
        hvd.allreduce(ragged if hvd.rank() == 0 else tf.ones(3), name="y")
    the_engine_goes_on("y")


class Model(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec([None])])
    def total(self, x: tf.Tensor) -> Any:
        return hvd.allreduce(x, op=hvd.Sum), hvd.size_op()


@on_ranks(2, env=SMALL_BUCKETS)
def test_a_saved_function_reduces_again(tmp_path: Path) -> None:
    """It has its gradient, too."""
    folder = tmp_path / str(hvd.rank())
    tf.saved_model.save(Model(), str(folder))
    loaded: Any = tf.saved_model.load(str(folder))
    x = tf.constant([1.0, 2.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        total, size = loaded.total(x)
    assert (total.numpy().tolist(), int(size)) == ([2.0, 4.0], 2)
    assert tape.gradient(total, x).numpy().tolist() == [2.0, 2.0]


@on_ranks(2, env=SMALL_BUCKETS)
def test_input_pipelines() -> None:
    own = tf.data.Dataset.range(4).map(lambda number: hvd.allreduce(number + hvd.rank(), op=hvd.Sum))
    assert [int(number) for number in own.prefetch(2)] == [1, 3, 5, 7]


@on_ranks(2, env=SMALL_BUCKETS)
def test_strategies() -> None:
    """Within a strategy over devices of this process, the ranks reduce what each replica has."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        variable = tf.Variable(float(hvd.rank() + 1))
        hvd.broadcast_variables([variable], root_rank=1)

    def replica() -> Any:
        with tf.GradientTape() as tape:
            loss = (hvd.rank() + 1.0) * variable
        return hvd.DistributedGradientTape(tape).gradient(loss, [variable])

    (gradient,) = tf.function(lambda: strategy.run(replica))()
    assert (variable.numpy(), gradient.numpy()) == (2.0, 1.5)


def test_a_saved_function_needs_the_import_and_init(tmp_path: Path) -> None:
    code = f"""
import tensorflow as tf

def refused(call):
    try:
        call()
    except Exception as error:
        return str(error)

print(refused(lambda: tf.saved_model.load({str(tmp_path)!r})))
import horovodish.tensorflow as hvd
loaded = tf.saved_model.load({str(tmp_path)!r})
print(refused(lambda: loaded.total(tf.ones(2))))
hvd.init()
print(loaded.total(tf.ones(2)))
"""
    tf.saved_model.save(Model(), str(tmp_path))
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    told = ("Op type not registered 'HorovodishAllreduce'", "EngineStoppedError: .* call init.. first", r"\[1., 1.\]")
    for expected in told:
        assert re.search(expected, finished.stdout), finished.stdout + finished.stderr
