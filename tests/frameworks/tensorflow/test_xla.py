"""Functions that XLA compiles: what differs from others, in their programs, shapes, gradients and failures.

That they compute the same stands in test_operations.py and test_training.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import horovodish.tensorflow as hvd
from horovodish.collectives import devices
from horovodish.collectives.operation import Family, Operation
from horovodish.tensorflow.gradients import GRADIENTS
from horovodish.tensorflow.stablehlo import Member, Typed, module
from support.model import values
from support.on_ranks import on_ranks
from support.pretended_gpu import variables
from support.ranks import run_ranks
from support.tensorflow_tensors import GRAPH, called

SMALL_BUCKETS = {"HOROVODISH_FUSION_THRESHOLD_MB": "0.001"}
FAILED = (tf.errors.InvalidArgumentError, tf.errors.InternalError)


def compiled(function: Any, *signature: tf.TensorSpec) -> Any:
    return tf.function(function, jit_compile=True, input_signature=signature or None)


def text_of(function: Any, *arguments: Any) -> str:
    text: str = function.experimental_get_compiler_ir(*arguments)(stage="optimized_hlo")
    return text


@pytest.mark.shows("Collectives in compiled programs")
@on_ranks(2, 3, env=SMALL_BUCKETS)
def test_calls_in_a_program() -> None:
    """Nothing is dropped or merged, and the buckets of a tape are all begun before the first one is waited for."""

    @compiled
    def twice(x: tf.Tensor) -> tf.Tensor:
        hvd.allreduce(x, name="not used")
        return hvd.allreduce(x, name="one") + hvd.allreduce(x, name="other")

    text = text_of(twice, tf.ones(3))
    counts = {call: text.count(f'custom_call_target="horovodish_{call}"') for call in ("run", "start", "done")}
    assert counts == {"run": 1, "start": 3, "done": 3}

    found: list[bool] = []
    with mock.patch.object(tf.config, "list_physical_devices", return_value=["a GPU"]):
        tf.function(lambda: found.append(GRADIENTS.on_gpu([])), jit_compile=True)()
        tf.function(lambda: found.append(GRADIENTS.on_gpu([])))()
    assert found == [True, False]

    variables = [tf.Variable(tf.ones([300, index + 1])) for index in range(3)]

    @compiled
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = x * tf.add_n([tf.reduce_sum(variable) for variable in variables])
        return hvd.DistributedGradientTape(tape).gradient(loss, variables)

    text = text_of(step, tf.ones(()))
    assert text.count('custom_call_target="horovodish_start"') == 3, "a bucket for each variable"
    dones = [line for line in text.splitlines() if 'custom_call_target="horovodish_done"' in line]
    told = sorted(int(number) for line in dones for number in re.findall(r"= \(s32\[(\d)\]", line))
    assert told == [1, 2, 3], "the first one waits for all three"
    for gradient in step(tf.constant(hvd.rank() + 1.0)):
        assert np.all(gradient == (hvd.size() + 1) / 2)


def everything(x: tf.Tensor) -> list[tf.Tensor]:
    group = hvd.grouped_allreduce([x, tf.reduce_sum(x), tf.cast(x, tf.float64)], prescale_factor=0.5)
    number, gathered = hvd.grouped_allgather([tf.constant(hvd.rank()), x])
    moved = [hvd.broadcast(x, hvd.size() - 1), hvd.alltoall(x), hvd.reducescatter(x, postscale_factor=3.0)]
    return [tf.cast(each, tf.float32) for each in (*group, number, gathered, *moved)]


@on_ranks(2, 3, env=SMALL_BUCKETS)
def test_shapes_that_are_not_known() -> None:
    function = compiled(everything, tf.TensorSpec([None, None]))
    known = called(everything, GRAPH)
    for rows in (hvd.size(), 2 * hvd.size()):
        x = tf.reshape(tf.range(3.0 * rows), [rows, 3]) + hvd.rank()
        for result, expected in zip(function(x), known(x), strict=True):
            np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.soak
@on_ranks(2, 3, env=SMALL_BUCKETS)
def test_gradients() -> None:
    """Compiled gradients equal the gradients of a function that XLA does not compile, also the second ones."""

    def of_everything(x: tf.Tensor) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.add_n([tf.reduce_sum(result**3) for result in everything(x)])
            first = tape.gradient(loss, x)
        return first, outer.gradient(first, x)

    x = tf.random.stateless_normal([hvd.size() + hvd.size(), 2], [hvd.rank(), 1])
    expected = called(of_everything, GRAPH)(x)
    for function in (compiled(of_everything), compiled(of_everything, tf.TensorSpec([None, 2]))):
        for gradient, other in zip(function(x), expected, strict=True):
            np.testing.assert_allclose(gradient, other, rtol=1e-5)


@pytest.mark.soak
@on_ranks(2, 3, env=SMALL_BUCKETS)
def test_a_tape_around_a_compiled_function() -> None:
    variable = tf.Variable([1.0, 2.0])
    function = compiled(lambda x: tf.reduce_sum(hvd.allreduce(variable * x, op=hvd.Sum) ** 2))
    with tf.GradientTape() as tape:
        loss = function(tf.constant(hvd.rank() + 1.0))
    total = sum(rank + 1.0 for rank in range(hvd.size()))
    # Of the sum of all ranks' losses.
    expected = 2 * total * np.array([1.0, 2.0]) * (hvd.rank() + 1.0) * hvd.size()
    np.testing.assert_allclose(tape.gradient(loss, variable), expected)

    x = tf.random.stateless_normal([2 * hvd.size(), 2], [hvd.rank(), 2])
    found = []
    for function in (compiled(everything), compiled(everything, tf.TensorSpec([None, 2])), called(everything, GRAPH)):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.add_n([tf.reduce_sum(result**3) for result in function(x)])
        found.append(tape.gradient(loss, x))
    for gradient in found[:2]:
        np.testing.assert_allclose(gradient, found[2], rtol=1e-5)


@on_ranks(2, 3, env=SMALL_BUCKETS)
def test_functions_in_functions() -> None:
    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(x, op=hvd.Sum)

    @compiled
    def outer(x: tf.Tensor) -> tf.Tensor:
        return inner(x) + 1.0

    @tf.function
    def around(x: tf.Tensor) -> tf.Tensor:
        return outer(x) + hvd.allreduce(x, op=hvd.Sum)

    for _ in range(2):
        assert around(tf.ones(())).numpy() == 2.0 * hvd.size() + 1.0
        assert inner(tf.ones(())).numpy() == hvd.size()  # which was traced for XLA


@on_ranks(2, 3, env=SMALL_BUCKETS)
def test_loops_and_branches() -> None:
    @compiled
    def looped(x: tf.Tensor, flag: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(10):
            x = hvd.allreduce(x, op=hvd.Sum) * 0.5
        if flag:
            x += hvd.allreduce(x, op=hvd.Sum)
        return x

    expected = (hvd.size() / 2) ** 10
    assert looped(tf.ones(()), tf.constant(False)).numpy() == expected
    assert looped(tf.ones(()), tf.constant(True)).numpy() == expected * (1 + hvd.size())


class Model(tf.Module):
    @tf.function(jit_compile=True, input_signature=[tf.TensorSpec([None])])
    def total(self, x: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(x, op=hvd.Sum)


@on_ranks(2, 3, env=SMALL_BUCKETS)
def test_a_saved_function_reduces_again(tmp_path: Path) -> None:
    folder = tmp_path / str(hvd.rank())
    tf.saved_model.save(Model(), str(folder))
    loaded: Any = tf.saved_model.load(str(folder))
    assert loaded.total(tf.constant([1.0, 2.0])).numpy().tolist() == [hvd.size(), 2.0 * hvd.size()]


@on_ranks(2, 3, env=SMALL_BUCKETS)
def test_what_cannot_be_compiled() -> None:
    calls = {
        "alltoall with splits": lambda: hvd.alltoall(tf.ones(hvd.size()), [1] * hvd.size()),
        "barrier": hvd.barrier,
        "join": hvd.join,
        "rank_op": hvd.rank_op,
    }
    for what, call in calls.items():
        with pytest.raises(NotImplementedError, match=f"XLA cannot compile horovodish's {what}: leave out jit_compile"):
            compiled(call)()
    with pytest.raises(ValueError, match=r"flat: XLA needs the number of dimensions.*tf\.ensure_shape"):
        compiled(lambda x: hvd.allreduce(x, name="flat"), tf.TensorSpec(None))(tf.ones(3))
    with pytest.raises(ValueError, match=f"{hvd.size() + 1} rows cannot be divided evenly by {hvd.size()} ranks"):
        compiled(hvd.alltoall)(tf.ones(hvd.size() + 1))
    with pytest.raises(FAILED, match=f"{hvd.size() + 1} rows cannot be divided evenly by {hvd.size()} ranks"):
        compiled(hvd.alltoall, tf.TensorSpec([None]))(tf.ones(hvd.size() + 1))


@on_ranks(2, 3, env=SMALL_BUCKETS)
def test_rows_that_differ() -> None:
    with pytest.raises(
        FAILED, match=r"allgather 'rows': the ranks gave .* Remedy: call a collective whose rows differ by rank"
    ):
        compiled(lambda x: hvd.allgather(x, name="rows"))(tf.ones(1 + min(hvd.rank(), 1)))


@on_ranks(2, 3, env=SMALL_BUCKETS)
def test_going_on_after_a_mismatch() -> None:
    """What one rank had begun and another had not is not taken for what comes next."""
    variables = [tf.Variable(tf.zeros([300])) for _ in range(4)]

    @compiled
    def step(x: tf.Tensor, wrong: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = x * tf.add_n([tf.reduce_sum(variable) for variable in variables])
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, variables)
        return gradients, hvd.allreduce(wrong, op=hvd.Sum, name="wrong"), hvd.allreduce(x, name="x")

    for attempt in range(6):
        x = tf.constant(float(attempt + hvd.rank()))
        with pytest.raises(FAILED, match=r"'wrong'.*rank 0 has \(2,\), ranks? 1"):
            step(x, tf.ones(2 + min(hvd.rank(), 1)))
        gradients, _, mean = step(x, tf.ones(2))
        expected = attempt + (hvd.size() - 1) / 2
        assert float(mean) == expected
        assert all(np.all(gradient == expected) for gradient in gradients)


@on_ranks(2, 3, env=SMALL_BUCKETS)
def test_another_world() -> None:
    function = compiled(lambda x: hvd.allreduce(x, op=hvd.Sum))
    assert function(tf.ones(())).numpy() == hvd.size()
    hvd.shutdown()
    with pytest.raises(FAILED, match=r"call init\(\) first"):
        function(tf.ones(()))
    hvd.init()
    assert function(tf.ones(())).numpy() == hvd.size()


SAVES = """
import sys
import tensorflow as tf
import horovodish.tensorflow as hvd

hvd.init()
model = tf.Module()
doubled = lambda x: hvd.allreduce(2.0 * x)
model.doubled = tf.function(doubled, jit_compile=True, input_signature=[tf.TensorSpec([None])])
tf.saved_model.save(model, sys.argv[1])
"""
LOADS = """
import sys
import tensorflow as tf
import horovodish.tensorflow as hvd

hvd.init()
doubled = tf.saved_model.load(sys.argv[1]).doubled
x = tf.constant([2.0, 3.0])
with tf.GradientTape() as tape:
    tape.watch(x)
    total = doubled(x)
print(total.numpy().tolist(), tape.gradient(total, x).numpy().tolist())
"""


@pytest.mark.soak
def test_a_file_in_another_process(tmp_path: Path) -> None:
    for code in (SAVES, LOADS):
        command = [sys.executable, "-c", code, str(tmp_path)]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip() == "[4.0, 6.0] [2.0, 2.0]"


def typed(operation: Operation, *members: Member) -> Typed:
    names = [f"{operation.name}[{index}]" for index in range(len(members))]
    return Typed(operation._replace(family=Family("step", 0, 0), member_names=names), members)


def calls_on_pretended_gpus() -> None:
    """What a module does where XLA compiles it for a CUDA device."""
    from support.xla_on_gpu import Gpu

    hvd.init()
    assert devices.problem() == ""  # as is looked at when a function is traced, where TensorFlow has GPUs
    gpu = Gpu(hvd.local_rank())
    rank, size = hvd.rank(), hvd.size()
    given = [values("float32", (2 * size, 3), r) for r in range(size)]
    member = Member((2 * size, 3), "float32")
    moved = [
        typed(Operation(kind, f'a "{kind}"', root_rank=size - 1), member)
        for kind in ("allgather", "broadcast", "alltoall", "reducescatter")
    ]
    average = Operation("allreduce", "group", op=hvd.Average, prescale_factor=0.5, postscale_factor=3.0)
    group = typed(average, member, Member((), "float64"))
    scalar = np.array(rank + 1.0)
    text = module([*moved, group])
    gathered, sent, received, dealt, mean, of_scalar = gpu.run_text(text, [given[rank]] * 5 + [scalar])
    gpu.stream.wait()
    np.testing.assert_array_equal(gathered, np.concatenate(given))
    np.testing.assert_array_equal(sent, given[size - 1])
    np.testing.assert_array_equal(received, np.concatenate([each[2 * rank : 2 * rank + 2] for each in given]))
    np.testing.assert_allclose(dealt, sum(given)[2 * rank : 2 * rank + 2], rtol=1e-5)
    np.testing.assert_allclose(mean, 1.5 * np.mean(given, 0), rtol=1e-5)
    np.testing.assert_allclose(of_scalar, 1.5 * (size + 1) / 2)


@pytest.mark.soak
def test_calls_on_pretended_gpus() -> None:
    run_ranks(calls_on_pretended_gpus, 2, env={**variables(2), "JAX_PLATFORMS": "cpu"})
