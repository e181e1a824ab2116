"""Ranks that go on among themselves when another one has died, where MPI tolerates that."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

import horovodish as hvd
from horovodish.mpi import communicators
from support.documents import python_blocks
from support.hosts import Hosts, hosts, run_on_hosts_to_their_ends
from support.midway import LargeReduction
from support.outcome import Outcome
from support.processes import all_pids, wait_for_output, wait_until_ended
from support.ranks import run_ranks, run_ranks_to_their_ends

STEPS = 30
FATAL_STEP = 4


def die_and_go_on(victims: list[int], phase: str) -> list[tuple[int, int]]:
    """One rank after the other dies; where this one then stands among those that are left."""
    hvd.init()
    world_rank = hvd.rank()
    places = []
    for victim in victims:
        alive = hvd.allgather(np.array([world_rank])).tolist()
        lose(alive.index(victim), phase)
        hvd.shutdown()
        hvd.init(hvd.surviving_communicator())
        alive.remove(victim)
        np.testing.assert_array_equal(hvd.allgather(np.array([world_rank])), alive)
        train()
        places.append((hvd.rank(), hvd.size()))
    return places


def lose(victim: int, phase: str) -> None:
    pids = all_pids()
    with pytest.raises(hvd.RankLostError, match=f"rank {victim}"):
        {"idle": be_idle_while_a_rank_dies, "reducing": reduce_while_a_rank_dies}[phase](pids, victim)


def be_idle_while_a_rank_dies(pids: list[int], victim: int) -> None:
    hvd.barrier()
    if hvd.rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_until_ended(pids[victim])
    hvd.barrier()


def reduce_while_a_rank_dies(_: list[int], victim: int) -> None:
    hvd.barrier()
    while True:
        reduction = LargeReduction()
        if hvd.rank() == victim and reduction.catch():
            os.kill(os.getpid(), signal.SIGKILL)
        reduction.finish()


def train() -> None:
    """Every kind of transfer, small and large, and a process set."""
    own, size = hvd.rank(), hvd.size()
    for step in range(STEPS):
        for length in (3, 100_003):
            total = hvd.allreduce(np.full(length, own + step), op=hvd.Sum, name=f"total {length}")
            np.testing.assert_array_equal(total, np.full(length, sum(range(size)) + step * size))
        root = step % size
        np.testing.assert_array_equal(hvd.broadcast(np.full(7, own), root, name=f"from {root}"), np.full(7, root))
        received, _ = hvd.alltoall(np.arange(size), np.ones(size, int), name="exchange")
        np.testing.assert_array_equal(received, np.full(size, own))
    LargeReduction().finish()
    last = hvd.add_process_set([size - 1])
    assert last.included() == (own == size - 1)


def check(outcomes: list[Outcome], victims: list[int]) -> None:
    for outcome in outcomes:
        assert outcome.ended == ("died" if outcome.rank in victims else "returned"), outcomes
        if outcome.rank in victims:
            continue
        left = list(range(len(outcomes)))
        for victim, place in zip(victims, outcome.result, strict=True):
            left.remove(victim)
            assert place == (left.index(outcome.rank), len(left))


@pytest.mark.parametrize(
    ("victims", "phase", "plane"),
    [([0], "idle", "auto"), ([1], "reducing", "auto"), ([0], "reducing", "mpi_ring"), ([2], "idle", "mpi_ring")],
)
def test_survivors_go_on(victims: list[int], phase: str, plane: str) -> None:
    env = {"HOROVODISH_PLANE": plane}
    check(run_ranks_to_their_ends(die_and_go_on, 3, args=(victims, phase), env=env), victims)


def test_survivors_go_on_more_than_once() -> None:
    check(run_ranks_to_their_ends(die_and_go_on, 4, args=([0, 3], "reducing")), [0, 3])


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Hosts]:
    with hosts(2) as made:
        yield made


@pytest.mark.parametrize(
    ("layout", "victim", "phase"), [([2, 2], 0, "reducing"), ([2, 2], 3, "idle"), ([2, 1], 2, "reducing")], ids=str
)
def test_survivors_on_hosts_go_on(two_hosts: Hosts, layout: list[int], victim: int, phase: str) -> None:
    """The leader of all; a rank that follows; a host's only rank, after which one host is left."""
    args = ([victim], phase)
    check(run_on_hosts_to_their_ends(die_and_go_on, two_hosts, layout, args=args), [victim])


def train_a_model_through_a_loss() -> tuple[list[int], list[float]]:
    """The guide's loop. Rank 2 dies when rank 0 has taken the step that rank 1 is about to take.

    Rank 1 then waits for rank 2 alone, as it would in a process set of model parallelism.
    """
    import torch

    import horovodish.torch as hvd_torch

    hvd.init()
    pids, rank = all_pids(), hvd.rank()
    pair = hvd.add_process_set([1, 2])
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = hvd_torch.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd_torch.broadcast_parameters(model.state_dict())
    steps_taken = 0

    def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
        return model(torch.randn(4, 3)).square().mean()

    def before_step(*_: object) -> None:
        nonlocal steps_taken
        steps_taken += 1
        if steps_taken == FATAL_STEP and rank > 0:
            if rank == 2:
                wait_for_output(0, "has taken the fatal step")
                os.kill(os.getpid(), signal.SIGKILL)
            wait_until_ended(pids[2])
            hvd.barrier(process_set=pair)

    def after_step(*_: object) -> None:
        if steps_taken == FATAL_STEP and rank == 0:
            print("has taken the fatal step", flush=True)

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(after_step)
    names = {"hvd": hvd_torch, "model": model, "optimizer": optimizer, "loss_of": loss_of, "steps": FATAL_STEP + 5}
    exec(python_blocks("docs/failures.md")[0], names)
    assert names["step"] == FATAL_STEP + 5
    hvd_torch.check_consistency(model, optimizer)
    return names["steps_done"], [float(parameter.double().sum()) for parameter in model.parameters()]


@pytest.mark.soak
def test_a_model_is_trained_through_a_loss() -> None:
    pytest.importorskip("torch")
    *survivors, died = run_ranks_to_their_ends(train_a_model_through_a_loss, 3)
    assert died.ended == "died"
    for outcome in survivors:
        assert outcome.ended == "returned", outcome.output
        assert outcome.result[0] == [FATAL_STEP, FATAL_STEP - 1], "one of them was a step ahead"
    assert survivors[0].result[1] == survivors[1].result[1]


def wait_for_a_rank_that_does_not_come() -> str:
    """The engine has stopped when the rank dies, so that only this call tells that MPI is not to be finalized."""
    hvd.init()
    pids, rank = all_pids(), hvd.rank()
    hvd.shutdown()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_until_ended(pids[2])
    last = communicators.last()
    assert last is not None
    last.start_timeout_seconds = 2  # init() had the usual time
    if rank == 1:
        wait_for_output(0, "gave up")
        return ""
    with pytest.raises(hvd.LaunchError) as raised:
        hvd.surviving_communicator()
    print("gave up", flush=True)
    return str(raised.value)


def test_the_wait_for_the_others_is_bounded() -> None:
    outcomes = run_ranks_to_their_ends(wait_for_a_rank_that_does_not_come, 3)
    assert [outcome.ended for outcome in outcomes] == ["returned", "returned", "died"], outcomes[0].output
    assert "not every rank that is left called surviving_communicator() within 2 seconds" in outcomes[0].result


def lose_a_rank_between_two_states(begins: bool, joins: bool) -> str:
    """Rank 2 dies when rank 0 is in a block of the second state and rank 1 is at the end of the first one's block."""
    hvd.init()
    pids, me, is_over = all_pids(), hvd.rank(), False
    first, second = (hvd.elastic.ObjectState(step=0) for _ in range(2))
    if begins:
        with hvd.elastic.attempt(second):
            hvd.barrier()
    try:
        while not is_over:
            with hvd.elastic.attempt(first):
                if first.step == 0:
                    hvd.barrier()
                    if me == 2:
                        os.kill(os.getpid(), signal.SIGKILL)
                    if me == 1:
                        wait_until_ended(pids[2])
                        hvd.barrier()
                elif joins:
                    hvd.join()
                first.step, is_over = 1, True
        with hvd.elastic.attempt(second):
            second.step += int(hvd.allreduce(np.ones(1), op=hvd.Sum, name="step").item())
        with hvd.elastic.attempt(second):
            return str(second.step)
    except (hvd.HorovodInternalError, hvd.LaunchError) as problem:
        return f"{type(problem).__name__}: {problem}"


@pytest.mark.parametrize(
    ("begins", "joins", "said"),
    [
        (False, False, "2"),
        (False, True, "MismatchError: 1 of 2 ranks have called join(), and the others begin a block of hvd.elastic"),
        (True, False, "LaunchError: a rank was lost while others were in blocks of different states"),
    ],
)
def test_a_loss_between_two_states_without_a_launcher(begins: bool, joins: bool, said: str) -> None:
    """The ranks go on if they begin the second state together. Rank 0 does not go back to the first one."""
    outcomes = run_ranks_to_their_ends(lose_a_rank_between_two_states, 3, args=(begins, joins))
    assert [outcome.ended for outcome in outcomes] == ["returned", "returned", "died"], outcomes[0].output
    assert outcomes[0].result.startswith(said)


def ask_without_fault_tolerance() -> None:
    with pytest.raises(hvd.NotInitializedError, match="an init"):
        hvd.surviving_communicator()
    hvd.init()
    with pytest.raises(hvd.LaunchError, match="mpirun --with-ft ulfm"):
        hvd.surviving_communicator()


def test_without_fault_tolerance_it_says_so() -> None:
    run_ranks(ask_without_fault_tolerance, 2, fresh=True)
