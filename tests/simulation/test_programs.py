"""Random programs in worlds that share this process: real engines on links, clocks and processes that a seed drives."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import pytest
from simulation import mutations, world
from simulation.programs import Program, Step, Wrong, check, program_of, run, shrunk, smaller
from simulation.ranks import Fault
from simulation.trainings import HAS_TORCH, WAYS, Training
from simulation.world import Stuck

from horovodish.errors import StallError
from horovodish.gradients.lone_steps import Count, LoneSteps
from horovodish.runtime import basics

SEEDS = 20
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="PyTorch is not there")

ALLREDUCE = Step("allreduce", "t", 3, 0, 0, -1)
PAIR = Program([[0], [1]], (), (ALLREDUCE,) * 3, None, None, None, (), 0)


@pytest.mark.parametrize("block", range(4))
def test_random_programs(block: int) -> None:
    for seed in range(block * SEEDS, (block + 1) * SEEDS):
        run(program_of(seed))


@pytest.mark.soak
@pytest.mark.parametrize("block", range(4, 100))
def test_more_random_programs(block: int) -> None:
    test_random_programs(block)


def test_a_seed_gives_the_same_events() -> None:
    for seed in range(10):
        program = program_of(seed)
        assert run(program).trace == run(program).trace


def test_a_world_changes_nothing_of_frameworks(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[Count] = []

    def watch(count: Count) -> Callable[[], object]:
        watched.append(count)
        return watched.pop

    monkeypatch.setattr(basics, "_followers", list(basics._followers))
    LoneSteps(watch, "")
    run(PAIR)
    assert not watched


def test_a_rank_that_nobody_hears_of_is_found() -> None:
    """MPI may never tell that a rank of another host is dead. Its launcher does, and here it says nothing."""
    with pytest.raises(Stuck, match=r"ranks \[0\] wait"):
        run(replace(PAIR, faults=(Fault(10, "dies", 1),)))


def test_ranks_that_wait_and_tell_each_other_so_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "LATEST_SECONDS", 2 * world.STUCK_SECONDS)
    with pytest.raises(Stuck, match=r"ranks \[0, 2\] wait"):
        run(replace(PAIR, hosts=[[0], [1], [2]], faults=(Fault(30, "dies", 1),)))


@needs_torch
def test_a_rank_that_ends_with_a_stall_is_lost_to_others() -> None:
    """The link from rank 0 to rank 4 loses all. Ranks 2 and 5 train, and rank 5 waits in another collective."""
    train = Step("train", "training", 0, 1, 0, -1)
    steps = train, Step("allgather", "t0 of 0", 1, 0, 3, -1), Step("allreduce", "t0 of 1", 1, 1, 2, -1), train
    drops = Fault(463, "drops", 0, 4, 0.0)
    program = Program([[0, 1], [2, 3], [4, 5]], ((2, 5),), steps, None, None, None, (drops,), 530606)
    run(replace(program, training=Training("int4", every=3), trains=1))


def test_an_error_that_names_the_wrong_rank_is_found() -> None:
    program = replace(PAIR, raises=(1, 2))
    ranks = run(program).ranks
    with pytest.raises(Wrong, match=r"rank 0 raised RankLostError.* rank 1 raised ValueError.* and no rank was lost"):
        check(replace(program, raises=None), ranks)


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulation.programs.Script._right", lambda self, step, number: [number])
    with pytest.raises(Wrong, match="step 0: allreduce gave"):
        run(PAIR)


@needs_torch
@pytest.mark.parametrize("mutation", mutations.OF_PROGRAMS, ids=lambda mutation: mutation.name)
def test_mistakes_are_found(mutation: mutations.Mutation) -> None:
    drawn = map(program_of, range(mutations.SEEDS))
    trained = (replace(each, training=each.training and (mutation.training or each.training)) for each in drawn)
    with mutation.applied(), pytest.raises(AssertionError):
        deque(map(run, trained), maxlen=0)


@needs_torch
@pytest.mark.parametrize("hosts", [[[0, 1], [2]], [[0], [1], [2]]])
@pytest.mark.parametrize("way", WAYS)
def test_each_training_is_as_promised_or_says_that_a_rank_was_lost(way: str, hosts: list[list[int]]) -> None:
    train = Step("train", "training", 0, 0, 0, -1)
    for seed in range(4):
        faults = (Fault(40 * seed, "dies", 1), *(Fault(40 * seed + 1, "hears", rank, 1) for rank in (0, 2)))
        program = Program(hosts, (), (train,) * 6, None, None, None, faults if seed else (), seed, Training(way))
        ranks = run(program).ranks
        assert not any(rank.problem for rank in ranks) if not seed else ranks[1].is_dead == bool(ranks[0].problem)


def test_a_link_that_loses_all_ends_the_program() -> None:
    for rank in run(replace(PAIR, faults=(Fault(0, "drops", 0, 1),))).ranks:
        assert isinstance(rank.problem, StallError) and "rank 0" in str(rank.problem)


def test_a_program_that_fails_is_made_smaller() -> None:
    program = replace(program_of(0), ends=None, steps=(ALLREDUCE, replace(ALLREDUCE, kind="broadcast"), ALLREDUCE))

    def fails(candidate: Program) -> bool:
        return any(step.kind == "broadcast" for step in candidate.steps)

    small = shrunk(program, fails, smaller)
    assert [step.kind for step in small.steps] == ["broadcast"]
    assert not small.faults


def test_the_launcher_tells_of_a_loss_at_each_event() -> None:
    """Also between the steps of `add_process_set`: the engine of a rank that is told refuses the set."""
    program = Program([[0, 1, 2]], ((0, 1),), (replace(ALLREDUCE, team=1),), None, None, None, (), 0)
    seen = set()
    for event in range(2, 120):
        faults = Fault(event - 1, "dies", 2), Fault(event, "hears", 0, 2), Fault(event, "hears", 1, 2)
        seen |= {str(rank.problem) for rank in run(replace(program, faults=faults)).ranks}
    assert "process set 1: the engine has been shut down" in seen
