"""`backward_passes_per_step` where passes do not come in whole windows: at the end of an epoch, or on some ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovodish.tensorflow as hvd
from support.on_ranks import on_ranks
from support.tensorflow_tensors import EAGER, GRAPH, XLA, called


def descent(passes: int, average: bool = False) -> Any:
    optimizer = tf.compat.v1.train.MomentumOptimizer(1.0, momentum=0.0)
    return hvd.DistributedOptimizer(optimizer, backward_passes_per_step=passes, average_aggregated_gradients=average)


def stepping(way: str, optimizer: Any, variable: tf.Variable) -> Callable[[tf.Tensor], None]:
    def step(slope: tf.Tensor) -> None:
        optimizer.minimize(lambda: slope * variable, var_list=[variable])

    return called(step, way)


@on_ranks(2)
@pytest.mark.parametrize("way", [EAGER, GRAPH, XLA])
def test_a_window_goes_on_in_the_next_epoch(way: str) -> None:
    """Epochs of four passes, windows of three: what changes the variable is the mean of whole windows."""
    variable = tf.Variable(0.0)
    step = stepping(way, descent(3, average=True), variable)
    expected, open_window = 0.0, []
    for epoch in range(3):
        for batch in range(4):
            slope = float(10 * epoch + batch)
            step(tf.constant(slope * (hvd.rank() + 1)))
            open_window.append(slope * (hvd.size() + 1) / 2)  # the mean over the ranks
            if len(open_window) == 3:
                expected -= sum(open_window) / 3
                open_window = []
            np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-6)
    assert not open_window


@on_ranks(2)
@pytest.mark.parametrize("way", [EAGER, GRAPH, XLA])
def test_ranks_with_fewer_passes(way: str) -> None:
    """Five passes on rank 0 and three on the others, in windows of two: nobody waits, and nothing is lost."""
    variable, own = tf.Variable(0.0), float(hvd.rank() + 1)
    step = stepping(way, descent(2), variable)
    mean = (hvd.size() + 1) / 2
    for _ in range(5 if hvd.rank() == 0 else 3):
        step(tf.constant(own))
    assert hvd.join() == 0
    # The second window of rank 0 ended when the others had joined, so that the mean was its own.
    expected = -2.0 * mean - (2.0 if hvd.rank() == 0 else 0.0)
    assert variable.numpy() == expected
    step(tf.constant(own))  # the second pass of a window that every rank has begun in the epoch before
    assert variable.numpy() == expected - 2.0 * mean


@on_ranks(2)
def test_gradients_of_some_passes() -> None:
    """Of three variables one has a gradient in the second pass only, and one in the first window only."""
    always, late, once, never = (tf.Variable(0.0) for _ in range(4))
    optimizer = descent(2)
    used = [always, late, once, never]
    optimizer.minimize(lambda: always + once, var_list=used)
    optimizer.minimize(lambda: always + 3.0 * late, var_list=used)
    assert [float(each) for each in used] == [-2.0, -3.0, -1.0, 0.0]
    for _ in range(2):
        pairs = optimizer.compute_gradients(lambda: always + late, used)
    assert [None if gradient is None else float(gradient) for gradient, _ in pairs] == [2.0, 2.0, None, None]


@on_ranks(2)
def test_gradients_of_some_ranks() -> None:
    """A variable that only rank 0 uses, and only in one pass, changes alike on all ranks."""
    common, own = tf.Variable(0.0), tf.Variable(0.0)
    optimizer = descent(2)
    for number in range(2):
        uses = hvd.rank() == 0 and number == 0
        optimizer.minimize(lambda uses=uses: common + own if uses else 1.0 * common, var_list=[common, own])
    assert float(common) == -2.0
    np.testing.assert_allclose(float(own), -1.0 / hvd.size(), rtol=1e-6)


@on_ranks(2)
def test_another_variable_in_a_function() -> None:
    """What is reduced is settled when the function is traced first; a later trace cannot add to it unnoticed."""
    first, second = tf.Variable(0.0, name="first"), tf.Variable(0.0, name="second")
    optimizer = descent(2)

    @tf.function
    def step(both: bool) -> None:
        optimizer.minimize(lambda: first + second if both else 1.0 * first, var_list=[first, second])

    step(False)
    with pytest.raises(
        ValueError, match="second:0 has a gradient in this pass, and had none when the first pass was traced"
    ):
        step(True)
    step(False)
    assert (float(first), float(second)) == (-2.0, 0.0)
