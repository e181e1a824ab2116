"""Which reduce op a call asks for."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from horovodish._native import REDUCE_OPS
from horovodish.collectives.reduce_ops import Adasum, Average, Max, Min, Product, ReduceOp, Sum, chosen_op


@pytest.mark.parametrize(
    ("average", "op", "expected"),
    [
        (None, None, Average),
        (True, None, Average),
        (False, None, Sum),
        (None, Sum, Sum),
        (None, Min, Min),
        (None, Max, Max),
        (None, Product, Product),
        (None, Adasum, Adasum),
    ],
)
def test_the_op_that_is_asked_for(average: bool | None, op: ReduceOp | None, expected: ReduceOp) -> None:
    assert chosen_op(average, op) is expected


@pytest.mark.parametrize("average", [True, False])
def test_average_and_op_exclude_each_other(average: bool) -> None:
    with pytest.raises(ValueError, match="average= and op= were both given"):
        chosen_op(average, Sum)


@pytest.mark.parametrize("op", ["sum", 1, sum])
def test_what_is_no_op_is_refused(op: Any) -> None:
    with pytest.raises(ValueError, match="is not a reduce op; use one of Average, Sum, Adasum, Min, Max, Product"):
        chosen_op(None, op)


def test_each_op_has_the_number_of_the_engine() -> None:
    assert {op.name.lower(): int(op) for op in ReduceOp} == REDUCE_OPS


def test_an_op_stays_itself_when_copied() -> None:
    assert copy.deepcopy(Sum) is Sum
    assert pickle.loads(pickle.dumps(Sum)) is Sum
