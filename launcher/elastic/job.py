"""An elastic job: starts ranks, starts new ones when those cannot go on, and more of them when there are more slots.

One start is a `Job`. While it trains, the next one may come up beside it: its ranks import what they need and wait in
`init()`. Then those that train leave their state in memory at a commit and end, and the next ones take it from there.
"""

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from horovodish.errors import LaunchError, SettingError
from horovodish.launcher.agents.meeting import hosts_of_meeting
from horovodish.launcher.elastic.discovery import Discovery, by_hostfile, by_program
from horovodish.launcher.elastic.events import Event, Events
from horovodish.launcher.elastic.members import ENDING, TRAINING, Members
from horovodish.launcher.elastic.policy import ElasticPolicy
from horovodish.launcher.elastic.slots import FIRST_COOLDOWN_SECONDS, LONGEST_COOLDOWN_SECONDS, Slots
from horovodish.launcher.hosts.allocation import counted
from horovodish.launcher.job.conclusion import conclude
from horovodish.launcher.job.job import Job
from horovodish.launcher.job.losses import EndOnLoss
from horovodish.launcher.job.progress import Progress
from horovodish.launcher.job.signals import ENDING as ENDING_SIGNALS
from horovodish.launcher.job.signals import signals_taken
from horovodish.launcher.options import LaunchOptions
from horovodish.launcher.supervisor.supervisor import MEMORY
from horovodish.settings import START_VARIABLE, STATE_FOLDER_VARIABLE

SETTLED_SECONDS = 1.0
"""How long slots must have been there before ranks are started on them."""
WAIT_SECONDS = 0.1
FIRST_RETRY_SECONDS = 1.0
"""How long to wait after processes could not be started while none train. Each further time it is twice as long."""

Prepared = Callable[[LaunchOptions, Mapping[str, str], EndOnLoss], contextlib.AbstractContextManager[Job]]


@dataclass
class _Start:
    """Ranks that were started together.

    Attributes:
        job: the start.
        members: its ranks.
        exit: ends whatever of it still runs.
        began: when.
        losses: how many of its losses were noted.
        told: how many of its events were told.
        leaving: the ranks that were told to leave at their next commit.
        is_called: whether its ranks were told to make room.
        problem: why it could not come up as the next one; empty if it was not wanted any more.
        end: a thread that closes the rest of it, because mpirun and a reader of the output may take their time.
    """

    job: Job
    members: Members
    exit: contextlib.ExitStack
    began: float
    losses: int = 0
    told: int = 0
    leaving: frozenset[int] = frozenset()
    is_called: bool = False
    problem: str = ""
    end: threading.Thread | None = None

    def host_of(self, rank: int) -> str:
        """The name of the rank's host, as the user has written it."""
        return next(each.host for each in self.job.options.host_ranks if rank in each.ranks)

    def keep_state_for(self, other: "_Start") -> None:
        """When this one ends, the state stays on the hosts of another one."""
        hosts = {each.host for each in other.job.options.host_ranks}
        self.job.keep_state_of = {rank for rank in range(self.job.options.np) if self.host_of(rank) in hosts}


class ElasticJob:
    """Starts ranks as often as it takes.

    Args:
        options: of an elastic job.
        prepared: makes a job that can run with these options, variables and policy.
        in_same_processes: whether MPI can go on without a lost rank.
        environ: of the user.
    """

    def __init__(
        self, options: LaunchOptions, prepared: Prepared, in_same_processes: bool, environ: Mapping[str, str]
    ) -> None:
        # The options of a start have another number of ranks, but the same bounds.
        self._options = options = replace(options, min_np=options.least, max_np=options.most)
        self._prepared = prepared
        self._in_same_processes = in_same_processes
        self._discovery = _discovery(options, environ)
        self._slots = Slots(options, self._discovery)
        self._events = Events(options.output_filename, options.report)
        self._problem = ""  # of the discovery, as it was told
        self._signal: int | None = None
        self._current: _Start | None = None
        self._next: _Start | None = None
        self._failed: _Start | None = None  # was to be the next one, and is about to end
        self._starts = 0
        self._never_ran = 0  # of the starts: they failed while others trained
        self._room: tuple[LaunchOptions, float] | None = None  # with these options more ranks could run, since then
        self._grows_at = 0.0  # not sooner
        self._pause = FIRST_COOLDOWN_SECONDS  # when the next one has failed to come up
        self._progress = Progress()

    def run(self) -> int:
        """Runs the job. Returns the exit status."""
        with signals_taken(self._take_signal), self._watched(), _memory() as self._memory:
            self._current = self._started_when_there_are_slots()
            while current := self._current:
                if self._signal:
                    current.job.take_signal(self._signal)
                while current.job.turn():
                    self._look_after(current)
                    self._show_progress(current)
                self._progress.show("")
                self._take_news(current)
                following = self._following(current)
                if following:
                    current.keep_state_for(following)
                elif self._next:
                    self._give_up(self._next, current)
                current.exit.close()
                if following is None and self._failed:
                    self._failed.problem = ""  # nobody waits for it any more
                while following is None and self._failed:
                    self._look_after_failed(current, WAIT_SECONDS)
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
        self._next, self._pause = None, FIRST_COOLDOWN_SECONDS
        if following:
            following.members.follow(current.members)
            following.members.release()
        return following

    def _shall_go_on(self, current: _Start) -> bool:
        """Whether new ranks shall go on where these end, because of what others did to them."""
        members, job = current.members, current.job
        is_later = members.worlds > 0 or self._starts > 1
        # The scripts of ranks that were told to end may have more to do than the scripts of ranks that have finished.
        is_done = members.finished and not members.saved
        if is_done or members.none_shall_go_on or job.stopped_by or job.standstill or (job.refusal and not is_later):
            return False
        return members.has_begun or is_later or job.has_lost_agent

    @property
    def _may_start(self) -> bool:
        if self._options.reset_limit is None:
            return True
        return self._starts - self._never_ran <= self._options.reset_limit

    def _started_when_there_are_slots(self) -> _Start | None:
        """New ranks, as soon as there is room for enough of them; None if there is none until the end of the timeout.

        Raises:
            LaunchError, SettingError: the first ranks cannot be started. With later ones it tries again.
        """
        seconds, least = self._options.elastic_timeout, self._options.least
        limit = f"the job ends after {seconds} s (--elastic-timeout)"
        give_up_at, try_at, pause, waits = time.monotonic() + seconds, 0.0, FIRST_RETRY_SECONDS, False
        lack = "there were too few slots"
        while self._signal is None:
            self._look_after_failed(self._current)
            if self._discovery and not self._discovery.has_looked(WAIT_SECONDS):
                continue
            now = time.monotonic()
            options = self._slots.options(now)
            self._take_news_of_hosts()
            if options.np >= least and now >= try_at:
                try:
                    return self._started(options, held=False)
                except (LaunchError, SettingError, OSError) as problem:
                    if self._starts == 0:
                        raise
                    again = f"the job tries again in {pause:.0f} s; {limit}"
                    self._tell("start failed", f"new processes cannot be started: {problem}; {again}")
                    lack = "new processes could not be started"
                    try_at, pause = now + pause, min(2 * pause, LONGEST_COOLDOWN_SECONDS)
            elif options.np < least and not waits:
                waits, lack = True, "there were too few slots"
                self._tell("waiting", f"waiting for slots: there are {options.np} and --min-np is {least}; {limit}")
            if now > give_up_at:
                self._tell("timeout", f"{lack} for {seconds} s; --elastic-timeout waits longer")
                return None
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
        with contextlib.ExitStack() as stack:
            job = stack.enter_context(self._prepared(options, variables, ElasticPolicy(members)))
            stack.enter_context(job.running())
            self._starts += 1
            return _Start(job, members, stack.pop_all(), time.monotonic())

    # While ranks train

    def _look_after(self, current: _Start) -> None:
        self._take_news(current)
        self._take_news_of_hosts()
        self._look_after_failed(current)
        now = time.monotonic()
        is_training = current.members.phase == TRAINING and current.members.has_run and not current.members.finished
        if is_training and not current.is_called:
            self._let_go(current)
        if self._next is not None:
            self._look_after_next(current, self._next)
        elif current.members.phase == ENDING and self._shall_go_on(current) and self._may_start:
            options = self._slots.options(now)
            if options.np >= self._options.least and now >= self._grows_at and not self._failed:
                self._start_next(options)
        elif is_training:
            self._grow(current, now)

    def _show_progress(self, current: _Start) -> None:
        start = self._next or current
        np, awaited = start.job.options.np, start.members.awaited
        new = "new " if self._starts > 1 else ""
        ready = f"{np - awaited} of {np} {new}processes are ready" if awaited else ""
        self._progress.show(start.job.awaited or ready, draws=current is start)

    def _take_news(self, start: _Start) -> None:
        for rank in start.members.lost[start.losses :]:
            self._slots.cool_down(start.host_of(rank), 1, time.monotonic())
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
        """Ask ranks to leave if their slot is gone."""
        if self._discovery is None:
            return
        slots = {host.name: host.slots for host in self._slots.current_hosts().hosts}
        leaving: frozenset[int] = frozenset()
        for each in current.job.options.host_ranks:
            alive = [rank for rank in each.ranks if rank in current.members.alive]
            if not (self._options.oversubscribe and each.host in slots):
                leaving |= {*alive[slots.get(each.host, 0) :]}
        if not leaving <= current.leaving:  # of those that were told, some may not have ended yet
            hosts = sorted({current.host_of(rank) for rank in leaving})
            text = f"there are fewer slots on {', '.join(hosts)}: {counted(len(leaving), 'rank')} will leave"
            self._tell("leaving", text, ranks=sorted(leaving), hosts=hosts)
            if self._next:  # it may have been started on these slots
                self._give_up(self._next, current)
            current.members.call_together(leaving)
            current.leaving = leaving

    def _grow(self, current: _Start, now: float) -> None:
        """Starts the next ranks beside those that train, where there is room for more."""
        options = self._slots.options(now)
        is_room = options.np > len(current.members.alive) and not current.leaving & current.members.alive
        if not is_room or now < self._grows_at or not self._may_start or self._failed:
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
        self._grows_at, self._pause = time.monotonic() + self._pause, min(2 * self._pause, LONGEST_COOLDOWN_SECONDS)
        is_training = self._current and self._current.members.phase != ENDING
        self._tell(
            "start failed", f"{why}; {'the job continues without them' if is_training else 'the job tries again'}"
        )

    def _look_after_next(self, current: _Start, following: _Start) -> None:
        members = following.members
        is_late = time.monotonic() - following.began > self._options.elastic_timeout
        is_over = not following.job.turn(0.0) or members.phase == ENDING
        if self._signal:
            self._give_up(following, current)
        elif is_over:
            self._give_up(following, current, "these new processes could not come up")
        elif is_late and not members.have_arrived:
            waited = f"{self._options.elastic_timeout} s"
            self._give_up(following, current, f"these new processes did not come to init() within {waited}")
        elif members.have_arrived and current.members.phase == TRAINING and not current.is_called:
            current.members.call_together()
            current.is_called = True

    def _give_up(self, start: _Start, current: _Start, problem: str = "") -> None:
        """Ends the next start, which has failed or is not wanted any more. The ranks that train make no room for it."""
        start.problem = problem
        start.keep_state_for(current)  # which removes it in the end
        start.job.give_up()
        self._next, self._failed = None, start
        self._never_ran += 1
        if current.is_called:
            current.members.call_off()
            current.is_called = False

    def _look_after_failed(self, current: _Start | None, seconds: float = 0.0) -> None:
        """Serves a start that is about to end, `seconds` at most."""
        if (start := self._failed) is None:
            return
        if start.end:
            start.end.join(seconds)
        elif not start.job.turn(seconds):
            start.end = threading.Thread(target=start.exit.close, name="horovodish-end", daemon=True)
            start.end.start()
        if not start.end or start.end.is_alive():
            return
        self._failed = None
        if start.problem:
            conclude(start.job)
            self._rest_what_failed(start, current)
            self._grow_later(start.problem)

    def _rest_what_failed(self, start: _Start, current: _Start | None = None) -> None:
        """Leaves hosts alone that have kept a start from coming up, but not those where ranks train."""
        now = time.monotonic()
        absent = set(start.job.absent_hosts())
        if current:
            absent -= {current.host_of(rank) for rank in current.members.alive}
        refusing = {start.host_of(rank) for rank in start.job.refusing_ranks}
        for each in start.job.options.host_ranks:
            if each.host in absent | refusing:
                self._slots.cool_down(each.host, len(each.ranks), now)
        if start.job.fault and not absent and start.job.fault.rank not in start.members.lost[: start.losses]:
            self._slots.cool_down(start.host_of(start.job.fault.rank), 1, now)

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
        for start in filter(None, (self._current, self._failed)):
            start.job.take_signal(number)


def _discovery(options: LaunchOptions, environ: Mapping[str, str]) -> Discovery | None:
    if options.host_discovery_script:
        return Discovery(by_program(options.host_discovery_script, options.slots_per_host or 1, environ))
    if options.meeting:
        return Discovery(lambda _: hosts_of_meeting(options.meeting))
    return Discovery(by_hostfile(options.hostfile)) if options.hostfile else None


@contextlib.contextmanager
def _memory() -> Iterator[Path]:
    """A folder in memory for the state, for as long as the job lasts."""
    parent = MEMORY if os.access(MEMORY, os.W_OK) else None
    try:
        folder = tempfile.TemporaryDirectory(prefix="hvd-state-", dir=parent, ignore_cleanup_errors=True)
    except OSError as problem:
        raise LaunchError(f"there is no room for the state of the job: {problem}") from problem
    with folder as path:
        yield Path(path)
