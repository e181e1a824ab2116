"""Arguments that are wrong on one rank alone: it raises, the others raise its reason, and all go on."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import horovodish as hvd
from support.expect import one_rank_is_wrong, the_engine_goes_on
from support.model import PLANES
from support.on_ranks import on_ranks

FOUR = np.zeros(4)


@on_ranks(2, 3, planes=PLANES)
def test_splits() -> None:
    size = hvd.size()
    one_rank_is_wrong(
        ValueError,
        f"x: splits [1, 2] must be {size} non-negative numbers",
        lambda: hvd.alltoall(np.zeros(size), [1] * size, name="x"),
        lambda: hvd.alltoall(np.zeros(size), [1, 2], name="x"),
    )
    one_rank_is_wrong(
        ValueError,
        f"x: splits={[0.5] * size!r} must be {size} whole numbers, one per rank",
        lambda: hvd.alltoall(np.zeros(size), [1] * size, name="x"),
        lambda: hvd.alltoall(np.zeros(size), [0.5] * size, name="x"),  # type: ignore[list-item]
    )


@on_ranks(2, 3, planes=PLANES)
def test_roots() -> None:
    one_rank_is_wrong(
        ValueError,
        "root_rank=7 does not exist",
        lambda: hvd.broadcast(FOUR, 0, name="x"),
        lambda: hvd.broadcast(FOUR, 7, name="x"),
    )
    one_rank_is_wrong(
        ValueError,
        "root_rank=7 does not exist",
        lambda: hvd.broadcast_object("an object", 0),
        lambda: hvd.broadcast_object("an object", 7),
    )


@on_ranks(2, 3, planes=PLANES)
def test_dtypes() -> None:
    one_rank_is_wrong(
        hvd.UnsupportedTensorError,
        "x: dtype complex128 is not supported",
        lambda: hvd.allgather(FOUR, name="x"),
        lambda: hvd.allgather(FOUR.astype(complex), name="x"),
    )


@on_ranks(2, 3, planes=PLANES)
def test_reduction_ops() -> None:
    one_rank_is_wrong(
        ValueError,
        "op=Adasum is for allreduce",
        lambda: hvd.reducescatter(FOUR, name="x"),
        lambda: hvd.reducescatter(FOUR, op=hvd.Adasum, name="x"),
    )


@on_ranks(2, 3, planes=PLANES)
def test_groups() -> None:
    one_rank_is_wrong(
        ValueError,
        "the group is empty",
        lambda: hvd.grouped_allreduce([FOUR, FOUR], name="x"),
        lambda: hvd.grouped_allreduce([], name="x"),
    )
    one_rank_is_wrong(
        ValueError,
        "the group is empty",
        lambda: hvd.grouped_allreduce([FOUR, FOUR], name="x"),
        lambda: hvd.grouped_allreduce(iter([]), name="x"),  # type: ignore[arg-type]
    )
    one_rank_is_wrong(
        TypeError,
        "grouped_allreduce: expected a list of arrays, got one array",
        lambda: hvd.grouped_allreduce([FOUR], name="x"),
        lambda: hvd.grouped_allreduce(FOUR, name="x"),  # type: ignore[arg-type]
    )


@on_ranks(2, 3, planes=PLANES)
def test_memory_that_is_in_a_group_twice() -> None:
    twice = np.zeros(4)
    one_rank_is_wrong(
        ValueError,
        "numbers 0 and 2 of the group share memory",
        lambda: hvd.grouped_allreduce_([FOUR.copy(), np.zeros(0), twice, np.zeros(0)], name="x"),
        lambda: hvd.grouped_allreduce_([twice, np.zeros(0), twice, np.zeros(0)], name="x"),
    )
    whole = np.zeros(6, np.float32)
    one_rank_is_wrong(
        ValueError,
        "numbers 0 and 2 of the group share memory, which cannot take two results",
        lambda: hvd.grouped_allreduce_([whole[3:], whole[1:1], whole[:3]], name="x"),
        lambda: hvd.grouped_allreduce_([whole[2:], whole[1:1], whole[:3]], name="x"),
    )


@on_ranks(2, 3, planes=PLANES)
@pytest.mark.parametrize("factor", [None, "2"])
def test_factors(factor: Any) -> None:
    one_rank_is_wrong(
        ValueError,
        f"prescale_factor={factor!r} is not a number",
        lambda: hvd.allreduce(FOUR, name="x"),
        lambda: hvd.allreduce(FOUR, name="x", prescale_factor=factor),
    )


@on_ranks(2, 3, planes=PLANES)
def test_names() -> None:
    """Every rank is wrong."""
    for name in (5, "caf\udce9"):
        with pytest.raises(ValueError, match="name="):
            hvd.allreduce(FOUR, name=name)  # type: ignore[arg-type]
    the_engine_goes_on()


@on_ranks(2, 3, planes=PLANES)
def test_unnamed_calls_stay_in_step() -> None:
    one_rank_is_wrong(
        hvd.UnsupportedTensorError,
        "bool arrays cannot be reduced",
        lambda: hvd.allreduce(FOUR),
        lambda: hvd.allreduce(FOUR.astype(bool)),
        name=None,
    )


class OfAFileThatIsNotThere:
    """Its name is no UTF-8."""

    def __reduce__(self) -> Any:
        raise ValueError("no such file: caf\udce9")


@on_ranks(2, 3, planes=PLANES)
def test_what_cannot_be_pickled() -> None:
    last = hvd.size() - 1
    one_rank_is_wrong(
        Exception,
        "pickle",
        lambda: hvd.broadcast_object(None, root_rank=last),
        lambda: hvd.broadcast_object(threading.Lock(), root_rank=last),
    )
    one_rank_is_wrong(
        TypeError, "pickle", lambda: hvd.allgather_object(1), lambda: hvd.allgather_object(threading.Lock()), name=None
    )

    one_rank_is_wrong(
        ValueError,
        "no such file: caf",
        lambda: hvd.allgather_object(1),
        lambda: hvd.allgather_object(OfAFileThatIsNotThere()),
        name=None,
    )


@on_ranks(2, 3, planes=PLANES)
def test_a_process_set_that_cannot_be() -> None:
    one_rank_is_wrong(
        ValueError,
        "a process set needs at least one rank",
        lambda: hvd.add_process_set([0]),
        lambda: hvd.add_process_set([0, 0]),
    )
    added = hvd.add_process_set([0])
    assert added.ranks == [0]
    hvd.remove_process_set(added)


@on_ranks(2, 3, planes=PLANES)
def test_different_reasons_on_different_ranks() -> None:
    """Every rank has its own error; nobody waits."""
    with pytest.raises(ValueError, match=f"root_rank={9 + hvd.rank()} does not exist"):
        hvd.broadcast(FOUR, 9 + hvd.rank(), name="x")
    the_engine_goes_on("x")


@on_ranks(2, 3, planes=PLANES)
def test_a_name_that_the_cache_knows() -> None:
    for _ in range(3):
        hvd.allreduce(FOUR, name="known")
    one_rank_is_wrong(
        ValueError,
        "average= and op= were both given",
        lambda: hvd.allreduce(FOUR, name="known"),
        lambda: hvd.allreduce(FOUR, average=True, op=hvd.Sum, name="known"),
        name="known",
    )


@on_ranks(2)
def test_a_refusal_that_nobody_waits_for() -> None:
    """Nobody else makes the call: the rank that is wrong is told so at once, may use the name, and can leave."""
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match="root_rank=9 does not exist"):
            hvd.broadcast_async(FOUR, 9, name="x")
    the_engine_goes_on("y")
