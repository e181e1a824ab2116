"""Random elastic jobs: what their ranks train, what goes wrong meanwhile, and what must hold."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from simulation.elastic import ElasticWorld
from simulation.programs import SameBits
from simulation.promises import Content
from simulation.ranks import Fault, Wrong
from simulation.trainings import (
    ELASTIC,
    HAS_TORCH,
    SHARDS,
    SYNC,
    Expected,
    Trained,
    Training,
    check_parameters,
    training_of,
)

import horovodish as hvd
from horovodish import elastic
from horovodish.errors import HostsUpdatedInterrupt, StallError
from horovodish.runtime.process import part

LAYOUTS = [[[0, 1]], [[0, 1, 2]], [[0], [1]], [[0, 1], [2, 3]], [[0], [1], [2]], [[0, 1, 2], [3]]]
if HAS_TORCH:  # before a world is there, in which imports would not work
    from horovodish.torch.elastic import ElasticSampler, TorchState

gc.freeze()  # the loop collects garbage, and modules are none
SAMPLES = 13
EXACT = Training("plain")
EVENTS_OF_A_STEP = 20
"""On a rank, about."""
KINDS = (
    *("dies", "dies", "dies", "dies", "host dies", "all die", "sleeps", "delays", "delays", "is cut off"),
    *("has no room", "slots", "makes room"),
)


@dataclass(frozen=True)
class Stall:
    """A rank calls a collective that no other rank calls.

    Attributes:
        rank: which one.
        step: before this one.
        times: so often; then no more.
    """

    rank: int
    step: int
    times: int


@dataclass(frozen=True)
class Job:
    """An elastic job.

    Attributes:
        hosts: the ranks of each.
        least: with how many ranks it goes on.
        in_same_processes: whether MPI can go on without a lost rank.
        phases: how many states it trains, one after the other.
        turns: how often it comes to each state. It trains a part of the steps each time.
        steps: how many it trains of a state.
        every: it commits after this many steps.
        in_blocks: it trains in blocks of `attempt`, and not in a function for `run`.
        in_place: the state is written to, and not replaced.
        is_shared: the states have a model in common.
        joins: each turn ends with more steps on some ranks than on others, and with `join()`.
        has_samples: the state is PyTorch's, and a sampler deals an epoch out. It works in a function for `run` alone.
        has_team: it adds a process set whenever the ranks have changed.
        saves: before its end a turn calls `save()`.
        rests: when it has trained, it does something else for a while, such as saving a model.
        copy_seconds: what a copy takes.
        step_seconds: what a step takes.
        bug: a rank of the first start that raises before this step; None: none does.
        leaves: likewise, a rank that ends its script.
        stall: what stalls; None: nothing.
        faults: from outside.
        seed: of every choice.
        training: the optimizer of a model that the ranks train as well; None: there is none.
    """

    hosts: list[list[int]]
    least: int = 1
    in_same_processes: bool = True
    phases: int = 1
    turns: int = 1
    steps: int = 8
    every: int = 1
    in_blocks: bool = False
    in_place: bool = False
    is_shared: bool = False
    joins: bool = False
    has_samples: bool = False
    has_team: bool = False
    saves: bool = False
    rests: bool = False
    copy_seconds: float = 0.0
    step_seconds: float = 0.0
    bug: tuple[int, int] | None = None
    leaves: tuple[int, int] | None = None
    stall: Stall | None = None
    faults: tuple[Fault, ...] = ()
    seed: int = 0
    training: Training | None = None

    @property
    def size(self) -> int:
        return sum(map(len, self.hosts))

    @property
    def has_parts(self) -> bool:
        return self.training is not None and self.training.way in SHARDS

    @property
    def may_stall(self) -> bool:
        return self.stall is not None or any(fault.kind == "drops" for fault in self.faults)

    @property
    def deals_samples(self) -> bool:
        return self.has_samples and not self.in_blocks and HAS_TORCH

    @property
    def ends(self) -> list[int]:
        """After how many steps each turn of a state is over. An epoch and a round of local steps go through at once."""
        at_once = self.deals_samples or (self.training is not None and self.training.way in SYNC)
        turns = 1 if at_once else self.turns
        return [self.steps * turn // turns for turn in range(1, turns + 1)]


def job_of(seed: int) -> Job:
    """The job with this number."""
    chance = random.Random(seed)
    hosts = chance.choice(LAYOUTS)
    size, steps, phases = sum(map(len, hosts)), chance.randrange(2, 12), chance.choice((1, 1, 1, 2, 2, 3))

    def where(share: float) -> tuple[int, int] | None:
        return (chance.randrange(size), chance.randrange(steps)) if chance.random() < share else None

    stalls = where(0.06)
    job = Job(
        hosts,
        least=chance.randrange(1, size),
        in_same_processes=chance.random() < 0.6,
        phases=phases,
        steps=steps,
        every=chance.choice((1, 1, 2, 5)),
        in_blocks=chance.random() < 0.4,
        in_place=chance.random() < 0.5,
        is_shared=chance.random() < 0.5,
        joins=chance.random() < 0.2,
        has_team=chance.random() < 0.2,
        saves=chance.random() < 0.1,
        rests=chance.random() < 0.4,
        copy_seconds=chance.choice((0.0, 0.0005, 0.01)),
        step_seconds=chance.choice((0.0, 0.0, 0.01)),
        bug=where(0.04),
        leaves=where(0.04),
        stall=Stall(*stalls, chance.choice((1, 100))) if stalls else None,
        faults=tuple(_faults(chance, size, EVENTS_OF_A_STEP * steps * phases * size, phases * size)),
        seed=seed,
        has_samples=chance.random() < 0.2,
        training=training_of(chance, ELASTIC) if chance.random() < 0.3 and HAS_TORCH else None,
    )
    if phases > 1:
        job = replace(job, turns=random.Random(f"turns of {seed}").choice((1, 2, 3)))
    if len(hosts) > 1 and chance.random() < 0.05:
        sender, receiver = (chance.choice(host) for host in chance.sample(hosts, 2))
        drops = Fault(chance.randrange(EVENTS_OF_A_STEP * steps * phases * size), "drops", sender, receiver)
        job = replace(job, faults=tuple(sorted((*job.faults, drops), key=lambda fault: fault.event)))
    return job


def _faults(chance: random.Random, size: int, events: int, marks: int) -> Iterator[Fault]:
    event = mark = 0
    for _ in range(chance.choice((0, 1, 1, 2, 3, 4, 6))):
        # Often soon after the one before, while the ranks recover from it, or when ranks are in different phases.
        where = chance.random()
        if where < 0.4:
            event += chance.randrange(200)
        elif where < 0.6:
            event, mark = chance.randrange(30), chance.randrange(1, marks + 1)
        else:
            event, mark = chance.randrange(events), 0
        rank, kind = chance.randrange(2 * size), chance.choice(KINDS)
        seconds = chance.choice((1.0, 10.0, 100.0))
        if kind == "delays":
            for other in range(2 * size):
                if other != rank and chance.random() < 0.7:
                    yield Fault(event, kind, rank, other, seconds, mark=mark)
            if chance.random() < 0.6:  # so it may be ahead of the others when it is lost
                yield Fault(event + chance.randrange(100), "dies", rank, mark=mark)
            continue
        yield Fault(event, kind, rank, seconds=seconds, count=chance.randrange(3), mark=mark)
        if kind == "is cut off":
            yield Fault(event + chance.randrange(200), "dies", rank, mark=mark)
        elif kind == "slots":
            yield Fault(event + chance.randrange(200), "slots", rank, count=3, mark=mark)
        elif kind == "makes room" and chance.random() < 0.3:
            yield Fault(event + chance.randrange(50), "no room", rank, mark=mark)
        elif kind in ("dies", "host dies", "all die"):
            for other in range(2 * size):
                if other != rank and chance.random() < 0.3:
                    yield Fault(event + chance.randrange(1, 100), "mpi hears", other, rank, mark=mark)


def value_of(step: int) -> np.ndarray:
    """Whole numbers, which are summed without rounding."""
    return np.arange(3, dtype=np.float64) + step


def total_of(steps: int) -> np.ndarray:
    return sum((value_of(step) for step in range(steps)), np.zeros(3))


class Model:
    """An object that stays the same when a state goes back.

    Attributes:
        total: of the values of all steps.
        steps: by the number of a state, how many of its steps are in it.
        trails: by the number of a state, these steps, each with its world.
    """

    def __init__(self) -> None:
        self.total = np.zeros(3)
        self.steps: dict[int, int] = {}
        self.trails: dict[int, int] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "steps": self.steps, "trails": self.trails}

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        self.total[:], self.steps, self.trails = kept["total"], dict(kept["steps"]), dict(kept["trails"])

    def add(self, number: int, step: int, world: int) -> None:
        """The ranks have taken a step of a state."""
        self.total += value_of(step)
        self.steps[number] = step + 1
        self.trails[number] = hash((self.trails.get(number, 0), step, world))


class Script:
    """What a rank of a job does. A step changes the state four times, with collectives in between."""

    def __init__(self, job: Job, world: ElasticWorld):
        self.job, self.world, self.promises = job, world, world.promises
        self.stalls = job.stall.times if job.stall else 0
        self.same_bits = SameBits()
        self.changes: dict[int, list[np.ndarray]] = {}  # of a step, counted from where ranks began
        self.expected = job.training and Expected(job.training, [[0], [1]])  # of however many ranks

    def __call__(self) -> list[Content]:
        model = Model()
        phases, training = range(self.job.phases), self.job.training
        trained = [Trained(training, hvd.global_process_set) if training else None for _ in phases]
        states = [
            self._state(
                each,
                step=0,
                trail=0,
                first=np.zeros(3),
                second=np.zeros(3),
                model=model if self.job.is_shared else Model(),
            )
            for each in trained
        ]
        made = [_Phase(self, number, states, trained[number]) for number in phases]
        over = 0
        for end in self.job.ends:
            for phase in made:
                phase.run(over, end)
            over = end
        if self.job.rests:
            time.sleep(hvd.rank() % 2)
        return [_content(state) for state in states]

    def _state(self, trained: Trained | None, **attributes: Any) -> Any:
        if self.job.deals_samples:
            attributes |= {"sampler": ElasticSampler(range(SAMPLES), shuffle=False), "seen": np.zeros(SAMPLES)}
        if trained:
            attributes |= {"net": trained.model, "optimizer": trained.optimizer}
        return (TorchState if trained or self.job.deals_samples else elastic.ObjectState)(**attributes)


@dataclass
class _Team:
    """The process set that a rank has added, and in which world."""

    team: hvd.ProcessSet | None = None
    world: int = 0


def _content(state: Any) -> Content:
    return Content(state.step, state.trail)


class _Phase:
    """A rank trains a state.

    Args:
        script: of the rank.
        number: of the phase.
        states: of all phases.
        trained: its model, if it trains one.
    """

    def __init__(self, script: Script, number: int, states: list[Any], trained: Trained | None):
        self.job, self.script, self.promises = script.job, script, script.promises
        self.number, self.states, self.state = number, states, states[number]
        self.over, self.end, self.has_begun = 0, 0, False  # of the turn
        self.samples: Iterator[int] | None = None
        self.trained, self.has_ended = trained, False
        self.taken = self.in_world = 0  # steps in a world, and in which one

    def run(self, over: int, end: int) -> None:
        """Train from the end of the turn before until the state has `end` steps."""
        self.over, self.end, self.has_begun = over, end, False
        if self.job.in_blocks:
            done = False
            while not done:
                content = None
                with elastic.attempt(self.state):
                    self._begin()
                    if self.state.step < self.end:
                        self._step()
                    else:
                        self._end()
                        done = True
                    content = self._will_commit()
                if content and part(elastic.loop._Loop).deferred is None:
                    self._has_committed(content)
        else:
            elastic.run(self._train)(self.state)
            self.promises.has_committed(self.number, _content(self.state), copies=True)
        if not end <= self.state.step <= self.job.steps:
            raise Wrong(f"{end} steps should be over, and the state has {self.state.step}")
        self._check()

    def _train(self, state: Any) -> None:
        self._begin()
        self.samples = iter(state.sampler) if self.job.deals_samples else None
        while state.step < self.end:
            self._step()
            if state.step % self.job.every == 0:
                self._commit(state.commit)
        if self.job.saves and not self._is_in_round():
            self._commit(state.save, copies=True)
        self._end()
        self._will_commit()

    def _begin(self) -> None:
        """Wherever training begins again, the state comes from a commit."""
        self.has_ended = False
        self._check()
        self.promises.begins(self.number, _content(self.state), Content(0, 0))
        if len(self.states) > 1 and not self.has_begun:
            # When a block of another state begins, both states are copied.
            before = (self.number - 1) % len(self.states)
            if self.states[before].is_synced:
                self.promises.has_committed(before, _content(self.states[before]), copies=True)
        self.has_begun = True

    def _commit(self, commit: Callable[[], None], *, copies: bool = False) -> None:
        content = self._will_commit()
        try:
            commit()
        except HostsUpdatedInterrupt:
            self._has_committed(content, copies=True)
            raise
        self._has_committed(content, copies=copies)

    def _will_commit(self) -> Content:
        content = _content(self.state)
        if not self._is_in_round():
            self.promises.will_commit(self.number, content)
        return content

    def _has_committed(self, content: Content, *, copies: bool = False) -> None:
        if not self._is_in_round():
            copies = copies or (self.job.has_parts and self.state._copies.has(self.state._position))
            self.promises.has_committed(self.number, content, copies=copies)

    def _is_in_round(self) -> bool:
        """Whether a commit does nothing, because steps of this rank are not part of a meeting yet."""
        training = self.job.training
        return bool(training) and training.way in SYNC and not self.has_ended and self.state.step % training.every != 0

    def _end(self) -> None:
        """Some ranks have more to do than others."""
        self.script.world.mark()
        if self.trained is not None:
            self.trained.end()
            self.has_ended = self.trained.training.way in SYNC
        if self.job.joins:
            for _ in range(hvd.rank() % 2):
                hvd.allreduce(np.ones(2), op=hvd.Sum, name="more")
            hvd.join()

    def _step(self) -> None:
        job, state, script = self.job, self.state, self.script
        if elastic.loop.membership.start() == 0:
            if job.bug == (hvd.rank(), state.step):
                raise ValueError("of the script")
            if job.leaves == (hvd.rank(), state.step):
                raise SystemExit(0)
        if job.stall and (job.stall.rank, job.stall.step) == (hvd.rank(), state.step) and script.stalls:
            script.stalls -= 1
            hvd.allreduce(np.ones(1), op=hvd.Sum, name="of one rank")
        team = self._team() if job.has_team and hvd.size() > 1 else None
        value = value_of(state.step) * (hvd.rank() + 1)
        share = hvd.size() * (hvd.size() + 1) / 2
        if job.in_place:
            state.first += hvd.allreduce(value, op=hvd.Sum, name="first") / share
            hvd.allreduce_(value, op=hvd.Sum, name="second")
            state.second += value / share
        else:
            state.first = state.first + hvd.allreduce(value, op=hvd.Sum, name="first") / share
            state.second = state.second + hvd.allreduce(value, op=hvd.Sum, name="second") / share
        if team is not None and team.included():
            hvd.allreduce(value, op=hvd.Sum, name="of the team", process_set=team)
        if self.samples is not None:
            own = np.zeros(SAMPLES)
            if (sample := next(self.samples, None)) is not None:
                own[sample] = 1
            state.seen = state.seen + hvd.allreduce(own, op=hvd.Sum, name="samples")
            state.sampler.record_batch(0, 1)
        if self.trained is not None:
            self._train_model(self.trained)
        state.model.add(self.number, state.step, script.world.acting().world)
        state.step, state.trail = state.step + 1, state.model.trails[self.number]
        self._check_trained()
        if job.step_seconds:
            time.sleep(job.step_seconds)

    def _train_model(self, trained: Trained) -> None:
        world, before = self.script.world.acting().world, trained.found()
        self.taken = self.taken + 1 if self.in_world == world else 1
        self.in_world = world
        self.promises.writes()
        trained.step(self.state.step)
        if trained.training.way == "powersgd" and hvd.size() > 1:
            # Errors are zero where ranks begin again. So is the change that a step makes the same each time.
            change = [after - one for after, one in zip(trained.found(), before, strict=True)]
            check_parameters(change, self.script.changes.setdefault(self.taken, change), EXACT)

    def _team(self) -> hvd.ProcessSet | None:
        """All ranks but the last one. A process set ends with its world."""
        its, world = part(_Team), self.script.world.acting().world
        if its.world != world:
            its.team, its.world = hvd.add_process_set(range(hvd.size() - 1)), world
        return its.team

    def _check(self) -> None:
        """Raise unless the state has a whole number of steps, and its model has just these of the state's steps."""
        state, model, right = self.state, self.state.model, total_of(self.state.step)
        if self.job.deals_samples:
            done = state.sampler.state_dict()["done"]
            if not np.array_equal(np.sort(state.seen), np.arange(SAMPLES) >= SAMPLES - done):
                raise Wrong(
                    f"after {state.step} steps {done} samples are done, and they were seen so often: {state.seen}"
                )
        self._check_trained()
        if (state.step, state.trail) != (model.steps.get(self.number, 0), model.trails.get(self.number, 0)):
            raise Wrong(f"the model has {model.steps} steps, and state {self.number} has {state.step}, or others")
        for other, its in enumerate(self.states):
            found, least = its.model.steps.get(other, 0), self.end if other < self.number else self.over
            if found < least and (self.job.is_shared or its.is_synced):
                raise Wrong(f"state {other} had {least} steps, and its model has {found} of them")
        whole = sum(map(total_of, model.steps.values()), np.zeros(3))
        for found, expected in ((state.first, right), (state.second, right), (model.total, whole)):
            if not np.array_equal(found, expected):
                raise Wrong(
                    f"after {state.step} steps of state {self.number} it is {state.first}, {state.second} and "
                    f"{model.total}, not {right} and {whole}"
                )

    def _check_trained(self) -> None:
        script, steps = self.script, self.state.step
        if self.trained is None or self._is_in_round():
            return
        assert self.job.training is not None and script.expected is not None
        found, world = self.trained.found(), script.world.acting().world
        expected = script.expected.ended(steps) if self.has_ended else script.expected.after(steps)
        check_parameters(found, expected, self.job.training, script.world.worlds)
        for number, each in enumerate(found):
            script.same_bits.check((world, self.number, steps, self.has_ended, number), each)


def run(job: Job) -> ElasticWorld:
    """Run it.

    Raises:
        Wrong, Stuck, Looped: what must hold does not.
    """
    world = ElasticWorld(
        job.seed,
        job.hosts,
        job.least,
        in_same_processes=job.in_same_processes,
        copy_seconds=job.copy_seconds,
        has_parts=job.has_parts,
        stall_check=job.may_stall,
        stall_check_warning_time_seconds=100,
        stall_check_shutdown_time_seconds=100,
    )
    try:
        world.run_job(Script(job, world), job.faults)
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
    has_stalled = job.may_stall and any(isinstance(problem, StallError) for problem in problems)
    finished = [rank for rank in world.ranks if rank.status == 0]
    has_bug = any(str(rank.problem) == "of the script" and rank.id not in world.unreachable for rank in world.ranks)
    if has_bug and not world.has_failed:
        raise Wrong("a script has failed, and the job has succeeded")
    # A rank that is lost when another one has finished fails the job: nobody goes on without it.
    if world.has_failed and not (has_bug or has_stalled or finished):
        raise Wrong(f"the job has failed: {problems}")
    if not world.has_failed and not finished:
        raise Wrong("the job has succeeded, and no rank came to the end of its script")


_PARTS = (
    *(
        "in_blocks",
        "in_place",
        "is_shared",
        "turns",
        "joins",
        "has_samples",
        "has_team",
        "saves",
        "rests",
        "copy_seconds",
        "step_seconds",
    ),
    *("bug", "leaves", "stall", "training"),
)
"""What a smaller job does without."""


def smaller(job: Job) -> Iterator[Job]:
    """Smaller jobs, to find one that fails, too."""
    for fault in job.faults:
        of_loss = {fault.rank} if fault.kind in ("dies", "host dies", "all die") else set()
        yield replace(job, faults=tuple(each for each in job.faults if each is not fault and each.other not in of_loss))
    if job.phases > 1:
        yield replace(job, phases=job.phases - 1)
    if job.steps > 1:
        yield replace(job, steps=job.steps - 1)
    for each in fields(job):
        simple: dict[str, Any] = {each.name: each.default}
        if each.name in _PARTS and getattr(job, each.name) != each.default:
            yield replace(job, **simple)
