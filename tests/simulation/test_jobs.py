"""Random elastic jobs in worlds that share this process, and mistakes that they must find."""

from __future__ import annotations

import gc
import json
import os
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from simulation import jobs, mutations, programs, replays
from simulation.jobs import Job, job_of, run, smaller
from simulation.programs import shrunk
from simulation.ranks import Fault
from simulation.trainings import ELASTIC, HAS_TORCH, Training

from horovodish.errors import StallError

SEEDS = 15
KEPT = sorted(replays.FOLDER.glob("*.json"))

JOB = Job([[0, 1, 2]], steps=8, every=2, in_place=True, faults=(Fault(100, "dies", 1),))


@pytest.mark.parametrize("block", range(4))
def test_random_jobs(block: int) -> None:
    run_many(range(block * SEEDS, (block + 1) * SEEDS))


@pytest.mark.soak
@pytest.mark.parametrize("block", range(4, 100))
def test_more_random_jobs(block: int) -> None:
    test_random_jobs(block)


def run_many(seeds: Iterable[int]) -> None:
    for seed in seeds:
        run(job_of(seed))


def test_a_seed_gives_the_same_events() -> None:
    for seed in range(20):
        job = job_of(seed)
        assert run(job).trace == run(job).trace


@pytest.mark.skipif(not HAS_TORCH, reason="PyTorch is not there")
@pytest.mark.parametrize("way", ELASTIC)
def test_a_job_leaves_no_file_open(way: str) -> None:
    run(replace(JOB, training=Training(way)))
    gc.collect()
    before = os.listdir("/proc/self/fd")
    run(replace(JOB, training=Training(way)))
    gc.collect()
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("in_same_processes", [True, False])
def test_a_loss_at_each_event(in_same_processes: bool) -> None:
    starts = set()
    for event in range(1, 260, 4):
        faults = (Fault(event, "dies", 1),)
        job = Job([[0, 1], [2]], in_same_processes=in_same_processes, steps=5, faults=faults, seed=event)
        starts.add(run(job).starts)
    assert min(starts) == (1 if in_same_processes else 2)


@pytest.mark.parametrize("event", [0, 40])
def test_a_link_that_loses_all_ends_the_job(event: int) -> None:
    world = run(Job([[0], [1]], steps=8, faults=(Fault(event, "drops", 0, 1),)))
    assert world.has_failed and any(isinstance(rank.problem, StallError) for rank in world.ranks)


@pytest.mark.parametrize(
    "mutation", [*mutations.OF_JOBS, *mutations.OF_TRAINING_JOBS], ids=lambda mutation: mutation.name
)
def test_mistakes_are_found(mutation: mutations.Mutation) -> None:
    if mutation.training and not HAS_TORCH:
        pytest.skip("PyTorch is not there")
    jobs = (replace(job_of(seed), training=mutation.training) for seed in range(mutations.SEEDS))
    with mutation.applied(), pytest.raises(AssertionError):
        deque(map(run, jobs), maxlen=0)


@pytest.mark.parametrize("file", KEPT, ids=lambda file: file.stem)
def test_kept_worlds_find_what_they_have_found(file: Path) -> None:
    kind, made = replays.read(file)
    kind.run(made)
    known = [*mutations.OF_JOBS, *mutations.OF_KEPT, *mutations.OF_ENGINE]
    mutation = next(each for each in known if each.name.replace(" ", "_") == file.stem)
    if isinstance(mutation, mutations.OfEngine):
        return  # test_engine_mutations.py has it
    with mutation.applied(), pytest.raises(AssertionError):
        kind.run(made)


def test_a_mutation_of_a_line_that_is_gone_says_so() -> None:
    mutation = mutations.OF_JOBS[0]._replace(line="a line that is not there")
    with pytest.raises(LookupError, match="mend the mutation"), mutation.applied():
        pass


def test_a_job_that_fails_is_made_smaller() -> None:
    small = shrunk(JOB, lambda job: any(fault.kind == "dies" for fault in job.faults), smaller)
    assert small.steps == 1 and len(small.faults) == 1 and not small.in_place


@pytest.mark.parametrize("seed", range(20))
def test_a_world_is_the_same_when_it_is_read_from_a_file(tmp_path: Path, seed: int) -> None:
    for kind, made in ((jobs, jobs.job_of(seed)), (programs, programs.program_of(seed))):
        file = tmp_path / "world.json"
        file.write_text(json.dumps(replays.plain(made)))
        assert replays.read(file) == (kind, made)
