"""What only functions can do: many operations under way, retracing, loops, gradients; and the way without callbacks."""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovodish.tensorflow as hvd
from horovodish.tensorflow import library
from support.documents import python_blocks
from support.on_ranks import on_ranks
from support.tensorflow_tensors import EAGER, GRAPH, called


@pytest.mark.soak
@on_ranks(3)
def test_five_hundred_under_way_in_three_orders() -> None:
    many_under_way(500)


@on_ranks(2)
def test_many_under_way_without_callbacks() -> None:
    with callbacks(kept=False):
        many_under_way(25)


def many_under_way(count: int) -> None:
    """Every rank starts them in another order, and has two threads to run them."""
    order = list(range(count))
    random.Random(hvd.rank()).shuffle(order)

    @tf.function
    def all_of_them(x: tf.Tensor) -> list[tf.Tensor]:
        results = {index: hvd.allreduce(x * float(index), op=hvd.Sum, name=f"{count}.{index}") for index in order}
        return [results[index] for index in range(count)]

    for _ in range(2):
        for index, result in enumerate(all_of_them(tf.ones([3]))):
            assert np.array_equal(result, np.full(3, float(index * hvd.size())))


@contextlib.contextmanager
def callbacks(kept: bool) -> Iterator[None]:
    """Whether kernels keep TensorFlow's callbacks."""
    with pytest.MonkeyPatch.context() as patch:
        if not kept:
            patch.setattr(library, "keeps_callbacks", lambda: False)
        yield


@on_ranks(2)
def test_retracing_on_one_rank() -> None:
    @tf.function
    def step(x: tf.Tensor, flag: int) -> tf.Tensor:
        return hvd.allreduce(x, op=hvd.Sum) + hvd.allreduce(2.0 * x, op=hvd.Sum) + flag

    for round_number in range(4):
        flag = round_number if hvd.rank() == 0 else 0  # a Python value: rank 0 traces every time
        assert step(tf.ones(()), flag).numpy() == 3.0 * hvd.size() + flag
    assert step.experimental_get_tracing_count() == (4 if hvd.rank() == 0 else 1)


@on_ranks(2)
@pytest.mark.parametrize("kept", [True, False], ids=["callbacks", "no callbacks"])
def test_loops_and_branches(kept: bool) -> None:
    @tf.function
    def looped(x: tf.Tensor) -> tf.Tensor:
        total = tf.zeros(())
        for index in tf.range(40):  # all under one name, so no iteration may begin before the one before is done
            total += hvd.allreduce(x + tf.cast(index, tf.float32), op=hvd.Sum)
        if total > 0:
            total += hvd.allreduce(x, op=hvd.Sum)
        return total

    own = float(hvd.rank())
    ranks = sum(range(hvd.size()))
    with callbacks(kept):
        assert looped(tf.constant(own)).numpy() == sum(ranks + index * hvd.size() for index in range(40)) + ranks


@on_ranks(2)
def test_functions_in_functions() -> None:
    inner = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))
    outer = tf.function(lambda x: inner(x) - inner(3.0 * x))
    assert outer(tf.ones(())).numpy() == -2.0 * hvd.size()


@on_ranks(2)
def test_the_guide() -> None:
    """The code of the guide runs as it stands, and XLA's part trains as the first one does."""
    weights = []
    inputs = tf.constant(np.random.default_rng(hvd.rank()).normal(size=(4, 8, 3)), tf.float32)
    batches = [(batch, tf.reduce_sum(batch, 1, keepdims=True)) for batch in inputs]
    first, *_, compiled = python_blocks("docs/tensorflow.md")
    for code in (first, first.split("for inputs")[0] + compiled + "for pair in batches:\n    compiled_step(*pair)"):
        variables = [tf.Variable(tf.fill([3, 1], 0.1 + hvd.rank())), tf.Variable([0.0])]
        exec(
            code,
            {
                "batches": batches,
                "loss_of": lambda labels, found: tf.reduce_mean((labels - found) ** 2),
                "network": lambda x, by=variables: x @ by[0] + by[1],
                "variables": variables,
            },
        )
        weights.append(np.concatenate([variable.numpy().flatten() for variable in variables]))
    np.testing.assert_allclose(weights[0], weights[1], rtol=1e-5)
    assert np.array_equal(*hvd.allgather_object(weights[0])[:2])


@on_ranks(2)
@pytest.mark.parametrize("way", [EAGER, GRAPH])
@pytest.mark.parametrize("kept", [True, False], ids=["callbacks", "no callbacks"])
def test_gradients(way: str, kept: bool) -> None:
    """Against what the sum of the losses of all ranks gives, computed in one go."""
    size, own = hvd.size(), hvd.rank()
    rows = size + 1
    everything = np.random.default_rng(5).normal(size=(size, rows, 2)).astype(np.float32)
    weights = np.random.default_rng(6).normal(size=(size, 64, 2)).astype(np.float32)

    def loss(results: list[tf.Tensor], rank: int) -> tf.Tensor:
        return tf.add_n([tf.reduce_sum(result**2 * weights[rank, : result.shape[0]]) for result in results])

    def ours(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            number = tf.constant(3)
            results = [
                *hvd.grouped_allreduce([x, tf.cast(number, x.dtype) * x, number], prescale_factor=0.5)[:2],
                hvd.grouped_allgather([number, x[: own + 1]])[1],
                hvd.broadcast(x, size - 1),
                hvd.alltoall(x[:size]) if way == GRAPH else hvd.alltoall(x, splits(own))[0],
                hvd.reducescatter(x, op=hvd.Average, postscale_factor=3.0),
            ]
            results = [tf.ensure_shape(r, known) for r, known in zip(results, shapes(own), strict=True)]
            total = loss(results, own)
        return tape.gradient(total, x)

    def splits(rank: int) -> list[int]:
        return [2 if to == (rank + 1) % size else 1 for to in range(size)]

    def dealt(rank: int) -> slice:
        return slice(rank + min(rank, 1), rank + 1 + min(rank, 1) + (rank == 0))

    def shapes(rank: int) -> list[list[int]]:
        came = size if way == GRAPH else size + 1
        return [[rows, 2], [rows, 2], [sum(range(1, size + 1)), 2], [rows, 2], [came, 2], [1 + (rank == 0), 2]]

    with tf.GradientTape() as tape:
        all_x = tf.constant(everything)
        tape.watch(all_x)
        mean = tf.reduce_mean(all_x, 0)
        total = tf.zeros(())
        for rank in range(size):
            counts = [[1] * size if way == GRAPH else splits(sender) for sender in range(size)]
            begins = [sum(counts[sender][:rank]) for sender in range(size)]
            sent = [all_x[s, begins[s] : begins[s] + counts[s][rank]] for s in range(size)]
            total += loss(
                [
                    0.5 * mean,
                    1.5 * mean,
                    tf.concat([all_x[sender, : sender + 1] for sender in range(size)], 0),
                    all_x[size - 1],
                    tf.concat(sent, 0),
                    3.0 * mean[dealt(rank)],
                ],
                rank,
            )
    expected = tape.gradient(total, all_x)
    with callbacks(kept):
        result = called(ours, way)(tf.constant(everything[own]))
    np.testing.assert_allclose(result, expected[own], rtol=1e-4, atol=1e-4)


@on_ranks(2)
def test_second_gradients() -> None:
    @tf.function
    def second(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = hvd.allreduce(x, op=hvd.Sum) ** 3
            first = inner.gradient(y, x)
        return outer.gradient(first, x)

    # All ranks: d/dx_i of (sum over j of 3 s^2) for each of n outputs; the ranks' gradients add up.
    size = hvd.size()
    np.testing.assert_allclose(second(tf.ones(())), 6.0 * size * size * size, rtol=1e-5)


@on_ranks(2)
def test_several_gradients_of_one_operation() -> None:
    @tf.function
    def both(x: tf.Tensor) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = hvd.allreduce(x, op=hvd.Sum)
        return tape.gradient(y, x), tape.gradient(y, x)

    assert [float(gradient) for gradient in both(tf.ones(()))] == [hvd.size()] * 2


@on_ranks(2)
def test_errors_without_callbacks() -> None:
    with callbacks(kept=False):
        with pytest.raises(hvd.MismatchError, match="'eager'"):
            hvd.allreduce(tf.ones([2 + hvd.rank()]), name="eager")
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"MismatchError: .*'graph'"):
            tf.function(lambda x: hvd.allreduce(x, name="graph"))(tf.ones([2 + hvd.rank()]))


def test_a_callback_that_is_no_std_function_is_seen() -> None:
    looks_like_one = ctypes.CDLL(library._path()).horovodish_looks_like_a_callback
    looks_like_one.argtypes = [ctypes.c_void_p]
    data = (ctypes.c_size_t * 4)()
    code = ctypes.cast(looks_like_one, ctypes.c_void_p).value
    assert code is not None
    other = ctypes.cast(ctypes.pythonapi.Py_IncRef, ctypes.c_void_p).value
    for words, expected in (
        ([1, 2, code, code], 1),
        ([code, code, 1, 2], 0),  # as libc++ has it: a table of functions first
        ([0, 0, code, 0], 0),
        ([0, 0, code, other], 0),
        ([0, 0, ctypes.addressof(data), ctypes.addressof(data)], 0),
    ):
        data[:] = words
        assert looks_like_one(data) == expected, words
