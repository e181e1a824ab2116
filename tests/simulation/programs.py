"""Random programs for the ranks of a world: what they do, what goes wrong meanwhile, and what must hold."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from simulation.ranks import Fault, Rank, Wrong
from simulation.trainings import HAS_TORCH, SYNC, Expected, Trained, Training, check_parameters, training_of
from simulation.world import Stuck, World

import horovodish as hvd
from horovodish.collectives.adapter import only
from horovodish.collectives.array_adapter import ARRAYS
from horovodish.collectives.codecs import Compression
from horovodish.collectives.operation import Family, Operation
from horovodish.collectives.submission import submit
from horovodish.collectives.transfers import receive, send
from horovodish.errors import HorovodInternalError, MismatchError, StallError
from horovodish.gradients.shards import own_parts

LAYOUTS = [
    *([[0, 1]], [[0, 1, 2]], [[0, 1, 2, 3]], [[0], [1]], [[0], [1], [2]]),
    *([[0, 1], [2]], [[0, 1], [2, 3]], [[0, 1, 2], [3, 4]], [[0, 1], [2, 3], [4, 5]]),
]
ROWS = (1, 3, 40, 3000)  # some need several chunks
LATEST_EVENT = 600
CODECS = {
    "int8": (Compression.int8, 1 / 254),
    "int4": (Compression.int4, 1 / 14),
    "ternary": (Compression.ternary, 1.0),
    "onebit": (Compression.onebit, 1.0),
    "topk": (Compression.topk(0.1), 1.0),
    "randomk": (Compression.randomk(0.1), 1.0),
}
"""Allreduces with a codec, and how much of the largest value a code may leave out."""
BY_ELEMENTS = ("allgather by elements", "reducescatter by elements")
KINDS = (
    *("allreduce", "allreduce", "allreduce", "allgather", "broadcast", "reducescatter", "alltoall", "grouped"),
    *("exchange", "exchange", "tree", "tree", *BY_ELEMENTS, *CODECS),
)


T = TypeVar("T")


@dataclass(frozen=True)
class Step:
    """A collective.

    Attributes:
        kind: one of `KINDS`, or "train": the optimizer of the program takes a step. In an "exchange" each rank sends
            two tensors to one rank and receives two from another one. A "tree" is a family of allreduces.
        name: at most one of a name is under way.
        rows: of the tensor.
        team: the number of its process set; 0: all ranks.
        root: of a broadcast, among the ranks of the set; of an exchange, it says which pairs there are.
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
        teams: process sets besides the set of all ranks.
        steps: of every rank, in this order.
        ends: by rank, after how many steps it joins; None: after all of them.
        leaves, raises: a rank and the step before which it ends its script, in order or with an error.
        faults: from outside.
        seed: of every choice that the ranks and the world make.
        training: the optimizer of the steps that train.
        trains: the number of the process set that reduces its gradients.
        cache_capacity: how many requests an engine remembers.
    """

    hosts: list[list[int]]
    teams: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]
    ends: tuple[int, ...] | None
    leaves: tuple[int, int] | None
    raises: tuple[int, int] | None
    faults: tuple[Fault, ...]
    seed: int
    training: Training | None = None
    trains: int = 0
    cache_capacity: int = 8

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
        kind = chance.choice(("allreduce", "allgather", "tree", *CODECS) if uneven else KINDS)
        often_wrong = 0.3 if kind == "tree" else 0.04
        steps.append(
            Step(
                kind,
                f"t{chance.randrange(names)} of {team}",
                chance.choice(ROWS),
                team,
                chance.choice(members),
                chance.choice(members) if chance.random() < often_wrong and not uneven else -1,
            )
        )
    training, trains = None, 0
    if HAS_TORCH and not uneven and chance.random() < 0.5:
        training, trains = training_of(chance), chance.randrange(1 + len(teams))
        share = 1.0 if training.way == "late" else 0.6
        train = Step("train", "training", 0, trains, 0, -1)
        steps = [train if chance.random() < share else each for each in steps]
    ends = tuple(chance.choice((count, chance.randrange(count + 1))) for _ in range(size)) if uneven else None
    leaves = raises = None
    what = chance.random()
    if what < 0.08 and not uneven:
        leaves = chance.randrange(size), chance.randrange(count)
    elif what < 0.16:
        raises = chance.randrange(size), chance.randrange(count)
    faults = tuple(_faults(chance, size)) if chance.random() < 0.6 else ()
    if len(hosts) > 1 and chance.random() < 0.1:
        sender, receiver = (chance.choice(host) for host in chance.sample(hosts, 2))
        faults = (Fault(chance.randrange(LATEST_EVENT), "drops", sender, receiver),)
    capacity = chance.choice((2, 8, 8, 8))
    if capacity == 2:  # a request leaves the cache while some ranks submit it again
        steps = [chance.choice(steps[:3]) for _ in steps]
    return Program(hosts, tuple(teams), tuple(steps), ends, leaves, raises, faults, seed, training, trains, capacity)


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


class _Exchange(NamedTuple):
    """The receives and the sends of a rank."""

    targets: list[np.ndarray]
    handles: list[Any]

    def wait(self) -> list[np.ndarray]:
        for handle in self.handles:
            handle.wait()
        return self.targets


class _Tree(NamedTuple):
    """Operations that fail together."""

    handles: list[Any]

    def wait(self) -> list[np.ndarray]:
        found, problems = [], []
        for handle in self.handles:
            try:
                found.append(handle.wait())
            except MismatchError as problem:
                problems.append(problem)
        if problems:
            raise problems[0]
        return found


class SameBits:
    """Results that must have the same bits on all ranks, by what tells them from others."""

    def __init__(self) -> None:
        self._first: dict[Hashable, tuple[int, bytes]] = {}

    def check(self, key: Hashable, found: np.ndarray) -> None:
        """Raise `Wrong` if another rank has found other bits."""
        rank, bits = self._first.setdefault(key, (hvd.rank(), found.tobytes()))
        if bits != found.tobytes():
            raise Wrong(f"{key}: rank {hvd.rank()} has {found}, and rank {rank} has other bits")


class Script:
    """What a rank of a program does, and what it expects."""

    def __init__(self, program: Program):
        self.program = program
        self._decoded = SameBits()
        if program.training is not None:
            hosts = [[rank for rank in host if rank in self._team(program.trains)] for host in program.hosts]
            ranks = list(self._team(program.trains))
            self._expected = Expected(
                program.training, [[ranks.index(rank) for rank in host] for host in hosts if host]
            )

    def __call__(self) -> None:
        program, rank = self.program, hvd.rank()
        chance = random.Random(program.seed * 64 + rank)
        sets = [hvd.global_process_set, *(hvd.add_process_set(team) for team in program.teams)]
        trained = _Training(self, sets[program.trains]) if program.training else None
        pending: dict[str, tuple[int, Any]] = {}
        count = program.ends[rank] if program.ends else len(program.steps)
        for number, step in enumerate(program.steps[:count]):
            if program.leaves == (rank, number):
                return
            if program.raises == (rank, number):
                raise ValueError("of the script")
            if not sets[step.team].included():
                continue
            if trained and step.kind == "train":
                trained.step()
                continue
            if step.name in pending:
                self._wait(*pending.pop(step.name))
            pending[step.name] = number, self._begin(step, number, sets[step.team])
            while pending and chance.random() < 0.4:
                self._wait(*pending.pop(chance.choice(list(pending))))
        for number, handle in pending.values():
            self._wait(number, handle)
        if trained and sets[program.trains].included():
            trained.end()
        if program.ends:
            self._join()
        elif program.training and program.training.way == "late":
            hvd.join()
        hvd.barrier()

    @staticmethod
    def _join() -> None:
        """Join, and submit meanwhile, as another thread of a rank may do."""
        operation = Operation("join", "join.noname.one", hvd.global_process_set)
        joined = submit(operation, [], None, lambda native: native.last_joined(), waits=True)
        meanwhile = hvd.allreduce_async(np.ones(1), op=hvd.Sum, name="meanwhile")
        joined.wait()
        if (found := meanwhile.wait()) != hvd.size():
            raise Wrong(f"{found} ranks took part in an allreduce that was submitted before all had joined")

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
        if step.kind in CODECS:
            operation = Operation("allreduce", step.name, team, hvd.Sum)
            return ARRAYS.start(CODECS[step.kind][0].applied(operation), [array], only)
        if step.kind in BY_ELEMENTS:
            return self._begin_by_elements(step, array, team)
        if step.kind == "exchange":
            return self._begin_exchange(step, array, team)
        if step.kind == "tree":
            return self._begin_tree(step, number, array, team)
        splits = _splits(rank, number, team.ranks)
        own = np.repeat(np.float32(rank * 10 + number), sum(splits))
        return hvd.alltoall_async(own[:, None] if step.wrong == rank else own, splits=splits, **options)

    @staticmethod
    def _begin_by_elements(step: Step, array: np.ndarray, team: hvd.ProcessSet) -> Any:
        kind, target = step.kind.split()[0], np.zeros_like(array)
        op = hvd.Sum if kind == "reducescatter" else None
        operation = Operation(kind, step.name, team, op, by_elements=True)
        result = _part(len(array), team.rank(), team.size()) if op else slice(None)
        member = ARRAYS.member(array, target, step.name, op)
        return submit(operation, [member], (array, target), lambda _: target[result])

    @staticmethod
    def _begin_exchange(step: Step, array: np.ndarray, team: hvd.ProcessSet) -> _Exchange:
        sender, receiver = _pair(step, hvd.rank(), team.ranks)
        tags = 2 * step.root, 2 * step.root + 1
        targets = [np.zeros_like(array) for _ in tags]
        handles = [
            receive(ARRAYS, target, sender, tag, process_set=team) for target, tag in zip(targets, tags, strict=True)
        ]
        sent = array[: step.rows]
        handles += [
            send(ARRAYS, each, receiver, tag, process_set=team) for each, tag in ((-sent, tags[1]), (sent, tags[0]))
        ]
        return _Exchange(targets, handles)

    def _begin_tree(self, step: Step, number: int, array: np.ndarray, team: hvd.ProcessSet) -> _Tree:
        """The ranks submit the parts in other orders and at other times. The first is wrong on a wrong rank."""
        tree = _tree_of(array, array[: step.rows])
        handles = {}
        chance = random.Random(self.program.seed + 64 * number + hvd.rank())
        for part in chance.sample(range(len(tree)), len(tree)):
            time.sleep(chance.choice((0, 0.01)))
            family = Family(step.name, len(tree), 0, number + 1)
            operation = Operation("allreduce", f"{step.name}.{part}", team, hvd.Sum, family=family)
            handles[part] = ARRAYS.start(operation, [tree[part]], only)
        return _Tree([handles[part] for part in range(len(tree))])

    def _wait(self, number: int, handle: Any) -> None:
        step = self.program.steps[number]
        try:
            found = handle.wait()
        except MismatchError:
            if step.wrong < 0 or hvd.rank() not in self._told(step):
                raise
            return
        if step.wrong >= 0 and (step.kind != "exchange" or step.wrong == hvd.rank()):
            raise Wrong(f"step {number}: rank {step.wrong} passed another shape, and no rank was told")
        if step.kind == "alltoall":
            found = found[0]
        right = self._right(step, number)
        if step.kind in CODECS and len(self.program.hosts) > 1:
            self._decoded.check(number, found)
            self._check_near(step, number, found, right)
            return
        for one, other in zip(*((each if isinstance(each, list) else [each]) for each in (found, right)), strict=True):
            if not np.array_equal(one, other):
                raise Wrong(f"step {number}: {step.kind} gave {one}, not {other}")

    def _told(self, step: Step) -> Any:
        """The ranks that hear of another shape."""
        team = self._team(step.team)
        return (step.wrong, _pair(step, step.wrong, team)[0]) if step.kind == "exchange" else team

    def _team(self, number: int) -> Any:
        return self.program.teams[number - 1] if number else range(self.program.size)

    def _check_near(self, step: Step, number: int, found: np.ndarray, right: np.ndarray) -> None:
        """Each host encodes its sum, and then one of them encodes the sum of all."""
        largest = [np.abs(value_of(each, number, step.rows)).max(initial=0) for each in self._team(step.team)]
        most = 2 * sum(largest) * CODECS[step.kind][1]
        if not np.all(np.abs(found - right) <= 1.5 * most):
            raise Wrong(f"step {number}: {step.kind} gave {found}, not nearly {right}")

    def _right(self, step: Step, number: int) -> Any:
        rank, ends, team = hvd.rank(), self.program.ends, self._team(step.team)
        there = [each for each in team if not ends or number < ends[each]]
        values = {each: value_of(each, number, step.rows) for each in there}
        total = sum(values.values())
        if step.kind == "allreduce" or step.kind in CODECS:
            return total
        if step.kind == "exchange":
            sent = values[_pair(step, rank, team)[0]]
            return [sent, -sent]
        if step.kind == "grouped":
            return [total, total[:1] * 2]
        if step.kind == "tree":
            return _tree_of(total, total)
        if step.kind == "allgather":
            return np.concatenate([values[each][: (each + number) % (step.rows + 1)] for each in there])
        if step.kind == "broadcast":
            return values[step.root]
        place = list(team).index(rank)
        if step.kind == "reducescatter by elements":
            return total[_part(step.rows, place, len(team))]
        if step.kind == "allgather by elements":
            parts = [_part(step.rows, each, len(team)) for each in range(len(team))]
            return np.concatenate([values[each][part] for each, part in zip(team, parts, strict=True)])
        if step.kind == "reducescatter":
            rows, more = divmod(step.rows, len(team))
            begin = place * rows + min(place, more)
            return total[begin : begin + rows + (place < more)]
        counts = {each: _splits(each, number, team)[place] for each in team}
        return np.concatenate([np.repeat(np.float32(each * 10 + number), counts[each]) for each in team])


class _Training:
    """A rank trains in the steps of a program that train."""

    def __init__(self, script: Script, team: hvd.ProcessSet):
        assert script.program.training is not None
        self._script, self._team, self._training = script, team, script.program.training
        self._trained = Trained(script.program.training, team)
        self._steps = 0

    def step(self) -> None:
        self._trained.step(self._steps)
        self._steps = getattr(self._trained.optimizer, "steps", self._steps + 1)  # those that it has missed, too
        losses = 1 if self._training.way == "powersgd" else len(self._script.program.hosts) > 1
        expected = self._script._expected.after(self._steps, self._team.rank())
        check_parameters(self._trained.found(), expected, self._training, losses)
        if self._training.way not in SYNC:
            self._same_bits(self._trained.found(), self._steps)
        elif self._steps % 3 == 0:
            self._same_bits(self._trained.look(), self._steps)

    def end(self) -> None:
        self._trained.end()
        if self._training.way != "late":  # there, ranks take the steps that they have missed when they join
            self._same_bits(self._trained.found(), "the end")
            check_parameters(self._trained.found(), self._script._expected.ended(self._steps), self._training, 1)

    def _same_bits(self, found: Any, when: object) -> None:
        for number, each in enumerate(found):
            self._script._decoded.check(f"parameter {number} after {when}", each)


def _tree_of(first: np.ndarray, others: np.ndarray) -> list[np.ndarray]:
    return [first, others[:1] * 2, -others]


def _part(rows: int, place: int, ranks: int) -> slice:
    return slice(*own_parts([rows], place, ranks)[0])


def _pair(step: Step, rank: int, team: Any) -> tuple[int, int]:
    """From whom a rank receives in an exchange, and to whom it sends."""
    ranks = list(team)
    place, distance = ranks.index(rank), 1 + ranks.index(step.root) % (len(ranks) - 1)
    return ranks[place - distance], ranks[(place + distance) % len(ranks)]


def _splits(rank: int, number: int, team: Any) -> list[int]:
    return [(rank + 2 * other + number) % 4 for other in team]


def run(program: Program) -> World:
    """Run it.

    Raises:
        Wrong, Stuck: what must hold does not.
    """
    world = World(
        program.seed,
        cache_capacity=program.cache_capacity,
        stall_check=any(fault.kind == "drops" for fault in program.faults),
        stall_check_warning_time_seconds=100,
        stall_check_shutdown_time_seconds=100,
    )
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
    guilty = lost | {each for fault in program.faults if fault.kind == "drops" for each in (fault.rank, fault.other)}
    guilty |= {each[0] for each in (program.leaves, program.raises) if each}
    if guilty and not _is_of_all_ranks(program):  # a rank that has stalled ends, so others lose it
        guilty |= {rank.id for rank in ranks if isinstance(rank.problem, StallError)}
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
        named = [number for number in guilty if re.search(rf"rank {number}\b", str(problem))]
        # The ranks of a transfer or a process set know who waits there for whom, but not what keeps a rank elsewhere.
        may_wait_elsewhere = isinstance(problem, StallError) and not _is_of_all_ranks(program)
        if not named and rank.id not in told and not may_wait_elsewhere:
            raise Wrong(f"rank {rank.id} raised {problem!r}, and ranks {sorted(guilty)} were lost")


def _is_of_all_ranks(program: Program) -> bool:
    """Whether all ranks take part in each operation."""
    is_late = program.training is not None and program.training.way in ("late", "sets")
    return not (program.teams or is_late or any(step.kind == "exchange" for step in program.steps))


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
    if program.training and not any(step.kind == "train" for step in program.steps):
        yield replace(program, training=None, trains=0)
    if program.teams and not program.trains and not any(step.team for step in program.steps):
        yield replace(program, teams=())
    for index, step in enumerate(program.steps):
        if step.rows > 1:
            smaller = replace(step, rows=1)
            yield replace(program, steps=(*program.steps[:index], smaller, *program.steps[index + 1 :]))


__all__ = ["Program", "Stuck", "Wrong", "check", "program_of", "run", "shrunk", "smaller"]
