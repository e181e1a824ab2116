"""Ranks that share this process: each is a coroutine with an engine, and a seed says whose turn it is.

The script of a rank calls the real functions, its engine is the real one, and its memory is what ranks of a host share.
MPI is `mpi.cc`, time is `testing.set_clock`. A rank gives way where it waits for an operation or for time. Its threads
are coroutines, too, where the module `threading` that they come from is replaced: in comparisons of parameters and in
`wait_for=`. Process groups of torch.distributed cannot run here: their futures are waited for in PyTorch's C++ code.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from greenlet import GreenletExit, greenlet
from simulation.engine import Engine
from simulation.mpi import Communicator, simulated_mpi
from simulation.ranks import Coroutine, Fault, Rank, Wrong
from simulation.threads import WAITING, Threads, are_recording, record

from horovodish import _native, settings
from horovodish._native import testing
from horovodish.gradients import late_steps, parameters
from horovodish.gradients.lone_steps import LoneSteps
from horovodish.mpi import binding, communicators
from horovodish.runtime import basics, starting
from horovodish.runtime.process import part
from horovodish.runtime.topology import Topology

CHUNK_BYTES = 4 << 10
START_SECONDS = 1000.0
STUCK_SECONDS = 600.0
"""Nothing may take so long, whatever has failed."""
LATEST_SECONDS = 20 * STUCK_SECONDS
"""No world goes on until then, whatever its ranks tell each other."""
PATIENCE_SECONDS = 5.0
"""If nothing has moved for so long, the next fault happens."""
_MOST_LINKS = 256


class Stuck(AssertionError):
    """Ranks wait, and nothing moves any more."""


@dataclass
class _Acting:
    rank: Rank | None = None


@dataclass
class _Meeting:
    """Ranks that call `init()` together, and the number of the world that they make."""

    world: int = 0
    here: set[int] = field(default_factory=set)
    built: set[int] = field(default_factory=set)
    memory: dict[int, list[int]] = field(default_factory=dict)  # descriptors, by host


def _watches_the_process(follower: Iterable[Any]) -> bool:
    """Whether it changes classes of frameworks, which all ranks of a world share with whoever runs it."""
    return any(isinstance(getattr(function, "__self__", None), LoneSteps) for function in follower)


class World:
    """The ranks, their links and their clock.

    Args:
        seed: of every choice.
        options: settings of `horovodish.settings`.
    """

    def __init__(self, seed: int, **options: Any):
        self.random = random.Random(seed)
        self.ranks: list[Rank] = []  # by id
        self._living: list[Rank] = []
        self.trace: list[str] = []
        self.events = 0
        options = {"cache_capacity": 8, **options}
        self._knobs = settings.Settings(chunk_kb=CHUNK_BYTES >> 10, ring_segment_kb=4, **options)
        self.mpi, self.library = simulated_mpi()
        self._pairs = (ctypes.c_int * (2 * _MOST_LINKS))()
        self._fresh: set[int] = set()  # ranks whose engine may have news
        self._main: Any = None
        self._moved_at = START_SECONDS
        self._numbers: dict[Any, int] = {}
        self._meetings: dict[Any, _Meeting] = {}
        self._slow: dict[tuple[int, int], float] = {}  # links, and until when nothing arrives
        self._cut: set[tuple[int, int]] = set()  # links that lose what they carry
        self._due: list[Fault] = []  # the latest first
        self._aimed: list[Fault] = []  # faults that wait for their mark
        self._marks = 0
        self.worlds = 0
        self.happened: Counter[str] = Counter()  # faults, by kind
        self._is_closing = False

    def run(
        self, hosts: Sequence[Sequence[int]], script: Callable[[], Any], faults: Iterable[Fault] = ()
    ) -> list[Rank]:
        """Have ranks call `init()` and a function, until all have ended.

        Args:
            hosts: the ranks of each host.
            script: the function.
            faults: what happens meanwhile, by events since `init()` has returned; a rank is named by its id.

        Raises:
            Stuck: they do not come to an end.
            Wrong: they have received parts of messages in the places of others.
        """
        due = self._due
        due += sorted((fault for fault in faults if not fault.mark), key=lambda fault: fault.event, reverse=True)
        self._aimed = [fault for fault in faults if fault.mark]
        begun = False
        self._main = greenlet.getcurrent()
        self.mpi.simulated_reset()
        with self._machine():
            self.begin(hosts, script, 0)
            while not self.is_over():
                begun = begun or all(rank.engine for rank in self.ranks)
                self.events += begun
                while begun and due and due[-1].event <= self.events:
                    self._happens(due.pop())
                if self._act():
                    continue
                if begun and due and testing.clock() - self._moved_at > PATIENCE_SECONDS:
                    self.events = max(self.events, due[-1].event - 1)
                elif testing.clock() - self._moved_at < STUCK_SECONDS and testing.clock() < LATEST_SECONDS:
                    self._let_time_pass()
                else:
                    waiting = [rank.id for rank in self.ranks if not rank.is_over]
                    raise Stuck(f"ranks {waiting} wait, and none goes on")
        if truncated := self.mpi.simulated_truncated():
            raise Wrong(f"{truncated} messages were longer than their receives")
        return self.ranks

    def is_over(self) -> bool:
        return not self.living()

    def living(self) -> list[Rank]:
        """The ranks that are not over."""
        self._living = [rank for rank in self._living if not rank.is_over]
        return self._living

    def begin(self, hosts: Sequence[Sequence[int]], script: Callable[[], Any], start: int) -> list[Rank]:
        """Start processes."""
        begun = []
        for number, place in sorted((number, place) for place, host in enumerate(hosts) for number in host):
            rank = Rank(len(self.ranks), number, place, start)
            self.ranks.append(rank)
            self._living.append(rank)
            begun.append(rank)
            self.spawn(rank, functools.partial(self._of_rank, rank, script))
        return begun

    def spawn(self, rank: Rank, function: Callable[..., Any], *arguments: Any) -> None:
        """Start a thread of a rank."""

        def act() -> None:
            with rank.process.entered():
                part(_Acting).rank = rank
                record(True)
                function(*arguments)

        thread = Coroutine(act, parent=self._main)
        thread.rank = rank
        rank.threads.append(thread)

    def numbered(self, key: Any) -> int:
        """The same number for the same key."""
        return self._numbers.setdefault(key, len(self._numbers) + 1)

    @staticmethod
    def acting() -> Rank:
        """The rank that runs."""
        rank = part(_Acting).rank
        assert rank is not None
        return rank

    def mark(self) -> None:
        """The rank that runs has come to the end of a phase."""
        self._marks += 1
        now_due = [replace(each, event=self.events + each.event) for each in self._aimed if each.mark == self._marks]
        self._due += now_due
        self._due.sort(key=lambda fault: fault.event, reverse=True)

    # -- events

    def others(self) -> list[Callable[[], None]]:
        """What can happen now beside messages, and the turns of threads and engines."""
        return []

    def wakes(self) -> list[float]:
        """When something may happen that nothing else brings about."""
        threads = [thread for rank in self.living() for thread in rank.threads if not thread.dead]
        sleepers = [rank.sleeps_until for rank in self.living()]
        return [thread.until for thread in threads] + sleepers + [*self._slow.values()]

    def _act(self) -> bool:
        """One event, drawn at random. False if there is none before the clock goes on."""
        now = testing.clock()
        links = self._links(now)
        awake = [rank for rank in self.living() if rank.sleeps_until <= now]
        ready = [thread for rank in awake for thread in rank.threads if thread.is_ready(now)]
        looking = [rank for rank in awake if rank.id in self._fresh and rank.engine]
        others = self.others()
        choices = len(links) + len(ready) + len(looking) + len(others)
        if not choices:
            return False
        chosen = self.random.randrange(choices)
        if chosen < len(links):
            sender, receiver = links[chosen]
            if (sender, receiver) in self._cut:
                self.mpi.simulated_drop(sender, receiver)
                return True
            self.note(f"message {sender} -> {receiver}")
            self.mpi.simulated_arrive(sender, receiver)
            self._fresh.add(receiver)
            self._moved_at = now
            return True
        chosen -= len(links)
        if chosen < len(ready):
            self._resume(ready[chosen])
        elif chosen < len(ready) + len(looking):
            rank = looking[chosen - len(ready)]
            if testing.turn(rank.engine):
                self.note(f"rank {rank.id} looks")
                self._fresh.update(range(len(self.ranks)))
                self._moved_at = now
            else:
                self._fresh.discard(rank.id)
        else:
            others[chosen - len(ready) - len(looking)]()
        return True

    def _links(self, now: float) -> list[tuple[int, int]]:
        """The senders and receivers of what can arrive now."""
        count = self.mpi.simulated_links(self._pairs, _MOST_LINKS)
        if not count:
            return []
        links = [(self._pairs[2 * place], self._pairs[2 * place + 1]) for place in range(count)]
        return [link for link in links if self._slow.get(link, now) <= now] if self._slow else links

    def _resume(self, thread: Coroutine) -> None:
        rank = thread.rank
        self.note(f"rank {rank.id} goes on")
        if thread.waits_for and thread.waits_for():  # to look now and then is no progress
            self._moved_at = testing.clock()
        thread.waits_for = None
        thread.switch()
        self._fresh.add(rank.id)

    def _let_time_pass(self) -> None:
        """The more, the longer nothing has moved."""
        now = testing.clock()
        step = max(0.001, (now - self._moved_at) / 4)
        if ends := [end for end in self.wakes() if end > now]:
            step = min(step, min(ends) - now + 1e-6)
        testing.set_clock(now + step)
        self._fresh = set(range(len(self.ranks)))

    def _happens(self, fault: Fault) -> None:
        if max(fault.rank, fault.other) >= len(self.ranks) or self.ranks[fault.rank].is_over:
            return
        rank = self.ranks[fault.rank]
        if self.happens_to(rank, fault):
            self.note(f"rank {rank.id} {fault.kind} {fault.other if fault.other >= 0 else fault.seconds or ''}")
            self.happened[fault.kind] += 1
            self._fresh.update(range(len(self.ranks)))

    def happens_to(self, rank: Rank, fault: Fault) -> bool:
        """A fault happens to a rank. False if it cannot."""
        if fault.kind == "dies":
            self.kill(rank)
        elif fault.kind == "sleeps":
            rank.sleeps_until = testing.clock() + fault.seconds
        elif fault.kind == "delays":
            self._slow[rank.id, fault.other] = testing.clock() + fault.seconds
        elif fault.kind == "drops":
            self._cut.add((rank.id, fault.other))
        elif not self.ranks[fault.other].is_dead:  # it had ended before it could die
            return False
        elif fault.kind == "hears":
            with rank.process.entered():
                basics.cut_off(f"rank {fault.other} was lost")
        else:
            self.mpi.simulated_drop(fault.other, rank.id)
            self.mpi.simulated_fail(rank.id, fault.other)
        return True

    def kill(self, rank: Rank) -> None:
        """Its host hears of it at once. What it has sent to others arrives."""
        rank.is_dead = True
        self.mpi.simulated_die(rank.id)
        if rank.engine:
            testing.die(rank.engine)
        for other in self.ranks:
            if other.host == rank.host and not other.is_over and other.engine:
                self._lose(other, rank)
        self._fresh.update(range(len(self.ranks)))

    @staticmethod
    def _lose(rank: Rank, lost: Rank) -> None:
        """A rank hears that one of its host is dead, if both are in the same world."""
        peers = rank.process[_Peers].ids
        if lost.id in peers and rank.engine:
            testing.lose_peer(rank.engine, peers.index(lost.id))

    def note(self, what: str) -> None:
        self.trace.append(what)

    # -- a rank

    def _of_rank(self, rank: Rank, script: Callable[[], Any]) -> None:
        status = 0
        try:
            basics.init()
            rank.result = script()
        except SystemExit as end:
            status = int(str(end.code))
        except Exception as problem:
            rank.problem, status = problem, 1
        if rank.problem is None:
            basics._stop(basics._ENDED)
        elif rank.engine:
            basics.engine().stop(True, f"rank {basics.rank()} raised {type(rank.problem).__name__}: {rank.problem}")
        self.at_end(rank, status)
        rank.status = status

    def at_end(self, rank: Rank, status: int) -> None:
        """A rank is about to end."""

    def pause(self, until: float, waits_for: Callable[[], bool] | None = None) -> None:
        """The thread that runs gives way until a time, or until something is so."""
        thread = greenlet.getcurrent()
        assert isinstance(thread, Coroutine)
        if self._is_closing:
            raise GreenletExit
        thread.until, thread.waits_for = until, waits_for
        recording = are_recording()
        self._main.switch()
        record(recording)

    # -- what stands in for the machine

    @contextmanager
    def _machine(self) -> Iterator[None]:
        testing.set_clock(START_SECONDS)
        self._moved_at = START_SECONDS
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", RuntimeWarning)  # of copies without room, and of losses that blocks meet
            for target, name, instead in self.instead():
                stack.enter_context(mock.patch.object(target, name, instead))
            try:
                yield
            finally:
                self._close()
                testing.set_clock(None)

    def instead(self) -> list[tuple[Any, str, Any]]:
        """What of the library stands in for the machine: where, its name, and what takes its place."""
        threads = Threads(self)
        return [
            (time, "monotonic", testing.clock),
            (time, "monotonic_ns", lambda: int(testing.clock() * 1e9)),
            (time, "thread_time", testing.clock),
            (time, "sleep", lambda seconds: self.pause(testing.clock() + seconds)),
            *((module, "WAIT_SLICE_SECONDS", STUCK_SECONDS / 10) for module in WAITING),
            (binding, "native_table", Communicator.native_table),
            (binding, "private", Communicator.private),
            (basics, "_install_hooks", lambda: None),
            (basics, "_followers", [each for each in basics._followers if not _watches_the_process(each)]),
            (basics, "launcher_environment", lambda: True),
            (starting, "check_not_started_by_a_rank", lambda: None),
            (communicators, "of", lambda ranks: ranks),
            (late_steps, "threading", threads),
            (parameters, "threading", threads),
            (starting, "on", self._start),
        ]

    def _close(self) -> None:
        self._is_closing = True
        for rank in self.ranks:
            if rank.engine and not rank.is_dead:
                testing.die(rank.engine)
            for thread in rank.threads:
                if thread and not thread.dead:
                    thread.throw()
        for meeting in self._meetings.values():
            for descriptors in meeting.memory.values():
                for descriptor in descriptors:
                    os.close(descriptor)

    def _start(self, numbers: Iterable[int] | None, _: list[str]) -> starting.Running:
        """`init()`: waits for the other ranks, as MPI does, even for one that never comes."""
        own = self.acting()
        together = [rank for rank in self.ranks if rank.start == own.start]
        members = together if numbers is None else [together[number] for number in numbers]
        ids = tuple(rank.id for rank in members)
        generation = own.inits[ids]
        own.inits[ids] += 1
        meeting = self._meetings.setdefault((ids, generation), _Meeting())
        meeting.here.add(own.id)
        self.pause(float("inf"), lambda: len(meeting.here) == len(ids))
        if not meeting.world:
            self.worlds = meeting.world = self.worlds + 1
        own.world, own.members = meeting.world, ids
        used = {rank.host for rank in members}
        by_host = [[place for place, rank in enumerate(members) if rank.host == host] for host in used]
        topology = Topology(ids.index(own.id), tuple(sorted(map(tuple, by_host))))
        peers = [members[place] for place in topology.local_ranks]
        if own.host not in meeting.memory:
            meeting.memory[own.host] = [os.memfd_create("arena") for _ in peers]
            for descriptor in meeting.memory[own.host]:
                os.ftruncate(descriptor, _native.arena_bytes(len(peers), CHUNK_BYTES))
        running = self._running(topology, meeting.memory[own.host], Communicator(self, ids), generation)
        part(_Peers).ids = [peer.id for peer in peers]
        part(basics._Life).running = running
        for peer in peers:
            if peer.is_dead:
                self._lose(own, peer)
        meeting.built.add(own.id)
        self.pause(float("inf"), lambda: len(meeting.built) == len(ids))
        return running

    def _running(self, topology: Topology, memory: list[int], communicator: Any, generation: int) -> starting.Running:
        knobs = self._knobs
        native = _native.Engine(
            rank=topology.rank,
            size=topology.size,
            local_rank=topology.local_rank,
            local_size=len(topology.local_ranks),
            arena_descriptors=memory,
            peer_sockets=[-1] * len(topology.local_ranks),
            chunk_bytes=CHUNK_BYTES,
            ring_segment_bytes=knobs.ring_segment_kb * 1024,
            cache_capacity=knobs.cache_capacity,
            spin_us=0,
            stall_warning_seconds=knobs.stall_check_warning_time_seconds if knobs.stall_check else 0.0,
            stall_shutdown_seconds=knobs.stall_check_shutdown_time_seconds if knobs.stall_check else 0.0,
            stack_signal=0,
            plane="auto",
            shared_gpu=False,
            horovods_gradients=False,
            averages_over_size=False,
            has_thread=False,
        )
        engine: Any = Engine(native, self)
        running = starting.Running(topology, topology, engine, communicator, None, knobs, 0, False)
        running.add_process_set(0, list(range(topology.size)), 0, communicator, generation)
        return running


@dataclass
class _Peers:
    """The ids of the ranks of a host, by local rank."""

    ids: list[int] = field(default_factory=list)
