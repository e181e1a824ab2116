"""Ranks that share this process: each is a coroutine with an engine, and a seed says whose turn it is.

The script of a rank calls the real functions, its engine is the real one, and its memory is what ranks of a host share.
MPI is `mpi.cc`, time is `testing.set_clock`. A rank gives way where it waits for an operation or for time.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from greenlet import greenlet

from horovodish import _native, settings
from horovodish._native import testing
from horovodish.collectives import submission
from horovodish.mpi import binding
from horovodish.runtime import basics, starting
from horovodish.runtime.process import Process, part
from horovodish.runtime.topology import Topology

CHUNK_BYTES = 4 << 10
START_SECONDS = 1000.0
STUCK_SECONDS = 600.0
"""Nothing may take so long, whatever has failed."""
_MOST_LINKS = 256
_HANDLES = 4096
"""A communicator's handle is its number times this plus the rank in it; see `mpi.cc`."""


class Stuck(AssertionError):
    """Ranks wait, and nothing moves any more."""


@dataclass(frozen=True)
class Fault:
    """What happens to a rank when so many events have passed.

    Attributes:
        event: the number of the event.
        kind: "dies"; "sleeps", for `seconds`; "hears", from the launcher, that `other` was lost; "mpi hears" likewise.
        rank: to which it happens.
    """

    event: int
    kind: str
    rank: int
    other: int = -1
    seconds: float = 0.0


@dataclass
class Rank:
    """A rank of the world.

    Attributes:
        result, problem: what its script returned or raised.
        until: it waits for an operation, or until this time.
        sleeps_until: it does nothing at all, as a stopped process.
    """

    number: int
    process: Process = field(default_factory=Process)
    coroutine: Any = None
    waits_for: Callable[[], bool] | None = None
    until: float = 0.0
    sleeps_until: float = 0.0
    is_dead: bool = False
    has_ended: bool = False
    result: Any = None
    problem: BaseException | None = None

    @property
    def engine(self) -> _native.Engine | None:
        """Between `init()` and `shutdown()`."""
        running: Any = self.process[basics._Life].running
        return running.engine.native if running else None


@dataclass
class _Acting:
    rank: Rank | None = None


@functools.cache
def simulated_mpi() -> tuple[ctypes.CDLL, str]:
    """The library, and its path."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "mpi.so")
        source = Path(__file__).with_name("mpi.cc")
        flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra"]
        subprocess.run(["g++", *flags, str(source), "-o", str(library)], check=True)
        loaded = ctypes.CDLL(str(library))
    loaded.simulated_communicator.argtypes = [ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int]
    return loaded, str(library)


class Communicator:
    """Some ranks of the world, as mpi4py's communicators and groups."""

    def __init__(self, world: World, ranks: Sequence[int], *key: Any):
        self.ranks, self.number = tuple(ranks), world.numbered((tuple(ranks), *key))
        self._world = world
        world.mpi.simulated_communicator(self.number, (ctypes.c_int * len(ranks))(*ranks), len(ranks))

    def Get_group(self) -> Communicator:
        return self

    def Incl(self, ranks: Sequence[int]) -> Communicator:
        return Communicator(self._world, ranks)

    def Create_group(self, group: Communicator, tag: int) -> Communicator:
        return Communicator(self._world, group.ranks, tag)

    def Free(self) -> None:
        pass

    def private(self) -> Communicator:
        return Communicator(self._world, self.ranks, self.number)

    def native_table(self, generation: int) -> dict[str, Any]:
        rank = self._world.acting()
        return {
            "library": self._world.library,
            "comm": self.number * _HANDLES + self.ranks.index(rank.number),
            "byte": 0,
            "request_bytes": 8,
            "status_bytes": 8,
            "tolerates_faults": False,
            "generation": generation,
        }


class World:
    """The ranks, their links and their clock.

    Args:
        hosts: the ranks of each host, all in ascending order.
        seed: of every choice.
        options: settings of `horovodish.settings`.
    """

    def __init__(self, hosts: Sequence[Sequence[int]], seed: int, **options: Any):
        self.hosts = tuple(tuple(host) for host in hosts)
        self.random = random.Random(seed)
        self.ranks = [Rank(number) for number in itertools.chain(*self.hosts)]
        self.trace: list[str] = []
        self.events = 0
        self._knobs = settings.Settings(chunk_kb=CHUNK_BYTES >> 10, ring_segment_kb=4, cache_capacity=8, **options)
        self.mpi, self.library = simulated_mpi()
        self._pairs = (ctypes.c_int * (2 * _MOST_LINKS))()
        self._fresh: set[int] = set()  # ranks whose engine may have news
        self._main: Any = None
        self._moved_at = START_SECONDS
        self._numbers: dict[Any, int] = {}

    def run(self, script: Callable[[], Any], faults: Iterable[Fault] = ()) -> list[Rank]:
        """Have every rank call a function after `init()`, until all have ended.

        Raises:
            Stuck: they do not come to an end.
        """
        due = sorted(faults, key=lambda fault: fault.event, reverse=True)
        with self._time(), self._engines():
            self._main = greenlet.getcurrent()
            for rank in self.ranks:
                rank.coroutine = greenlet(functools.partial(self._of_rank, rank, script))
            self._fresh = {rank.number for rank in self.ranks}
            self._moved_at = testing.clock()
            while not all(rank.has_ended or rank.is_dead for rank in self.ranks):
                self.events += 1
                while due and due[-1].event <= self.events:
                    self._happens(due.pop())
                if self._act():
                    continue
                if due:
                    self.events = max(self.events, due[-1].event - 1)
                elif testing.clock() - self._moved_at < STUCK_SECONDS:
                    self._let_time_pass()
                else:
                    waiting = [rank.number for rank in self.ranks if not (rank.has_ended or rank.is_dead)]
                    raise Stuck(f"ranks {waiting} wait, and nothing moves")
        return self.ranks

    def numbered(self, key: Any) -> int:
        """The same number for the same key."""
        return self._numbers.setdefault(key, len(self._numbers) + 1)

    @staticmethod
    def acting() -> Rank:
        """The rank that runs."""
        rank = part(_Acting).rank
        assert rank is not None
        return rank

    # -- events

    def _act(self) -> bool:
        """One event, drawn at random. False if there is none before the clock goes on."""
        now = testing.clock()
        links = self.mpi.simulated_links(self._pairs, _MOST_LINKS)
        awake = [rank for rank in self.ranks if not rank.is_dead and rank.sleeps_until <= now]
        ready = [r for r in awake if not r.has_ended and (r.until <= now or (r.waits_for and r.waits_for()))]
        looking = [rank for rank in awake if rank.number in self._fresh and rank.engine]
        choices = links + len(ready) + len(looking)
        if not choices:
            return False
        chosen = self.random.randrange(choices)
        if chosen < links:
            sender, receiver = self._pairs[2 * chosen], self._pairs[2 * chosen + 1]
            self._note(f"message {sender} -> {receiver}")
            self.mpi.simulated_arrive(sender, receiver)
            self._fresh.add(receiver)
            self._moved_at = now
        elif chosen < links + len(ready):
            self._resume(ready[chosen - links])
        else:
            rank = looking[chosen - links - len(ready)]
            if testing.turn(rank.engine):
                self._note(f"rank {rank.number} looks")
                self._fresh.update(other.number for other in self.ranks)
                self._moved_at = now
            else:
                self._fresh.discard(rank.number)
        return True

    def _resume(self, rank: Rank) -> None:
        self._note(f"rank {rank.number} goes on")
        if rank.waits_for and rank.waits_for():  # to look now and then is no progress
            self._moved_at = testing.clock()
        rank.waits_for = None
        rank.coroutine.switch()
        self._fresh.add(rank.number)

    def _let_time_pass(self) -> None:
        """The more, the longer nothing has moved."""
        now = testing.clock()
        ends = [rank.until for rank in self.ranks if not rank.is_dead and not rank.has_ended and rank.until > now]
        ends += [rank.sleeps_until for rank in self.ranks if rank.sleeps_until > now]
        step = max(0.001, (now - self._moved_at) / 4)
        if ends:
            step = min(step, max(min(ends) - now, 0.0) + 1e-6)
        testing.set_clock(now + step)
        self._fresh = {rank.number for rank in self.ranks if not rank.is_dead}

    def _happens(self, fault: Fault) -> None:
        rank = self.ranks[fault.rank]
        if rank.is_dead or rank.has_ended:
            return
        self._note(f"rank {rank.number} {fault.kind} {fault.other if fault.other >= 0 else fault.seconds or ''}")
        if fault.kind == "dies":
            self._kill(rank)
        elif fault.kind == "sleeps":
            rank.sleeps_until = testing.clock() + fault.seconds
        elif fault.kind == "hears":
            with rank.process.entered():
                basics.cut_off(f"rank {fault.other} was lost")
        else:
            self.mpi.simulated_drop(fault.other, rank.number)
            self.mpi.simulated_fail(rank.number, fault.other)
        self._fresh.update(other.number for other in self.ranks)

    def _kill(self, rank: Rank) -> None:
        """Its host hears of it at once. What it has sent to others arrives."""
        rank.is_dead = True
        self.mpi.simulated_die(rank.number)
        if rank.engine:
            testing.die(rank.engine)
        host = next(host for host in self.hosts if rank.number in host)
        for other in host:
            if not self.ranks[other].is_dead and (engine := self.ranks[other].engine):
                testing.lose_peer(engine, host.index(rank.number))

    def _note(self, what: str) -> None:
        self.trace.append(what)

    # -- a rank

    def _of_rank(self, rank: Rank, script: Callable[[], Any]) -> None:
        with rank.process.entered():
            try:
                rank.result = script()
            except Exception as problem:
                rank.problem = problem
                if part(basics._Life).running is not None:
                    basics.engine().stop(True, f"rank {rank.number} raised {type(problem).__name__}: {problem}")
            with suppress(Exception):
                basics.shutdown()
        rank.has_ended = True

    def pause(self, until: float, waits_for: Callable[[], bool] | None = None) -> None:
        """The rank that runs gives way until a time, or until something is so."""
        rank = self.acting()
        rank.until, rank.waits_for = until, waits_for
        self._main.switch()

    # -- what stands in for the machine

    @contextmanager
    def _time(self) -> Iterator[None]:
        testing.set_clock(START_SECONDS)
        with (
            mock.patch.object(time, "monotonic", testing.clock),
            mock.patch.object(time, "sleep", lambda seconds: self.pause(testing.clock() + seconds)),
            mock.patch.object(submission, "WAIT_SLICE_SECONDS", STUCK_SECONDS / 10),  # between looks at signals
            mock.patch.object(binding, "native_table", Communicator.native_table),
            mock.patch.object(binding, "private", Communicator.private),
        ):
            try:
                yield
            finally:
                testing.set_clock(None)

    @contextmanager
    def _engines(self) -> Iterator[None]:
        self.mpi.simulated_reset()
        for host in self.hosts:
            memory = [os.memfd_create("arena") for _ in host]
            for descriptor in memory:
                os.ftruncate(descriptor, _native.arena_bytes(len(host), CHUNK_BYTES))
            for rank in host:
                self._start(self.ranks[rank], memory)
            for descriptor in memory:
                os.close(descriptor)
        try:
            yield
        finally:
            for rank in self.ranks:
                if rank.engine and not rank.is_dead:
                    testing.die(rank.engine)

    def _start(self, rank: Rank, memory: list[int]) -> None:
        size, knobs = len(self.ranks), self._knobs
        topology = Topology(rank.number, self.hosts)
        native = _native.Engine(
            rank=rank.number,
            size=size,
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
        engine: Any = _Engine(native, self)
        communicator: Any = Communicator(self, range(size))
        with rank.process.entered():
            part(_Acting).rank = rank
            running = starting.Running(topology, topology, engine, communicator, None, knobs, 0, False)
            running.add_process_set(0, list(range(size)), 0, communicator)
            part(basics._Life).running = running
            for _, started, *_ in basics._followers:
                started(None)


class _Engine:
    """An engine whose callers give way while they wait."""

    def __init__(self, native: _native.Engine, world: World):
        self.native, self._world = native, world

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    def enqueue(self, *arguments: Any) -> Any:
        return _Waiting(self.native.enqueue(*arguments), self._world)

    def plan(self, *arguments: Any, **options: Any) -> Any:
        return _Waiting(self.native.plan(*arguments, **options), self._world)


class _Waiting:
    """A handle or a plan, likewise."""

    def __init__(self, native: Any, world: World):
        self._native, self._world = native, world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def wait(self, seconds: float) -> bool:
        if not self._native.poll():
            self._world.pause(testing.clock() + seconds, self._native.poll)
        return bool(self._native.poll())
