"""Elastic jobs in a simulated world. The loop, the states and their copies, and the launcher's decisions are real.

The launcher here starts and kills ranks as `Members` says, and hears of them late. Only what it does with processes,
connections and mpirun is not the launcher's own code.
"""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simulation.promises import Promises
from simulation.ranks import Fault, Rank
from simulation.world import START_SECONDS, World

from horovodish._native import testing
from horovodish.elastic import membership, memory
from horovodish.launch import failures, run_folder
from horovodish.launcher.elastic.members import TRAINING, Members
from horovodish.launcher.elastic.policy import ElasticPolicy
from horovodish.launcher.elastic.slots import Slots
from horovodish.launcher.hosts.allocation import Allocation, Host
from horovodish.launcher.job.outcome import LEFT_STATE, Ending, Failure
from horovodish.launcher.options import LaunchOptions
from horovodish.mpi import binding
from horovodish.runtime import basics
from horovodish.runtime.process import part

TICK_SECONDS = 0.5
MOST_WORLDS = 16
SLOTS_COME_BACK_SECONDS = 200.0
"""Whatever has taken them."""
KILLED = 9
GATHERING_SECONDS, STUCK_SECONDS = 60.0, 30.0


class Looped(AssertionError):
    """The job begins again and again."""


@dataclass
class _Own:
    """What a rank has to itself.

    Attributes:
        phase: that it has told last.
        seconds: of the processor that it has used.
        reports: to the launcher, under way.
        news: from the launcher.
    """

    phase: str = ""
    seconds: float = START_SECONDS
    reports: deque[Callable[[], None]] = field(default_factory=deque)
    news: list[str] = field(default_factory=list)


class _Hosts:
    """Finds hosts as `Discovery` does.

    Args:
        slots: of each host.
    """

    def __init__(self, slots: list[int]):
        self.slots = slots

    def found(self) -> Allocation:
        """The hosts that have slots now."""
        return Allocation(tuple(Host(str(place), count) for place, count in enumerate(self.slots) if count), "")


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
    """A world with a launcher. Further faults:

    "host dies", with its ranks and memory; "all die", ranks of all hosts; "is cut off": the launcher loses touch with a
    rank; "has no room": the memory of its host; "slots": its host has `count` slots from now on; "makes room": there
    are new slots, and after "no room" there are none.

    Args:
        seed: of every choice.
        hosts: the ranks of each.
        least: with how many ranks the job goes on.
        in_same_processes: whether MPI can go on without a lost rank.
        copy_seconds: of the processor, that a copy of a state takes.
        has_parts: whether each rank has a part of the state, so that commits are copied together or not at all.
        options: settings of `horovodish.settings`.

    Attributes:
        promises: what recoveries continue from.
        starts: how often the launcher has started processes.
        unreachable: the ids of ranks with which the launcher has lost touch.
        is_done: whether the job is over.
        has_failed: whether it has failed.
    """

    def __init__(
        self,
        seed: int,
        hosts: Sequence[Sequence[int]],
        least: int,
        *,
        in_same_processes: bool,
        copy_seconds: float,
        has_parts: bool,
        **options: Any,
    ):
        super().__init__(seed, **options)
        self._all = [len(host) for host in hosts]
        self._least, self._in_same_processes, self._copy_seconds = least, in_same_processes, copy_seconds
        self._hosts: Any = _Hosts(list(self._all))
        self._slots = Slots(LaunchOptions(min_np=least, max_np=sum(self._all)), self._hosts)
        self._asked: set[int] = set()
        self._why: dict[int, str] = {}
        self._seen: set[int] = set()  # ranks of whose end the launcher knows
        self.unreachable: set[int] = set()
        self._ticks_at = self._waits_since = 0.0
        self.promises = Promises(self, copies_are_free=not (copy_seconds or has_parts), are_held=not has_parts)
        self.starts = 0
        self.is_done = self.has_failed = False

    def run_job(self, script: Callable[[], Any], faults: Any) -> bool:
        """Run a job. Returns whether it has succeeded."""
        self._script = script
        with tempfile.TemporaryDirectory(prefix="hvd-simulated-", dir="/dev/shm") as folder:
            self._folders = [Path(folder, str(host)) for host in range(len(self._all))]
            for each in self._folders:
                each.mkdir(mode=0o700)
            self.run(self._places(), script, faults)
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
        self._makes_room = False
        for rank in begun:
            with rank.process.entered():
                part(membership._Told).answers = _Answers(self)  # type: ignore[assignment]
        return begun

    def happens_to(self, rank: Rank, fault: Fault) -> bool:
        members, now = self.members, testing.clock()
        is_training = members.phase == TRAINING and members.has_run and not members.finished
        if fault.kind == "host dies":
            for each in self.ranks:
                if each.host == rank.host and not each.is_over:
                    self._cut_off(each)
                    self.kill(each)
            self._forget(rank.host)
        elif fault.kind == "all die":
            for each in self.living():
                self.kill(each)
        elif fault.kind == "is cut off":
            self._cut_off(rank)
        elif fault.kind == "has no room":
            self.promises.without_room.add(rank.host)
        elif fault.kind == "slots":
            self._hosts.slots[rank.host] = min(fault.count, self._all[rank.host])
            leaving = {each.number for each in self._without_slots()}
            if is_training and leaving and not self._makes_room:
                members.call_together(leaving)
        elif fault.kind == "makes room":
            if not is_training or self._makes_room:
                return False
            self._makes_room = True
            members.call_together()
        elif fault.kind == "no room":
            if not self._makes_room:
                return False
            self._makes_room = False
            members.call_off()
        else:
            return super().happens_to(rank, fault)
        self._ticks_at = now
        return True

    def _without_slots(self) -> list[Rank]:
        there = [[each for each in self.current if each.host == host] for host in range(len(self._all))]
        alive = [[each for each in ranks if each.number in self.members.alive] for ranks in there]
        return [each for host, ranks in enumerate(alive) for each in ranks[self._hosts.slots[host] :]]

    def _forget(self, host: int) -> None:
        """What was in the memory of a host is gone."""
        for file in self._folders[host].iterdir():
            file.unlink()
        self.promises.forgets(host)

    # -- the launcher

    def others(self) -> list[Callable[[], None]]:
        if self.is_done:
            return []
        events = [reports.popleft for rank in self.ranks if (reports := rank.process[_Own].reports)]
        found: list[Callable[[], None]] = [lambda take=take: self._hear(take) for take in events]  # type: ignore[misc]
        return [*found, self._tick] if testing.clock() >= self._ticks_at else found

    def wakes(self) -> list[float]:
        return super().wakes() if self.is_done else [*super().wakes(), self._ticks_at]

    def _hear(self, take: Callable[[], Callable[[], None]]) -> None:
        take()()
        self._moved_at = testing.clock()
        self._tick()

    def _report(self, rank: Rank, what: Callable[[], None]) -> None:
        """Something comes to the launcher by the link of a rank."""
        if rank.id not in self.unreachable:
            rank.process[_Own].reports.append(what)

    def _cut_off(self, rank: Rank) -> None:
        """The launcher loses touch with a rank."""
        if rank.id in self.unreachable:
            return
        self.unreachable.add(rank.id)

        def lose() -> None:
            if rank not in self.current:
                return
            self._seen.add(rank.id)
            self.policy.go_on_without_link(rank.number, str(rank.host), "is gone", testing.clock())

        rank.process[_Own].reports.append(lose)

    def _tick(self) -> None:
        now = testing.clock()
        self._ticks_at = now + TICK_SECONDS
        if max(self.worlds, self.starts) > MOST_WORLDS:
            raise Looped(f"the job begins the {MOST_WORLDS + 1}th time")
        orders = self.policy.take_orders((), now)
        for number, line in orders.news:
            if (rank := self.current[number]).id not in self.unreachable:
                self.note(f"launcher tells rank {rank.id}: {line}")
                rank.process[_Own].news.append(line)
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
            self._follow(now)

    def _end(self, rank: Rank) -> None:
        if not rank.is_over and rank.id not in self.unreachable:
            self.note(f"launcher ends rank {rank.id}")
            self.kill(rank)

    def kill(self, rank: Rank) -> None:
        super().kill(rank)
        self.promises.dies(rank)
        ending = Ending(rank.number, testing.clock(), KILLED, rank.id in self._asked, self._why.get(rank.id, ""))
        self._report(rank, lambda: self._ended(rank, ending))

    def at_end(self, rank: Rank, status: int) -> None:
        run_folder.reached("exit", status)
        if status == LEFT_STATE:
            self.promises.leaves(rank)
        self.promises.dies(rank)
        failure = None
        if rank.problem is not None:
            lost = basics.loss()
            is_consequence = any(failures.says_so(each, lost) for each in failures.chain(rank.problem))
            failure = Failure(rank.number, testing.clock(), repr(rank.problem), "", is_consequence)
        ending = Ending(rank.number, testing.clock(), status << 8, rank.id in self._asked)
        self._report(rank, lambda: self._ended(rank, ending, failure))

    def _ended(self, rank: Rank, ending: Ending, failure: Failure | None = None) -> None:
        self._seen.add(rank.id)
        now, lost = testing.clock(), len(self.members.lost)
        if failure is not None:
            self.policy.fail(failure, now)
        is_needed = rank.process[_Own].phase != "exit"
        goes_on = self.policy.go_on_without(ending, str(rank.host), now, is_needed=is_needed)
        self._slots.cool_down(str(rank.host), len(self.members.lost) - lost, now)
        if not goes_on and not ending.asked:
            self.note(f"the job ends because of rank {rank.id}")
            self._is_ending = True

    def _follow(self, now: float) -> None:
        """All processes have ended: the job is over, or new ones go on."""
        members = self.members
        is_done = members.finished and not members.saved
        begins = members.has_begun or members.worlds > 0 or self.starts > 1
        if is_done or members.none_shall_go_on or not begins:
            self.is_done = True
            self.has_failed = not members.are_done
            return
        self._waits_since = self._waits_since or now
        if now - self._waits_since > SLOTS_COME_BACK_SECONDS:
            self._hosts.slots = list(self._all)
        if self._slots.options(now).np < self._least:
            return
        self._waits_since = 0.0
        hosts = self._places()
        self.note(f"launcher starts {hosts}")
        for host, ranks in enumerate(hosts):
            if not ranks:
                self._forget(host)
        self.begin(hosts, self._script, self.starts)

    def _places(self) -> list[list[int]]:
        """The ranks of each host, if processes are started now."""
        ranks = {each.host: list(each.ranks) for each in self._slots.options(testing.clock()).host_ranks}
        return [ranks.get(str(host), []) for host in range(len(self._all))]

    # -- what a rank sees of it

    def instead(self) -> list[tuple[Any, str, Any]]:
        write = memory.Memory.write
        reserve = memory._reserve

        def reached(phase: str, *details: int) -> None:
            rank = self.acting()
            now = testing.clock
            part(_Own).phase = phase
            self._report(rank, lambda: self.policy.reached(rank.number, phase, now(), *details))

        def write_in_time(its_memory: memory.Memory, snapshot: memory.Snapshot) -> int:
            part(_Own).seconds += self._copy_seconds
            return write(its_memory, snapshot)

        def reserve_where_there_is_room(descriptor: int, length: int, path: Path) -> None:
            is_full = int(path.parent.name) in self.promises.without_room
            if is_full and os.fstat(descriptor).st_size < length:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            reserve(descriptor, length, path)

        return [
            *super().instead(),
            (run_folder, "reached", reached),
            (run_folder, "news", lambda heard: part(_Own).news[heard:]),
            (time, "thread_time", lambda: part(_Own).seconds),
            (memory.Memory, "write", write_in_time),
            (memory, "_reserve", reserve_where_there_is_room),
            (binding, "tolerates_faults", lambda: self._in_same_processes),
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
        while not any(line.startswith(run_folder.GO) for line in part(_Own).news):
            self.pause(testing.clock() + TICK_SECONDS)

    def _thread(self, target: Callable[..., None], name: str, *arguments: Any) -> Any:
        self.spawn(self.acting(), target, *arguments)
        return name
