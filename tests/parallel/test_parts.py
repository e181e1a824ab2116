"""Collectives whose ranks get or give parts of a bucket by elements."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import horovodish as hvd
from support.model import PLANES
from support.on_ranks import on_ranks
from support.parts import parts_by_elements, run_plan


@on_ranks(1, 2, 3, 4, planes=PLANES)
def test_parts_by_elements() -> None:
    parts_by_elements()


@on_ranks(2, 3, planes=PLANES)
def test_ranks_that_disagree_about_the_parts() -> None:
    values = [np.ones(hvd.size(), np.float32)]
    call = partial(run_plan, "reducescatter", "parts", hvd.Sum, values, values)
    if hvd.rank() > 0:
        call = partial(hvd.grouped_reducescatter, values, op=hvd.Sum, name="parts, bucket 0")
    with pytest.raises(hvd.MismatchError, match="disagree about its parts"):
        call()
    parts_by_elements()


@on_ranks(2)
def test_ranks_that_disagree_about_where_parts_end() -> None:
    values = [np.ones(5, np.float32)]
    with pytest.raises(hvd.MismatchError, match=r"about its parts: rank 0 has elements that end at \(1, 5\), rank 1"):
        run_plan("reducescatter", "parts", hvd.Sum, values, values, ends=[1 + hvd.rank(), 5])


@on_ranks(2, planes=PLANES)
def test_parts_of_a_rank_that_has_joined() -> None:
    if hvd.rank() == 0:
        values = [np.full(5, 3.0, np.float32)]
        run_plan("reducescatter", "parts", hvd.Average, values, values)
        assert values[0].tolist() == [3.0] * 5
        with pytest.raises(hvd.HorovodInternalError, match="rank 1 joined, so nobody has that part"):
            run_plan("allgather", "whole", hvd.Sum, values, values)
    hvd.join()
