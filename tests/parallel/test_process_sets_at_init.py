"""Process sets around `init()`: given to it, made before it from communicators, and when it fails."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import horovodish as hvd
from support.expect import mismatch, the_engine_goes_on
from support.model import PLANES
from support.ranks import run_ranks


def a_word_that_is_not_known() -> None:
    with pytest.raises(ValueError, match='give a list of process sets, or "dynamic"'):
        hvd.init(process_sets="static")


def sets_that_are_given() -> None:
    given = hvd.ProcessSet([2, 0])
    hvd.init(process_sets=[[0, 1], given])
    assert (given.process_set_id, given.ranks, given.size()) == (2, [0, 2], 2)
    if given.included():
        total = hvd.allreduce(np.full(2, hvd.rank()), op=hvd.Sum, process_set=given)
        np.testing.assert_array_equal(total, [2, 2])
    later = hvd.add_process_set([1, 2])
    assert later.process_set_id == 3
    with pytest.raises(ValueError, match=r"a process set of ranks \[0, 1\] is in use already"):
        hvd.add_process_set([1, 0])
    hvd.barrier()
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    added = hvd.add_process_set(given)
    assert (added is given, added.process_set_id) == (True, 1)
    the_engine_goes_on()
    hvd.barrier()
    hvd.shutdown()


def init_that_fails() -> None:
    """It leaves no engine, so that the next call starts one; ranks on which it succeeds do not wait for the others."""
    from mpi4py import MPI

    for _ in range(2):
        with pytest.raises(ValueError, match=r"process set \[0, 99\]: the ranks are 0 to 2"):
            hvd.init(process_sets=[[0, 99]])
        assert not hvd.is_initialized()
    reason = "a process set needs at least one rank and each at most once"
    for right in (None, [[0, 1]]):
        if MPI.COMM_WORLD.Get_rank() == 0:
            with pytest.raises(ValueError, match=reason):
                hvd.init(process_sets=[[0, 0]])
            assert not hvd.is_initialized()
        elif right is None:
            hvd.init()
            with pytest.raises(hvd.RankLostError, match=rf"rank 0 could not finish init\(\): {reason}"):
                the_engine_goes_on()
        else:
            with pytest.raises(hvd.HorovodInternalError, match=rf"rank 0 .*{reason}"):
                hvd.init(process_sets=right)
            assert not hvd.is_initialized()
        MPI.COMM_WORLD.Barrier()
        hvd.shutdown()


def communicators_in_the_order_of_init() -> None:
    """Ranks 0, 1 and 2 of MPI's world are those of init() in reverse; a set may be made before it."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    backwards, pair = world.Split(0, key=-world.Get_rank()), world.Split(world.Get_rank() == 2)
    early, everybody = hvd.ProcessSet(pair), hvd.ProcessSet(world)
    assert early.ranks == everybody.ranks == []
    hvd.init(backwards)
    ranks = [0] if hvd.rank() == 0 else [1, 2]
    assert hvd.ProcessSet(pair).ranks == ranks
    added = hvd.add_process_set(early if hvd.rank() else [1, 2])
    assert added.ranks == [1, 2]
    if added.included():
        assert added is early
        total = hvd.allreduce(np.full(2, hvd.rank()), op=hvd.Sum, process_set=added)
        np.testing.assert_array_equal(total, [3, 3])
    hvd.barrier()
    hvd.shutdown()

    hvd.init(pair)
    text = f"rank {0 if world.Get_rank() == 2 else 2} of the communicator of a process set is not among the ranks"
    with pytest.raises(ValueError, match=text):
        hvd.ProcessSet(world)
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match=text):
            hvd.add_process_set(everybody)
    else:
        with mismatch("rank 0 cannot take part", text):
            hvd.add_process_set([0])
    the_engine_goes_on()
    hvd.barrier()
    hvd.shutdown()
    backwards.Free()
    pair.Free()


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize(
    "check", [a_word_that_is_not_known, sets_that_are_given, init_that_fails, communicators_in_the_order_of_init]
)
def test_init(check: Callable[[], None], plane: str) -> None:
    run_ranks(check, 3, env={"HOROVODISH_PLANE": plane})
