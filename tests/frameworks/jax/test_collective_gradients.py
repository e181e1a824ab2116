"""The gradients of collectives under both values of `collective_gradients`, against their formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy
import pytest
from jax import numpy as jnp

import horovodish.jax as hvd
from support.collective_gradients import SETTINGS, Case, cases, loss
from support.ranks import run_ranks

VARIABLE = "HOROVODISH_COLLECTIVE_GRADIENTS"
DIFFERENT = ("allgather", "broadcast", "reducescatter Average")


def every_gradient() -> None:
    kept: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as environment:
        for setting in SETTINGS:
            environment.setenv(VARIABLE, setting)
            hvd.init()
            of_programs_that_were_kept(setting, kept)
            for case in cases(hvd.size(), setting):
                check(case, gradients(case)(inputs(case)), setting)
                check(case, jax.jit(gradients(case))(inputs(case)), f"{setting}, jit")
            hvd.shutdown()
    jax.clear_caches()


def gradients(case: Case) -> Callable[[list[jax.Array]], list[jax.Array]]:
    return jax.grad(lambda arrays: loss(case, hvd, arrays, lambda result, weights: (result * weights).sum()))


def inputs(case: Case) -> list[jax.Array]:
    return [jnp.ones(case.shape) for _ in case.gradients(0)]


def check(case: Case, found: list[jax.Array], told: str) -> None:
    for gradient, expected in zip(found, case.gradients(hvd.rank()), strict=True):
        numpy.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6, err_msg=f"{case.label}, {told}")


def of_programs_that_were_kept(setting: str, kept: dict[str, Any]) -> None:
    for case in cases(hvd.size(), setting):
        if case.label not in DIFFERENT:
            continue
        if setting == "exact":
            kept[case.label] = jax.jit(gradients(case))
            check(case, kept[case.label](inputs(case)), setting)
            continue
        with pytest.raises(
            (jax.errors.JaxRuntimeError, ValueError), match=r"compiled for exact gradients .* jax\.clear"
        ):
            jax.block_until_ready(kept[case.label](inputs(case)))
    if setting == "horovod":
        jax.clear_caches()
        for case in cases(hvd.size(), setting):
            if case.label in kept:
                check(case, kept[case.label](inputs(case)), "compiled again")


@pytest.mark.shows("Gradients of collectives")
@pytest.mark.soak
@pytest.mark.parametrize("np", [2, 3])
def test_gradients_follow_the_setting(np: int) -> None:
    run_ranks(every_gradient, np)
