"""`shutdown()` and the end of a script: they never hang, and take from nobody what has been completed."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import horovodish as hvd
from horovodish.collectives.array_adapter import ARRAYS
from horovodish.collectives.operation import Family, Operation
from horovodish.collectives.submission import Handle
from support.model import PLANES
from support.on_ranks import on_ranks
from support.processes import all_pids, resume, stop
from support.ranks import run_ranks, run_ranks_to_their_ends

ROUNDS = 40


@on_ranks(3, planes=["mpi_ring"])
@pytest.mark.parametrize("leaver", [0, 1])
def test_what_a_leaving_rank_has_completed_a_lagging_rank_completes(leaver: int) -> None:
    """Rank 2 is stopped from before a broadcast until after its root has left, with another operation pending.

    Over MPI, where the root of a broadcast does not wait for the others.
    """
    pids = all_pids()
    lags = hvd.rank() == 2
    early = hvd.broadcast_async(np.full(9, hvd.rank()), leaver, name="completed") if lags else None
    hvd.barrier()  # from here on, the other ranks can begin the broadcast without rank 2
    if hvd.rank() == leaver:
        stop(pids[2])
        pending = hvd.allreduce_async(np.zeros(2), name="only the leaver submits this")
    result = early.wait() if early else hvd.broadcast(np.full(9, hvd.rank()), leaver, name="completed")
    np.testing.assert_array_equal(result, np.full(9, leaver))
    if hvd.rank() == leaver:
        hvd.shutdown()
        resume(pids[2])
        with pytest.raises(hvd.EngineStoppedError, match=rf"shutdown\(\) was called on rank {leaver}"):
            pending.wait()
    else:
        with pytest.raises(hvd.RankLostError, match=rf"rank {leaver} called shutdown\(\)"):
            hvd.barrier()


def leave_at_once() -> None:
    """One rank after the other leaves with something pending as soon as it has the result that all of them need."""
    for turn in range(ROUNDS):
        hvd.init()
        if hvd.rank() == turn % hvd.size():
            pending = hvd.allreduce_async(np.zeros(2), name="only the leaver submits this")
        length = 400_000 if turn % 2 else 1000
        total = hvd.allreduce(np.full(length, hvd.rank()), op=hvd.Sum, name="completed")
        if hvd.rank() == turn % hvd.size():
            hvd.shutdown()
            assert pending.poll()
        np.testing.assert_array_equal(total, np.full(length, 3))
        hvd.shutdown()


@pytest.mark.parametrize("plane", PLANES)
def test_what_a_leaving_rank_has_completed_is_completed_everywhere(plane: str) -> None:
    run_ranks(leave_at_once, 3, env={"HOROVODISH_PLANE": plane})


@on_ranks(2)
def test_what_is_submitted_late_of_a_run_that_has_failed_names_the_cause() -> None:
    """As a compiled program does, whose parts come one after the other while another rank has given up and left."""
    family = Family("program", 2, 0, run=1)

    def part(name: str, length: int) -> Handle[np.ndarray]:
        return ARRAYS.one(Operation("allreduce", name, family=family), np.zeros(length))

    with pytest.raises(
        hvd.MismatchError, match=r"'program\.first' failed on rank \d: the ranks disagree about its shape"
    ):
        part("program.first", 2 + hvd.rank()).wait()
    if hvd.rank() == 0:
        hvd.shutdown()
        return
    with pytest.raises(hvd.RankLostError, match=r"rank 0 called shutdown\(\)"):
        hvd.barrier()
    with pytest.raises(hvd.MismatchError, match=r"together with 'program\.first': .* disagree about its shape"):
        part("program.second", 2).wait()


ACTS = {"leaves": hvd.shutdown, "exits": sys.exit}
ENDS = {"leaves": "returned", "exits": "raised"}


def need_a_rank_that_leaves(leaver: int, act: str) -> str:
    hvd.init()
    hvd.barrier()
    if hvd.rank() == leaver:
        ACTS[act]()
        return ""
    with pytest.raises(hvd.RankLostError) as raised:
        hvd.allreduce(np.zeros(3))
    with pytest.raises(hvd.RankLostError, match=f"rank {leaver}"):
        hvd.barrier()
    return str(raised.value)


@pytest.mark.parametrize(
    ("leaver", "act", "plane"),
    [(0, "leaves", "auto"), (1, "leaves", "mpi_ring"), (0, "exits", "mpi_ring"), (1, "exits", "auto")],
)
def test_who_needs_a_rank_that_has_left_is_told(leaver: int, act: str, plane: str) -> None:
    env = {"HOROVODISH_PLANE": plane}
    outcomes = run_ranks_to_their_ends(need_a_rank_that_leaves, 3, args=(leaver, act), env=env)
    assert outcomes.pop(leaver).ended == ENDS[act]
    for outcome in outcomes:
        assert outcome.ended == "returned", outcome.output
        assert f"rank {leaver} {'called shutdown()' if act == 'leaves' else 'has ended its script'}" in outcome.result
