"""Random elastic jobs in worlds that share this process, and mistakes that they must find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from simulation.jobs import Job, job_of, run, smaller
from simulation.programs import Wrong, shrunk
from simulation.world import Fault, Stuck

from horovodish.elastic import exchange
from horovodish.elastic.state import State
from horovodish.launcher.elastic.members import Members

SEEDS = 15

JOB = Job([[0, 1, 2]], 1, True, 1, 8, 2, False, True, None, (Fault(100, "dies", 1),), 0)


@pytest.mark.parametrize("block", range(4))
def test_random_jobs(block: int) -> None:
    for seed in range(block * SEEDS, (block + 1) * SEEDS):
        run(job_of(seed))


@pytest.mark.soak
@pytest.mark.parametrize("block", range(4, 100))
def test_more_random_jobs(block: int) -> None:
    test_random_jobs(block)


def test_a_seed_gives_the_same_events() -> None:
    for seed in range(20):
        job = job_of(seed)
        assert run(job).trace == run(job).trace


@pytest.mark.parametrize("in_same_processes", [True, False])
def test_a_loss_at_each_event(in_same_processes: bool) -> None:
    starts = set()
    for event in range(1, 260, 4):
        job = Job([[0, 1], [2]], 1, in_same_processes, 1, 5, 1, False, False, None, (Fault(event, "dies", 1),), event)
        starts.add(run(job).starts)
    assert min(starts) == (1 if in_same_processes else 2)


def run_many(jobs: int) -> None:
    for seed in range(jobs):
        run(job_of(seed))


@pytest.mark.parametrize(
    ("where", "name", "instead", "found"),
    [
        (State, "_become", lambda self, attributes: None, (Wrong, "after .* steps the state is")),
        (exchange, "barrier", lambda: None, (Wrong, "the job has failed")),
        (Members, "_gather", lambda self, now: None, (Stuck, "wait, and nothing moves")),
    ],
    ids=["a state that has changed by halves", "a copy that goes too early", "a loss that counts as complete"],
)
def test_mistakes_are_found(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, instead: Callable[..., None], found: tuple[type, str]
) -> None:
    monkeypatch.setattr(where, name, instead)
    with pytest.raises(found[0], match=found[1]):
        run_many(200)


def test_a_job_that_fails_is_made_smaller() -> None:
    small = shrunk(JOB, lambda job: any(fault.kind == "dies" for fault in job.faults), smaller)
    assert small.steps == 1 and len(small.faults) == 1
