"""Random programs for the ranks of a world: what they do, what goes wrong meanwhile, and what must hold."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from simulation.ranks import Fault, Rank
from simulation.world import Stuck, World

import horovodish as hvd
from horovodish.errors import HorovodInternalError, MismatchError

LAYOUTS = [
    *([[0, 1]], [[0, 1, 2]], [[0, 1, 2, 3]], [[0], [1]], [[0], [1], [2]]),
    *([[0, 1], [2]], [[0, 1], [2, 3]], [[0, 1, 2], [3, 4]], [[0, 1], [2, 3], [4, 5]]),
]
ROWS = (1, 3, 40, 3000)  # of which some need several chunks
LATEST_EVENT = 600
KINDS = ("allreduce", "allreduce", "allreduce", "allgather", "broadcast", "reducescatter", "alltoall", "grouped")


T = TypeVar("T")


class Wrong(AssertionError):
    """Something does not hold that must."""


@dataclass(frozen=True)
class Step:
    """A collective.

    Attributes:
        kind: one of `KINDS`.
        name: at most one of a name is under way.
        rows: of the tensor.
        team: the number of its process set; 0: all ranks.
        root: of a broadcast, among the ranks of the set.
        wrong: the rank that passes another shape; -1: none.
    """

    kind: str
    name: str
    rows: int
    team: int
    root: int
    wrong: int


@dataclass(frozen=True)
class Program:
    """What the ranks do.

    Attributes:
        hosts: the ranks of each.
        teams: process sets beside that of all ranks.
        steps: of every rank, in this order.
        ends: by rank, after how many steps it joins; None: after all of them.
        leaves, raises: a rank and the step before which it ends its script, in order or with an error.
        faults: from outside.
        seed: of every choice that the ranks and the world make.
    """

    hosts: list[list[int]]
    teams: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]
    ends: tuple[int, ...] | None
    leaves: tuple[int, int] | None
    raises: tuple[int, int] | None
    faults: tuple[Fault, ...]
    seed: int

    @property
    def size(self) -> int:
        return sum(map(len, self.hosts))


def program_of(seed: int) -> Program:
    """The program with this number."""
    chance = random.Random(seed)
    hosts = chance.choice(LAYOUTS)
    size = sum(map(len, hosts))
    count = chance.randrange(1, 13)
    uneven = chance.random() < 0.25
    teams = [] if uneven or chance.random() < 0.6 else [tuple(sorted(chance.sample(range(size), k))) for k in (2, size)]
    teams = [team for team in dict.fromkeys(teams) if len(team) < size]
    names = chance.randrange(1, 6)
    steps = []
    for _ in range(count):
        team = chance.randrange(1 + len(teams))
        members = teams[team - 1] if team else range(size)
        steps.append(
            Step(
                chance.choice(("allreduce", "allgather") if uneven else KINDS),
                f"t{chance.randrange(names)} of {team}",
                chance.choice(ROWS),
                team,
                chance.choice(members),
                chance.choice(members) if chance.random() < 0.04 and not uneven else -1,
            )
        )
    ends = tuple(chance.choice((count, chance.randrange(count + 1))) for _ in range(size)) if uneven else None
    leaves = raises = None
    what = chance.random()
    if what < 0.08 and not uneven:
        leaves = chance.randrange(size), chance.randrange(count)
    elif what < 0.16:
        raises = chance.randrange(size), chance.randrange(count)
    faults = tuple(_faults(chance, size)) if chance.random() < 0.6 else ()
    return Program(hosts, tuple(teams), tuple(steps), ends, leaves, raises, faults, seed)


def _faults(chance: random.Random, size: int) -> Iterator[Fault]:
    for rank in range(size):
        if chance.random() < 0.2:
            yield Fault(chance.randrange(LATEST_EVENT), "sleeps", rank, seconds=chance.choice((0.5, 5.0, 50.0)))
    dying = chance.sample(range(size), chance.choice((0, 1, 1, 1, min(2, size - 1))))
    for lost in dying:
        event, latest = chance.randrange(LATEST_EVENT), chance.choice((400, 3000))
        yield Fault(event, "dies", lost)
        for rank in range(size):
            if rank == lost:
                continue
            if chance.random() < 0.3:
                yield Fault(event + chance.randrange(1, 200), "mpi hears", rank, lost)
            yield Fault(event + chance.randrange(1, latest), "hears", rank, lost)


def value_of(rank: int, step: int, rows: int) -> np.ndarray:
    return np.arange(rows, dtype=np.float32) % 7 + rank * 10 + step


class Script:
    """What a rank of a program does, and what it expects."""

    def __init__(self, program: Program):
        self.program = program

    def __call__(self) -> None:
        program, rank = self.program, hvd.rank()
        chance = random.Random(program.seed * 64 + rank)
        sets = [hvd.global_process_set, *(hvd.add_process_set(team) for team in program.teams)]
        pending: dict[str, tuple[int, Any]] = {}
        count = program.ends[rank] if program.ends else len(program.steps)
        for number, step in enumerate(program.steps[:count]):
            if program.leaves == (rank, number):
                return
            if program.raises == (rank, number):
                raise ValueError("of the script")
            if not sets[step.team].included():
                continue
            if step.name in pending:
                self._wait(*pending.pop(step.name))
            pending[step.name] = number, self._begin(step, number, sets[step.team])
            while pending and chance.random() < 0.4:
                self._wait(*pending.pop(chance.choice(list(pending))))
        for number, handle in pending.values():
            self._wait(number, handle)
        if program.ends:
            hvd.join()
        hvd.barrier()

    def _begin(self, step: Step, number: int, team: hvd.ProcessSet) -> Any:
        rank = hvd.rank()
        rows = step.rows + (step.wrong == rank)
        array = value_of(rank, number, rows)
        options: dict[str, Any] = {"name": step.name, "process_set": team}
        if step.kind == "allreduce":
            return hvd.allreduce_async(array, op=hvd.Sum, **options)
        if step.kind == "grouped":
            return hvd.grouped_allreduce_async([array, array[:1] * 2], op=hvd.Sum, **options)
        if step.kind == "allgather":
            own = array[: (rank + number) % (rows + 1)]
            return hvd.allgather_async(own[:, None] if step.wrong == rank else own, **options)
        if step.kind == "broadcast":
            return hvd.broadcast_async(array, root_rank=step.root, **options)
        if step.kind == "reducescatter":
            return hvd.reducescatter_async(array, op=hvd.Sum, **options)
        splits = _splits(rank, number, team.ranks)
        own = np.repeat(np.float32(rank * 10 + number), sum(splits))
        return hvd.alltoall_async(own[:, None] if step.wrong == rank else own, splits=splits, **options)

    def _wait(self, number: int, handle: Any) -> None:
        step = self.program.steps[number]
        try:
            found = handle.wait()
        except MismatchError:
            if step.wrong < 0:
                raise
            return
        if step.wrong >= 0:
            raise Wrong(f"step {number}: rank {step.wrong} passed another shape, and no rank was told")
        if step.kind == "alltoall":
            found = found[0]
        for one, other in zip(
            *((each if isinstance(each, list) else [each]) for each in (found, self._right(step, number))), strict=True
        ):
            if not np.array_equal(one, other):
                raise Wrong(f"step {number}: {step.kind} gave {one}, not {other}")

    def _right(self, step: Step, number: int) -> Any:
        rank, ends = hvd.rank(), self.program.ends
        team = self.program.teams[step.team - 1] if step.team else range(hvd.size())
        there = [each for each in team if not ends or number < ends[each]]
        values = {each: value_of(each, number, step.rows) for each in there}
        total = sum(values.values())
        if step.kind == "allreduce":
            return total
        if step.kind == "grouped":
            return [total, total[:1] * 2]
        if step.kind == "allgather":
            return np.concatenate([values[each][: (each + number) % (step.rows + 1)] for each in there])
        if step.kind == "broadcast":
            return values[step.root]
        place = list(team).index(rank)
        if step.kind == "reducescatter":
            rows, more = divmod(step.rows, len(team))
            begin = place * rows + min(place, more)
            return total[begin : begin + rows + (place < more)]
        counts = {each: _splits(each, number, team)[place] for each in team}
        return np.concatenate([np.repeat(np.float32(each * 10 + number), counts[each]) for each in team])


def _splits(rank: int, number: int, team: Any) -> list[int]:
    return [(rank + 2 * other + number) % 4 for other in team]


def run(program: Program) -> World:
    """Run it.

    Raises:
        Wrong, Stuck: what must hold does not.
    """
    world = World(program.seed, stall_check=False)
    try:
        ranks = world.run(program.hosts, Script(program), program.faults)
        check(program, ranks)
    except AssertionError as problem:
        problem.add_note("\n".join(world.trace[-40:]))
        raise
    return world


def check(program: Program, ranks: list[Rank]) -> None:
    """Raise `Wrong` unless the ranks have ended as they must."""
    lost = {fault.rank for fault in program.faults if fault.kind == "dies" and ranks[fault.rank].is_dead}
    told = {fault.rank: fault.other for fault in program.faults if fault.kind == "hears"}
    guilty = lost | {each[0] for each in (program.leaves, program.raises) if each}
    for rank in ranks:
        problem = rank.problem
        if rank.is_dead or problem is None:
            continue
        if program.raises and rank.id == program.raises[0] and str(problem) == "of the script":
            continue
        if not isinstance(problem, HorovodInternalError):
            raise Wrong(f"rank {rank.id} raised {problem!r}") from problem
        if not guilty:
            raise Wrong(f"rank {rank.id} raised {problem!r}, and no rank was lost")
        named = [number for number in guilty if f"rank {number} " in str(problem)]
        if not named and rank.id not in told:
            raise Wrong(f"rank {rank.id} raised {problem!r}, and ranks {sorted(guilty)} were lost")


def shrunk(failing: T, fails: Callable[[T], bool], smaller: Callable[[T], Iterator[T]]) -> T:
    """What fails, too, and of which nothing smaller does."""
    while (candidate := next(filter(fails, smaller(failing)), None)) is not None:
        failing = candidate
    return failing


def smaller(program: Program) -> Iterator[Program]:
    """Smaller programs, to find one that fails, too."""
    half = len(program.steps) // 2
    if half and not program.ends:
        yield replace(program, steps=program.steps[:half])
    for fault in program.faults:
        of_loss = {fault.rank} if fault.kind == "dies" else set()  # of which the launcher tells the others
        if fault.kind != "hears":
            left = tuple(each for each in program.faults if each is not fault and each.other not in of_loss)
            yield replace(program, faults=left)
    for index in range(len(program.steps)):
        if len(program.steps) > 1 and not program.ends:
            yield replace(program, steps=program.steps[:index] + program.steps[index + 1 :])
    if program.teams and not any(step.team for step in program.steps):
        yield replace(program, teams=())
    for index, step in enumerate(program.steps):
        if step.rows > 1:
            smaller = replace(step, rows=1)
            yield replace(program, steps=(*program.steps[:index], smaller, *program.steps[index + 1 :]))


__all__ = ["Program", "Stuck", "Wrong", "check", "program_of", "run", "shrunk", "smaller"]
