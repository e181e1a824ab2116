"""Random elastic jobs: what their ranks train, what goes wrong meanwhile, and what must hold."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from simulation.elastic import ElasticWorld
from simulation.programs import Wrong
from simulation.world import Fault

import horovodish as hvd
from horovodish import elastic

LAYOUTS = [[[0, 1]], [[0, 1, 2]], [[0], [1]], [[0, 1], [2, 3]], [[0], [1], [2]], [[0, 1, 2], [3]]]
LATEST_EVENT = 1200


@dataclass(frozen=True)
class Job:
    """An elastic job.

    Attributes:
        hosts: the ranks of each.
        least: with how many ranks it goes on.
        in_same_processes: whether MPI can go on without a lost rank.
        phases: how many states it trains, one after the other.
        steps: how many it trains in a phase.
        every: after so many steps it commits.
        in_blocks: it trains in blocks of `attempt`, and not in a function for `run`.
        in_place: the state is written to, and not replaced.
        bug: a rank of the first start that raises before this step; None: none does.
        faults: from outside.
        seed: of every choice.
    """

    hosts: list[list[int]]
    least: int
    in_same_processes: bool
    phases: int
    steps: int
    every: int
    in_blocks: bool
    in_place: bool
    bug: tuple[int, int] | None
    faults: tuple[Fault, ...]
    seed: int

    @property
    def size(self) -> int:
        return sum(map(len, self.hosts))


def job_of(seed: int) -> Job:
    """The job with this number."""
    chance = random.Random(seed)
    hosts = chance.choice(LAYOUTS)
    size, steps = sum(map(len, hosts)), chance.randrange(4, 20)
    bug = (chance.randrange(size), chance.randrange(steps)) if chance.random() < 0.05 else None
    return Job(
        hosts,
        chance.randrange(1, size),
        chance.random() < 0.5,
        chance.choice((1, 1, 2)),
        steps,
        chance.choice((1, 1, 2, 5)),
        chance.random() < 0.3,
        chance.random() < 0.5,
        bug,
        tuple(_faults(chance, size)),
        seed,
    )


def _faults(chance: random.Random, size: int) -> Iterator[Fault]:
    for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
        event, rank = chance.randrange(LATEST_EVENT), chance.randrange(2 * size)
        if chance.random() < 0.75:
            yield Fault(event, "dies", rank)
            for other in range(2 * size):
                if other != rank and chance.random() < 0.3:
                    yield Fault(event + chance.randrange(1, 100), "mpi hears", other, rank)
        else:
            yield Fault(event, "sleeps", rank, seconds=chance.choice((1.0, 10.0, 100.0)))


def value_of(step: int) -> np.ndarray:
    """Whole numbers, which are summed without rounding."""
    return np.arange(3, dtype=np.float64) + step


def total_of(steps: int) -> np.ndarray:
    return sum((value_of(step) for step in range(steps)), np.zeros(3))


class Script:
    """What a rank of a job does. A step changes the state three times, with collectives in between."""

    def __init__(self, job: Job):
        self.job = job

    def __call__(self) -> tuple[int, list[float]]:
        states = [elastic.ObjectState(step=0, first=np.zeros(3), second=np.zeros(3)) for _ in range(self.job.phases)]
        for state in states:
            self._phase(state)
        for state in states:
            self._check(state)
            if state.step != self.job.steps:
                raise Wrong(f"a phase of {self.job.steps} steps is over, and its state is that of step {state.step}")
        return self.job.steps, states[-1].second.tolist()

    def _phase(self, state: Any) -> None:
        if self.job.in_blocks:
            done = False
            while not done:
                with elastic.attempt(state):
                    self._check(state)
                    done = state.step == self.job.steps
                    if not done:
                        self._step(state)
        else:
            elastic.run(self._train)(state)

    def _train(self, state: Any) -> None:
        self._check(state)
        while state.step < self.job.steps:
            self._step(state)
            if state.step % self.job.every == 0:
                state.commit()

    def _step(self, state: Any) -> None:
        if self.job.bug == (hvd.rank(), state.step) and elastic.loop.membership.start() == 0:
            raise ValueError("of the script")
        value = value_of(state.step) * (hvd.rank() + 1)
        share = hvd.size() * (hvd.size() + 1) / 2
        if self.job.in_place:
            state.first += hvd.allreduce(value, op=hvd.Sum, name="first") / share
            hvd.allreduce_(value, op=hvd.Sum, name="second")
            state.second += value / share
        else:
            state.first = state.first + hvd.allreduce(value, op=hvd.Sum, name="first") / share
            state.second = state.second + hvd.allreduce(value, op=hvd.Sum, name="second") / share
        state.step += 1

    def _check(self, state: Any) -> None:
        """Wherever training begins again, the state is that of a whole number of steps."""
        right = total_of(state.step)
        if not (np.array_equal(state.first, right) and np.array_equal(state.second, right)):
            raise Wrong(f"after {state.step} steps the state is {state.first} and {state.second}, not {right}")


def run(job: Job) -> ElasticWorld:
    """Run it.

    Raises:
        Wrong, Stuck, Looped: what must hold does not.
    """
    world = ElasticWorld(job.seed, job.least, in_same_processes=job.in_same_processes)
    try:
        world.run_job(job.hosts, Script(job), job.faults)
        _check(job, world)
    except AssertionError as problem:
        problem.add_note("\n".join(world.trace[-40:]))
        raise
    return world


def _check(job: Job, world: ElasticWorld) -> None:
    problems = [rank.problem for rank in world.ranks if rank.problem is not None]
    for problem in problems:
        if isinstance(problem, Wrong):
            raise problem
    finished = [rank for rank in world.ranks if rank.status == 0]
    for rank in finished:
        if rank.result != (job.steps, total_of(job.steps).tolist()):
            raise Wrong(f"rank {rank.id} ended with {rank.result}")
    has_bug = any(str(problem) == "of the script" for problem in problems)
    if has_bug and not world.has_failed:
        raise Wrong("a script has failed, and the job has succeeded")
    # A rank that is lost when another one has finished fails the job: nobody goes on without it.
    if world.has_failed and not has_bug and not finished:
        raise Wrong(f"the job has failed: {problems}")
    if not world.has_failed and not finished:
        raise Wrong("the job has succeeded, and no rank came to the end of its script")


def smaller(job: Job) -> Iterator[Job]:
    """Smaller jobs, to find one that fails, too."""
    for fault in job.faults:
        of_loss = {fault.rank} if fault.kind == "dies" else set()
        yield replace(job, faults=tuple(each for each in job.faults if each is not fault and each.other not in of_loss))
    if job.phases > 1:
        yield replace(job, phases=job.phases - 1)
    if job.steps > 1:
        yield replace(job, steps=job.steps - 1)
    if job.bug:
        yield replace(job, bug=None)
