"""An elastic job: starts ranks, starts new ones when those cannot go on, and more of them when there are more slots.

One start is a `Job`. While it trains, the next one may come up beside it: its ranks import what they need and wait in
`init()`. Then those that train leave their state in memory at a commit and end, and the next ones take it from there.
"""

import contextlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from horovodish.errors import LaunchError, SettingError
from horovodish.launcher.hosts.allocation import THIS_HOST, Allocation, Host, counted
from horovodish.launcher.hosts.discovery import Discovery, by_hostfile, by_program
from horovodish.launcher.job.conclusion import conclude
from horovodish.launcher.job.events import Event, Events
from horovodish.launcher.job.job import Job
from horovodish.launcher.job.members import ENDING, TRAINING, Members
from horovodish.launcher.job.signals import ENDING as ENDING_SIGNALS
from horovodish.launcher.job.signals import signals_taken
from horovodish.launcher.job.survivors import NoSurvivors, Survivors
from horovodish.launcher.options import LaunchOptions
from horovodish.launcher.supervisor.supervisor import MEMORY
from horovodish.settings import START_VARIABLE, STATE_FOLDER_VARIABLE

FIRST_REST_SECONDS, LONGEST_REST_SECONDS = 5.0, 300.0
"""How long a slot rests that has lost a rank for the second time. Each further time it is twice as long."""
REMEMBERED_SECONDS = 3600.0
"""For how long a loss counts."""
SETTLED_SECONDS = 1.0
"""How long slots must have been there before ranks are started on them."""
TOGETHER_SECONDS = 2.0
"""Losses of a host that are no further apart count as one."""
WAIT_SECONDS = 0.1

Prepared = Callable[[LaunchOptions, Mapping[str, str], NoSurvivors], contextlib.AbstractContextManager[Job]]


class Slots:
    """Where ranks can run: the slots of the hosts that there are now, but for those that rest after a loss.

    Args:
        options: of the job.
        discovery: finds the hosts; None if they stay the same.
    """

    def __init__(self, options: LaunchOptions, discovery: Discovery | None) -> None:
        self._options = options
        self._discovery = discovery
        self._losses: list[tuple[str, float]] = []
        self._rests: list[tuple[str, float]] = []  # a slot of a host, and until when

    def named(self) -> Allocation:
        """The hosts that there are now."""
        if self._discovery:
            return self._discovery.found() or Allocation((), "")
        own = self._options
        return own.allocation or Allocation((Host(THIS_HOST, own.most or own.least),), "this host")

    def rest(self, host: str, slots: int, now: float) -> None:
        """Leaves slots of a host alone for a while, which is longer each time."""
        self._losses = [(other, then) for other, then in self._losses if now - then < REMEMBERED_SECONDS]
        earlier = [then for other, then in self._losses if other == host]
        before = sum(now - then > TOGETHER_SECONDS for then in earlier)
        pause = min(FIRST_REST_SECONDS * 2 ** (before - 1), LONGEST_REST_SECONDS) if before else 0.0
        if len(earlier) == before:
            self._losses.append((host, now))
        self._rests += [(host, now + pause)] * slots

    def options(self, now: float) -> LaunchOptions:
        """Those of a start with as many ranks as there is room for, which may be none."""
        self._rests = [(host, until) for host, until in self._rests if until > now]
        resting = Counter(host for host, _ in self._rests)
        named = self.named()
        left = [replace(host, slots=host.slots - resting[host.name]) for host in named.hosts]
        hosts = replace(named, hosts=tuple(host for host in left if host.slots > 0))
        most = self._options.most or max(hosts.slots, self._options.least)
        shares = self._options.oversubscribe
        np = min(most, sum((host.max_slots or most) if shares else host.slots for host in hosts.hosts))
        is_named = self._discovery or self._options.allocation
        return replace(self._options, np=np, allocation=hosts if is_named else None)


@dataclass
class _Start:
    """Ranks that were started together.

    Attributes:
        job: the start.
        members: its ranks.
        exit: ends what is left of it.
        began: when.
        losses: how many of its losses were noted.
        told: how many of its events were told.
        leaving: the ranks that were told to leave at their next commit.
        is_called: whether its ranks were told to make room.
    """

    job: Job
    members: Members
    exit: contextlib.ExitStack
    began: float
    losses: int = 0
    told: int = 0
    leaving: frozenset[int] = frozenset()
    is_called: bool = False

    def host_of(self, rank: int) -> str:
        """The name by which the rank's host was named."""
        return next(each.host for each in self.job.options.host_ranks if rank in each.ranks)

    def keep_state_for(self, other: "_Start") -> None:
        """When this one ends, the state stays on the hosts of another one."""
        hosts = {each.host for each in other.job.options.host_ranks}
        self.job.keep_state_of = {rank for rank in range(self.job.options.np) if self.host_of(rank) in hosts}


class ElasticJob:
    """Starts ranks as often as it takes.

    Args:
        options: of an elastic job.
        prepared: makes a job that can run with these options, variables and survivors.
        in_same_processes: whether MPI can go on without a lost rank.
        environ: of the user.
    """

    def __init__(
        self, options: LaunchOptions, prepared: Prepared, in_same_processes: bool, environ: Mapping[str, str]
    ) -> None:
        self._options = options
        self._prepared = prepared
        self._in_same_processes = in_same_processes
        self._discovery = _discovery(options, environ)
        self._slots = Slots(options, self._discovery)
        self._events = Events(options.output_filename)
        self._problem = ""  # of the discovery, as it was told
        self._signal: int | None = None
        self._current: _Start | None = None
        self._next: _Start | None = None
        self._starts = 0
        self._room: tuple[LaunchOptions, float] | None = None  # with these options more ranks could run, since then
        self._grows_at = 0.0  # not sooner
        self._pause = FIRST_REST_SECONDS  # when the next one has failed to come up

    def run(self) -> int:
        """Runs the job. Returns the exit status."""
        with signals_taken(self._take_signal), self._watched(), _memory() as self._memory:
            self._current = self._started_when_there_are_slots()
            while current := self._current:
                if self._signal:
                    current.job.take_signal(self._signal)
                while current.job.turn():
                    self._look_after(current)
                self._take_news(current)
                following = self._following(current)
                if following:
                    current.keep_state_for(following)
                elif self._next:
                    self._give_up(self._next, current)
                current.exit.close()
                if following is None:
                    status = conclude(current.job)
                    self._events.conclude(status)
                    return status
                self._current = following
        return 128 + self._signal if self._signal else 1

    def _following(self, current: _Start) -> _Start | None:
        """The start that goes on where this one has ended; None if none shall."""
        if not self._shall_go_on(current):
            return None
        if not current.members.has_run:
            self._rest_what_failed(current)
        if self._next is None and not self._may_start:
            limit = counted(self._options.reset_limit or 0, "time")
            self._tell("limit", f"new processes were started {limit}, and --reset-limit allows no more: the job ends")
            return None
        following = self._next or self._started_when_there_are_slots()
        self._next = None
        if following:
            following.members.follow(current.members)
            following.members.release()
        return following

    def _shall_go_on(self, current: _Start) -> bool:
        """Whether new ranks shall go on where these end, because of what others did to them."""
        members, job = current.members, current.job
        is_later = members.worlds > 0 or self._starts > 1
        # Of ranks that were told to end, the scripts may have more to do than those of the ranks that have finished.
        is_done = members.finished and not members.left
        if is_done or members.failed or job.stopped_by or job.standstill or (job.refusal and not is_later):
            return False
        return members.have_arrived or is_later

    @property
    def _may_start(self) -> bool:
        return self._options.reset_limit is None or self._starts <= self._options.reset_limit

    def _started_when_there_are_slots(self) -> _Start | None:
        give_up_at, waits = time.monotonic() + self._options.elastic_timeout, False
        while self._signal is None:
            now = time.monotonic()
            options = self._slots.options(now)
            self._take_news_of_hosts()
            if options.np >= self._options.least:
                return self._started(options, held=False)
            if now > give_up_at:
                waited = f"{self._options.elastic_timeout} s"
                self._tell("timeout", f"there were too few slots for {waited}; --elastic-timeout waits longer")
                return None
            if not waits:
                waits = True
                least = self._options.least
                limit = f"the job ends after {self._options.elastic_timeout} s (--elastic-timeout)"
                self._tell("waiting", f"waiting for slots: there are {options.np} and --min-np is {least}; {limit}")
            time.sleep(WAIT_SECONDS)
        return None

    def _started(self, options: LaunchOptions, *, held: bool) -> _Start:
        own = self._options
        members = Members(
            options.np, own.least, self._in_same_processes, own.elastic_timeout, own.host_timeout, held=held
        )
        if self._starts:
            earlier = self._current
            train = len(earlier.members.alive) if earlier and earlier.members.phase == TRAINING else 0
            text = f"starting new processes on {counted(options.np, 'slot')}" + (f", while {train} train" * (train > 0))
            self._tell("starting", text, slots=options.np, train=train)
        variables = {START_VARIABLE: str(self._starts), STATE_FOLDER_VARIABLE: str(self._memory)}
        self._starts += 1
        with contextlib.ExitStack() as stack:
            job = stack.enter_context(self._prepared(options, variables, Survivors(members)))
            stack.enter_context(job.running())
            return _Start(job, members, stack.pop_all(), time.monotonic())

    # While ranks train

    def _look_after(self, current: _Start) -> None:
        now = time.monotonic()
        self._take_news(current)
        self._take_news_of_hosts()
        if self._next is not None:
            self._look_after_next(current, self._next)
        elif current.members.phase == ENDING and self._shall_go_on(current) and self._may_start:
            options = self._slots.options(now)
            if options.np >= self._options.least and now >= self._grows_at:
                self._start_next(options)
        elif current.members.phase == TRAINING and current.members.has_run and not current.members.finished:
            self._let_go(current)
            self._grow(current, now)

    def _take_news(self, start: _Start) -> None:
        for rank in start.members.lost[start.losses :]:
            self._slots.rest(start.host_of(rank), 1, time.monotonic())
        for event in start.members.events[start.told :]:
            self._events.add(event)
        start.losses, start.told = len(start.members.lost), len(start.members.events)

    def _take_news_of_hosts(self) -> None:
        if self._discovery is None or (problem := self._discovery.problem) == self._problem:
            return
        self._problem = problem
        found = self._discovery.found()
        if problem:
            until_then = "the hosts stay as they were" if found else "there are no hosts"
            self._tell("hosts unknown", f"{problem}. The job looks again every second; until then {until_then}")
        else:
            hosts, slots = (len(found.hosts), found.slots) if found else (0, 0)
            text = f"the hosts are known now: {counted(slots, 'slot')} on {counted(hosts, 'host')}"
            self._tell("hosts known", text, hosts=hosts, slots=slots)

    def _tell(self, kind: str, text: str, **details: object) -> None:
        self._events.add(Event(kind, text, details))

    def _let_go(self, current: _Start) -> None:
        """Has ranks leave whose slots are not among those that there are any more."""
        if self._discovery is None:
            return
        slots = {host.name: host.slots for host in self._slots.named().hosts}
        leaving: frozenset[int] = frozenset()
        for each in current.job.options.host_ranks:
            alive = [rank for rank in each.ranks if rank in current.members.alive]
            if not (self._options.oversubscribe and each.host in slots):
                leaving |= {*alive[slots.get(each.host, 0) :]}
        if not leaving <= current.leaving:  # of those that were told, some may not have ended yet
            hosts = sorted({current.host_of(rank) for rank in leaving})
            text = f"there are fewer slots on {', '.join(hosts)}: {counted(len(leaving), 'rank')} will leave"
            self._tell("leaving", text, ranks=sorted(leaving), hosts=hosts)
            current.members.call_together(leaving)
            current.leaving = leaving

    def _grow(self, current: _Start, now: float) -> None:
        """Starts the next ranks beside those that train, where there is room for more."""
        options = self._slots.options(now)
        is_room = options.np > len(current.members.alive) and not current.leaving & current.members.alive
        if not is_room or now < self._grows_at or not self._may_start:
            self._room = None
        elif self._room is None or self._room[0] != options:
            self._room = options, now
        elif now - self._room[1] > SETTLED_SECONDS:
            self._room = None
            self._start_next(options)

    def _start_next(self, options: LaunchOptions) -> None:
        try:
            self._next = self._started(options, held=True)
        except (LaunchError, SettingError, OSError) as problem:
            self._grow_later(f"new processes cannot be started: {problem}")

    def _grow_later(self, why: str) -> None:
        self._grows_at, self._pause = time.monotonic() + self._pause, min(2 * self._pause, LONGEST_REST_SECONDS)
        self._tell("no start", f"{why}; the job goes on without them")

    def _look_after_next(self, current: _Start, following: _Start) -> None:
        is_late = time.monotonic() - following.began > self._options.elastic_timeout
        if not following.job.turn() or (is_late and not following.members.have_arrived):
            self._give_up(following, current)
            conclude(following.job)
            self._rest_what_failed(following, current)
            self._grow_later("these new processes could not come up")
        elif following.members.have_arrived and current.members.phase == TRAINING and not current.is_called:
            current.members.call_together()
            current.is_called = True

    def _rest_what_failed(self, start: _Start, current: _Start | None = None) -> None:
        """Leaves hosts alone that have kept a start from coming up, but not those where ranks train."""
        now = time.monotonic()
        absent = set(start.job.absent_hosts())
        if current:
            absent -= {current.host_of(rank) for rank in current.members.alive}
        refusing = {start.host_of(rank) for rank in start.job.refusing_ranks}
        for each in start.job.options.host_ranks:
            if each.host in absent | refusing:
                self._slots.rest(each.host, len(each.ranks), now)
        if start.job.fault and not absent:
            self._slots.rest(start.host_of(start.job.fault.rank), 1, now)

    def _give_up(self, start: _Start, current: _Start) -> None:
        start.keep_state_for(current)  # which removes it in the end
        start.job.give_up()
        while start.job.turn():
            pass
        start.exit.close()
        self._next = None

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        if self._discovery:
            self._discovery.start()
        try:
            yield
        finally:
            if self._discovery:
                self._discovery.stop()

    def _take_signal(self, number: int) -> None:
        if number in ENDING_SIGNALS:
            self._signal = number
        if self._current:
            self._current.job.take_signal(number)


def _discovery(options: LaunchOptions, environ: Mapping[str, str]) -> Discovery | None:
    if options.host_discovery_script:
        return Discovery(by_program(options.host_discovery_script, options.slots_per_host or 1, environ))
    return Discovery(by_hostfile(options.hostfile)) if options.hostfile else None


@contextlib.contextmanager
def _memory() -> Iterator[Path]:
    """A folder in memory for the state, for as long as the job lasts."""
    parent = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="hvd-state-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
