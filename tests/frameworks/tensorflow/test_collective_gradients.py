"""The gradients of collectives under both values of `collective_gradients`, against their formulas."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import tensorflow as tf

import horovodish.keras
import horovodish.tensorflow as hvd
from support.collective_gradients import SETTINGS, Case, cases, loss
from support.ranks import run_ranks
from support.tensorflow_tensors import EAGER, GRAPH, XLA, called

VARIABLE = "HOROVODISH_COLLECTIVE_GRADIENTS"
DIFFERENT = ("allgather", "broadcast", "reducescatter Average")


def every_gradient() -> None:
    kept: dict[tuple[str, str], Any] = {}
    with pytest.MonkeyPatch.context() as environment:
        for setting in SETTINGS:
            environment.setenv(VARIABLE, setting)
            hvd.init()
            of_functions(setting, kept)
            of_keras(setting)
            hvd.shutdown()


def gradients(case: Case, tensors: list[tf.Tensor], module: Any = hvd) -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        total = loss(case, module, tensors, lambda result, weights: tf.reduce_sum(result * weights))
    return tape.gradient(total, tensors)


def check(case: Case, found: list[tf.Tensor], told: str) -> None:
    for gradient, expected in zip(found, case.gradients(hvd.rank()), strict=True):
        numpy.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-5, atol=1e-6, err_msg=f"{case.label}, {told}")


def inputs(case: Case) -> list[tf.Tensor]:
    return [tf.ones(case.shape) for _ in case.gradients(0)]


def of_functions(setting: str, kept: dict[tuple[str, str], Any]) -> None:
    """Functions of the first setting are called under the other one, too: kept ones differ or refuse."""
    for case in cases(hvd.size(), setting):
        for way in (EAGER, GRAPH, XLA) if case.label in DIFFERENT else (EAGER,):

            def of_case(tensors: list[tf.Tensor], case: Case = case) -> list[tf.Tensor]:
                return gradients(case, tensors)

            function = called(of_case, way)
            check(case, function(inputs(case)), f"{setting}, {way}")
            older = kept.setdefault((case.label, way), function)
            if way == XLA and older is not function:
                with pytest.raises(tf.errors.OpError, match=r"compiled for exact .* make a new tf\.function"):
                    older(inputs(case))
            elif case.label in DIFFERENT:
                check(case, older(inputs(case)), f"{setting}, {way}, kept")


def of_keras(setting: str) -> None:
    (case,) = (case for case in cases(hvd.size(), setting) if case.label == "allgather")
    check(case, gradients(case, inputs(case), horovodish.keras), f"{setting}, Keras")


@pytest.mark.shows("Gradients of collectives")
@pytest.mark.soak
def test_gradients_follow_the_setting() -> None:
    run_ranks(every_gradient, 2)
