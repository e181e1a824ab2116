"""A model of PowerSGD, algorithms 1 and 2 of https://arxiv.org/abs/1905.13727, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import horovodish as hvd
from horovodish.gradients.powersgd import LowRank, powersgd

Doubles = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]
SHAPE, MATRIX = (24, 3, 5), (24, 15)
RANK, STEPS = 2, 12


def follows_the_model(step: Callable[[Floats], tuple[Any, Any]], exact_steps: int) -> None:
    """Check an optimizer's averages, that ranks get the same bits, and that nothing is lost. Collective.

    Args:
        step: an optimizer's step with a gradient of the parameter "weight" of `SHAPE`; gives the average of all ranks,
            and the error that is left on this one.
        exact_steps: this many steps at the beginning have exact averages.
    """
    factor: Doubles = np.float64(LowRank.begun(np, powersgd(RANK, where=lambda *_: True), "weight", SHAPE).draw)
    errors, lost = np.zeros((hvd.size(), *MATRIX)), np.zeros(MATRIX)
    for number in range(STEPS):
        of_ranks = [
            np.random.default_rng([number, rank]).standard_normal(SHAPE, np.float32) for rank in range(hvd.size())
        ]
        result, error = step(of_ranks[hvd.rank()])
        found = np.array(result, np.float32)
        np.testing.assert_array_equal(found, hvd.broadcast(found, root_rank=0))
        given = np.reshape(of_ranks, (-1, *MATRIX)) + errors
        average = given.mean(0)
        if number >= exact_steps:
            basis = gram_schmidt(np.mean(given @ factor, 0))
            factors = [each.T @ basis for each in given]
            factor = np.mean(factors, 0)
            average = basis @ factor.T
            errors = given - [basis @ its.T for its in factors]
        np.testing.assert_allclose(found.reshape(MATRIX), average, atol=1e-4)
        lost += np.mean(of_ranks, 0, np.float64).reshape(MATRIX) - found.reshape(MATRIX)
        np.testing.assert_allclose(error, errors[hvd.rank()], atol=1e-4)
        of_all = hvd.allreduce(np.float64(error), op=hvd.Average)
        assert number < exact_steps or np.abs(of_all).max() > 0.1, "nothing was approximated"
        np.testing.assert_allclose(of_all, lost, atol=1e-5)


def gram_schmidt(columns: Doubles) -> Doubles:
    basis = np.zeros((len(columns), 0))
    for column in columns.T:
        rest = column - basis @ (basis.T @ column)
        basis = np.column_stack([basis, rest / np.linalg.norm(rest)])
    return basis
