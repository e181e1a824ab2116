"""Elastic jobs in a simulated world. The loop, the states and their copies, and the launcher's decisions are real.

The launcher here starts and kills ranks as `Members` says, and hears of them late. Only what it does with processes,
connections and mpirun is not the launcher's own code.
"""

from __future__ import annotations

import random
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulation.world import Rank, World

from horovodish._native import testing
from horovodish.elastic import membership
from horovodish.launch import failures, run_folder
from horovodish.launcher.elastic.members import Members
from horovodish.launcher.elastic.policy import ElasticPolicy
from horovodish.launcher.job.outcome import Ending, Failure
from horovodish.runtime import basics
from horovodish.runtime.process import part

TICK_SECONDS = 0.5
MOST_STARTS = 12
KILLED = 9
GATHERING_SECONDS, STUCK_SECONDS = 60.0, 30.0


class Looped(AssertionError):
    """The job starts processes again and again."""


@dataclass
class _Last:
    """The phase that a rank has told last."""

    phase: str = ""


class _Answers:
    """A queue whose reader gives way."""

    def __init__(self, world: World):
        self._items: deque[Any] = deque()
        self._world = world

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self) -> Any:
        if not self._items:
            self._world.pause(float("inf"), lambda: bool(self._items))
        return self._items.popleft()


class ElasticWorld(World):
    """A world with a launcher.

    Args:
        seed: of every choice.
        least: with how many ranks the job goes on.
        in_same_processes: whether MPI can go on without a lost rank.
    """

    def __init__(self, seed: int, least: int, *, in_same_processes: bool):
        super().__init__(seed, stall_check=False)
        self._least, self._in_same_processes = least, in_same_processes
        self._reports: dict[int, deque[Callable[[], None]]] = {}  # of a rank, in order
        self._news: dict[int, list[str]] = {}
        self._asked: set[int] = set()
        self._why: dict[int, str] = {}
        self._seen: set[int] = set()  # ranks of whose end the launcher knows
        self._ticks_at = 0.0
        self.starts = 0
        self.is_done = self.has_failed = False

    def run_job(self, hosts: Sequence[Sequence[int]], script: Callable[[], Any], faults: Any) -> bool:
        """Run a job. Returns whether it has succeeded."""
        self._hosts, self._script = hosts, script
        with tempfile.TemporaryDirectory(prefix="hvd-simulated-", dir="/dev/shm") as folder:
            self._folders = [Path(folder, str(host)) for host in range(len(hosts))]
            for each in self._folders:
                each.mkdir(mode=0o700)
            self.run(hosts, script, faults)
        return not self.has_failed

    def is_over(self) -> bool:
        return self.is_done and super().is_over()

    def begin(self, hosts: Sequence[Sequence[int]], script: Callable[[], Any], start: int) -> list[Rank]:
        begun = super().begin(hosts, script, start)
        earlier = self.members if start else None
        self.members = Members(
            len(begun), self._least, self._in_same_processes, GATHERING_SECONDS, STUCK_SECONDS, held=False
        )
        if earlier:
            self.members.follow(earlier)
        self.policy = ElasticPolicy(self.members)
        self.current = begun
        self.starts = start + 1
        self._is_ending = False
        for rank in begun:
            self._reports[rank.id], self._news[rank.id] = deque(), []
            with rank.process.entered():
                part(membership._Told).answers = _Answers(self)  # type: ignore[assignment]
        return begun

    # -- the launcher

    def others(self) -> list[Callable[[], None]]:
        if self.is_done:
            return []
        events = [reports.popleft for reports in self._reports.values() if reports]
        found: list[Callable[[], None]] = [lambda take=take: self._hear(take) for take in events]  # type: ignore[misc]
        return [*found, self._tick] if testing.clock() >= self._ticks_at else found

    def wakes(self) -> list[float]:
        return super().wakes() if self.is_done else [*super().wakes(), self._ticks_at]

    def _hear(self, take: Callable[[], Callable[[], None]]) -> None:
        take()()
        self._moved_at = testing.clock()
        self._tick()

    def _tick(self) -> None:
        now = testing.clock()
        self._ticks_at = now + TICK_SECONDS
        orders = self.policy.take_orders((), now)
        for number, line in orders.news:
            self.note(f"launcher tells rank {self.current[number].id}: {line}")
            self._news[self.current[number].id].append(line)
        for number, why in orders.kill:
            self._why[self.current[number].id] = why
            self._end(self.current[number])
        if orders.asks:
            for rank in self.current:
                if not rank.is_over:
                    self.policy.answered(rank.number, "T" if rank.sleeps_until > now else "S", now)
        if orders.ends or self._is_ending:
            for rank in self.current:
                self._asked.add(rank.id)
                self._end(rank)
        if all(rank.id in self._seen for rank in self.current):
            self._follow()

    def _end(self, rank: Rank) -> None:
        if not rank.is_over:
            self.note(f"launcher ends rank {rank.id}")
            self.kill(rank)

    def kill(self, rank: Rank) -> None:
        super().kill(rank)
        ending = Ending(rank.number, testing.clock(), KILLED, rank.id in self._asked, self._why.get(rank.id, ""))
        self._reports[rank.id].append(lambda: self._ended(rank, ending))

    def at_end(self, rank: Rank, status: int) -> None:
        run_folder.reached("exit", status)
        failure = None
        if rank.problem is not None:
            lost = basics.loss()
            is_consequence = any(failures.says_so(each, lost) for each in failures.chain(rank.problem))
            failure = Failure(rank.number, testing.clock(), repr(rank.problem), "", is_consequence)
        ending = Ending(rank.number, testing.clock(), status << 8, rank.id in self._asked)
        self._reports[rank.id].append(lambda: self._ended(rank, ending, failure))

    def _ended(self, rank: Rank, ending: Ending, failure: Failure | None = None) -> None:
        self._seen.add(rank.id)
        now = testing.clock()
        if failure is not None:
            self.policy.fail(failure, now)
        is_needed = rank.process[_Last].phase != "exit"
        goes_on = self.policy.go_on_without(ending, str(rank.host), now, is_needed=is_needed)
        if not goes_on and not ending.asked:
            self.note(f"the job ends because of rank {rank.id}")
            self._is_ending = True

    def _follow(self) -> None:
        """All processes have ended: the job is over, or new ones go on."""
        members = self.members
        is_done = members.finished and not members.saved
        begins = members.has_begun or members.worlds > 0 or self.starts > 1
        if is_done or members.none_shall_go_on or not begins:
            self.is_done = True
            self.has_failed = not members.are_done
            return
        if self.starts == MOST_STARTS:
            raise Looped(f"{MOST_STARTS} starts")
        chance = random.Random(self.events)
        hosts, number = [], 0
        slots = [1 + chance.randrange(len(host)) for host in self._hosts]
        while sum(slots) < self._least:
            slots = [len(host) for host in self._hosts]
        for count in slots:
            hosts.append(list(range(number, number + count)))
            number += count
        self.note(f"launcher starts {hosts}")
        self.begin(hosts, self._script, self.starts)

    # -- what a rank sees of it

    def instead(self) -> list[tuple[Any, str, Any]]:
        def reached(phase: str, *details: int) -> None:
            rank = self.acting()
            now = testing.clock
            part(_Last).phase = phase
            self._reports[rank.id].append(lambda: self.policy.reached(rank.number, phase, now(), *details))

        return [
            *super().instead(),
            (run_folder, "reached", reached),
            (run_folder, "news", lambda heard: self._news[self.acting().id][heard:]),
            (run_folder, "is_followed", lambda: True),
            (run_folder, "await_go", self._await_go),
            (membership, "is_elastic", lambda: True),
            (membership, "start", lambda: self.acting().start),
            (membership, "state_folder", lambda: self._folders[self.acting().host]),
            (membership, "_LOOK_SECONDS", TICK_SECONDS),
            (membership, "_thread", self._thread),
            (membership.gc, "freeze", lambda: None),
        ]

    def _await_go(self) -> None:
        own = self.acting()
        while not any(line.startswith(run_folder.GO) for line in self._news[own.id]):
            self.pause(testing.clock() + TICK_SECONDS)

    def _thread(self, target: Callable[..., None], name: str, *arguments: Any) -> Any:
        self.spawn(self.acting(), target, *arguments)
        return name
