"""One run: start mpirun, serve the supervisors of the ranks, and end the job."""

import contextlib
import math
import os
import select
import selectors
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from horovodish.errors import SettingError
from horovodish.launcher.hosts.addresses import addresses
from horovodish.launcher.hosts.allocation import Allocation, counted, listed
from horovodish.launcher.job.environment import THREADS_VARIABLE, rank_variables, threads_notices, torchs_variables
from horovodish.launcher.job.launcher_end import Hello, LauncherEnd, TcpLauncherEnd
from horovodish.launcher.job.listener import SupervisorListener
from horovodish.launcher.job.losses import EndOnLoss
from horovodish.launcher.job.mpirun_process import MpirunProcess
from horovodish.launcher.job.outcome import (
    Ending,
    Failure,
    Fault,
    Refusal,
    first_fault,
    named_twice,
    refusal_of,
    signal_name,
)
from horovodish.launcher.job.output import Output, say_unless_stuck
from horovodish.launcher.job.progress import Progress
from horovodish.launcher.job.signals import ENDING, PASSED_ON
from horovodish.launcher.job.status_desk import StatusDesk
from horovodish.launcher.job.waiting import Waiting
from horovodish.launcher.mpirun.command import agent
from horovodish.launcher.mpirun.messages import absent, missing
from horovodish.launcher.mpirun.reach import reasons_of_absence
from horovodish.launcher.options import LaunchOptions
from horovodish.launcher.supervisor.start import socket_path
from horovodish.launcher.supervisor.supervisor import LAUNCHER_VARIABLE
from horovodish.settings import START_VARIABLE, Settings

POLL_SECONDS = 0.2
EXIT_SECONDS = 1.0
"""How long a rank that raised may take to exit. MPI waits for the other ranks there, and they may wait for this one."""
SETTLE_SECONDS = 0.3
"""How long to wait for the cause: the first event that arrives may be a consequence of one on another host."""
LAST_WORDS_SECONDS = 3.0
"""How long the ranks' last output may take to be read after a signal ended the job. The reader may be stuck."""
UNREACHABLE = "cannot be reached any more, or somebody killed its supervisor"
PIECE_BYTES = 1 << 15
"""How much of stdin or of the command one message has at most."""

Schedule = tuple[tuple[float, int | None], ...]
"""How to end a job: pairs of seconds and the signal that the ranks get then. None gives the ranks up. It comes late
enough after SIGKILL for the supervisors to end the processes that ranks have started, which takes `REST_SECONDS`."""
INTERRUPT: Schedule = ((0.0, signal.SIGINT), (1.5, signal.SIGTERM), (2.5, signal.SIGKILL), (4.0, None))
TERMINATE: Schedule = ((0.0, signal.SIGTERM), (2.5, signal.SIGKILL), (4.0, None))
KILL: Schedule = ((0.0, signal.SIGKILL), (1.5, None))
GIVE_UP: Schedule = ((0.0, None),)


class Job:
    """A run. No rank is started before the supervisors of all ranks have reported.

    Args:
        command: the mpirun command that starts the supervisors.
        environ: the variables of that command.
        options: of the user.
        settings: of the user.
        folder: an empty folder of this run alone, with a short path.
        output: takes what the ranks write.
        policy: who goes on when a rank is lost.

    Attributes:
        mpirun: that starts the supervisors.
        options: as given.
        policy: as given.
        keep_state_of: the ranks of an elastic job on whose hosts other ranks of it will run.

    Attributes after `running()`:
        stopped_by: the signal to the launcher that ended the job, if one did.
        lost_agent: which agent that has started ranks has gone, and why; empty if that did not end the job.
        has_lost_agent: whether an elastic job has lost one that had started ranks.
        refusal: why no rank was started, if that was decided when all supervisors had reported.
        standstill: why the job was ended, if ranks would have waited for others for ever.
        fault: the rank that failed first, if one did.
        left: the ranks that ended with exit status 0 while others could still need them, in this order.
        failures: the exceptions that ranks have reported, by rank.
        lost: the ranks whose supervisors vanished, in this order.
        told: the hosts where mpirun, or its daemon, told supervisors to end their ranks, in this order.
        abandoned: the hosts where mpirun, or its daemon, ended before the ranks did, in this order.
        has_state: whether the script trains a state of `hvd.elastic`.
        is_unwanted: whether it was given up before anything else had ended it.
        timed_out: whether the job was ended because not all supervisors had reported in time.
        completed: how many ranks ended with exit status 0.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        options: LaunchOptions,
        settings: Settings,
        folder: Path,
        output: Output,
        policy: EndOnLoss,
    ) -> None:
        self.mpirun = MpirunProcess(command, folder)
        self.options = options
        self.policy = policy
        self.keep_state_of: set[int] = set()
        self.stopped_by: int | None = None
        self.lost_agent, self.has_lost_agent = "", False
        self.refusal: Refusal | None = None
        self.standstill: str | None = None
        self.fault: Fault | None = None
        self.left: list[int] = []
        self.failures: dict[int, Failure] = {}
        self.lost: list[int] = []
        self.told: list[str] = []
        self.abandoned: list[str] = []
        self.has_state = False
        self.is_unwanted = False
        self.timed_out = False
        self.completed = 0

        self._np = options.np
        self._command = b"".join(os.fsencode(word) + b"\0" for word in options.command)
        self._output = output
        self._start_timeout_seconds = settings.start_timeout_seconds
        self._with_threads = THREADS_VARIABLE not in environ
        self._waiting = Waiting(
            settings.stall_check * settings.stall_check_warning_time_seconds,
            settings.stall_check * settings.stall_check_shutdown_time_seconds,
        )
        self._links: dict[LauncherEnd, tuple[int, int]] = {}  # the file to watch, and the events to watch it for
        self._hellos: dict[int, Hello] = {}
        self._left_with: dict[int, int] = {}  # exit statuses of the ranks' scripts; 0: not known
        self._killed: dict[int, str] = {}  # ranks of an elastic job, for their own fault, and why
        self._has_begun = False
        self._endings: list[Ending] = []
        self._cleared: set[int] = set()  # the ranks whose supervisors have nothing left to do
        self._schedule: list[tuple[float, int | None]] = []  # the rest of a Schedule, by time.monotonic()
        self._is_ending = False
        self._given_up = False
        self._busy_at = 0.0  # when a message came last, by time.monotonic()

        self._selector = selectors.DefaultSelector()
        own = addresses(options.network_interfaces) if options.is_far else None
        self._listener = SupervisorListener(self._selector, socket_path(folder), self._add_link, own)
        self._desk = StatusDesk(self._selector, folder, options.command, self._ask_status, self._describe)
        self._own_addresses = own or []
        self._agent = agent(options, environ) if environ.get(START_VARIABLE, "0") == "0" else []
        self._reasons: dict[str, str] = {}  # by silent host: why it is silent, as far as trying to reach it tells
        self._environ = {name: value for name, value in environ.items() if name != "_"}
        if self._listener.contact:
            self._environ[LAUNCHER_VARIABLE] = self._listener.contact
        # A shell sets "_", too. It comes last, because the mpirun of MPICH 5.0 does not pass on the last variable.
        self._environ["_"] = command[0]
        self._wakeup, self._waker = os.pipe()
        for end in (self._wakeup, self._waker):
            os.set_blocking(end, False)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._take_signals)

    @property
    def hosts(self) -> dict[int, str]:
        """The host of each rank whose supervisor has reported."""
        return {rank: hello.host for rank, hello in self._hellos.items()}

    @property
    def _missing_hosts(self) -> list[str]:
        return missing(self.options.host_ranks, self._hellos, self._own_addresses)

    @property
    def awaited(self) -> str:
        """A description of what the ranks' start waits for; empty if they are started."""
        if self._has_begun or self._is_ending:
            return ""
        started = f"{len(self._hellos)} of {counted(self._np, 'rank')} can start"
        hosts = self._missing_hosts
        return f"waiting for {listed(hosts)}: {started}" if hosts else started

    @property
    def pythons(self) -> dict[str, str]:
        """The version of Python on each host that a supervisor has reported from."""
        return {hello.host: hello.python for hello in self._hellos.values()}

    @property
    def refusing_ranks(self) -> list[int]:
        """The ranks whose hosts cannot run the command."""
        return [rank for rank, hello in self._hellos.items() if hello.problem]

    def absent_hosts(self) -> dict[str, str]:
        """The hosts that have kept ranks from reporting, and why."""
        found = absent(self._missing_hosts, self.mpirun.said)
        return {host: reason or self._reasons.get(host, "") for host, reason in found.items()}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Starts the ranks, and at the end waits until they and mpirun have ended. In the context, call `turn()`.

        Raises:
            LaunchError: mpirun cannot be started.
        """
        self.mpirun.start(self._environ)
        self._busy_at = time.monotonic()
        self._start_by = self._busy_at + self._start_timeout_seconds
        try:
            yield
        finally:
            self._dismiss()
            self._finish_output()
        self._try_absent_hosts()
        self.fault = first_fault(
            [*self.policy.losses, *self._endings], self.failures.values(), self._output.last_errors()
        )
        self.standstill = self.standstill or self._waiting.deserted(math.inf)  # mpirun may have been faster
        self.completed = sum(ending.status == 0 for ending in self._endings)

    def _try_absent_hosts(self) -> None:
        hosts = self.absent_hosts()
        if (
            self._has_begun
            or self.stopped_by
            or self.lost_agent
            or self.is_unwanted
            or any(hosts.values())
            or not self._agent
        ):
            return
        progress = Progress()

        def is_over() -> bool:
            progress.show(f"trying to reach {listed([*hosts])}")
            return bool(select.select([self._wakeup], [], [], 0)[0])

        self._reasons = reasons_of_absence(
            hosts,
            self._agent,
            self._environ,
            was_late=self.timed_out,
            is_over=is_over,
        )
        progress.show("")

    def close(self) -> None:
        """Closes what the job has opened. Called once, when it has run or could not be started."""
        self._listener.close()
        self._desk.close()
        self._selector.close()
        waker, self._waker = self._waker, -1  # a signal may come now
        os.close(waker)
        os.close(self._wakeup)

    def watch_agents(self, link: LauncherEnd, hosts: Callable[[], Allocation | None]) -> None:
        """Ends the job when an agent that starts its ranks is lost. An elastic job that has begun loses these ranks.

        Args:
            link: to their meeting, which says "lost HOST MESSAGE" then.
            hosts: returns the hosts of the agents that are there.
        """
        self._selector.register(link.connection, selectors.EVENT_READ, lambda: self._take_losses(link, hosts))

    def _take_losses(self, link: LauncherEnd, hosts: Callable[[], Allocation | None]) -> None:
        for word, rest in link.receive():
            if word == "lost" and not self._is_ending:
                host, _, why = rest.partition(" ")
                self._lose_agent(host, why, hosts)
            elif not word:
                self._selector.unregister(link.connection)

    def _lose_agent(self, host: str, why: str, hosts: Callable[[], Allocation | None]) -> None:
        if self.options.is_elastic:
            try:
                now = hosts()
            except SettingError:  # the meeting is over, and all agents with it
                now = None
            if now and host in {each.name for each in now.hosts}:
                return  # another agent is there: the launcher looks for its slots
            ranks = {rank for each in self.options.host_ranks if each.host == host for rank in each.ranks}
            if not ranks:
                return  # it was lost before these ranks were started
            self.has_lost_agent = True
            if self._has_begun:
                for link in [each for each in self._links if each.hello and each.hello.rank in ranks]:
                    self._drop(link, f"was lost with its agent: {why.partition(' has gone: ')[2]}")
                return
        self.lost_agent = why
        self._end(TERMINATE)

    def give_up(self) -> None:
        """Ends the ranks: they are not needed any more."""
        self.is_unwanted = not self._is_ending and not self._schedule and len(self._cleared) < self._np
        self._end(TERMINATE)

    def turn(self, seconds: float = POLL_SECONDS) -> bool:
        """Handles all events, and waits for more, `seconds` at most. False when all ranks have ended."""
        ready = self._selector.select(min(seconds, self._desk.due_seconds))
        for key, _ in ready:
            key.data()
        if ready:
            self._busy_at = time.monotonic()
        self._desk.turn(len(self._links) if self._has_begun else 0)
        is_quiet = time.monotonic() - self._busy_at > POLL_SECONDS
        if self._has_begun:
            self._listener.close()  # all supervisors are connected
        else:
            self._listener.maintain()
        if not self._has_begun and time.monotonic() > self._start_by and not self._is_ending:
            self.timed_out = True
            self._end(GIVE_UP)
        if is_quiet and self.mpirun.has_ended:  # first read all that the supervisors have sent
            self._end(TERMINATE)
        if is_quiet and not self._has_begun and any(self.absent_hosts().values()):
            self._end(GIVE_UP)
        if self._is_ending and not self._links:
            return False
        if self._has_begun and not self._is_ending:
            if self.policy.are_held:
                self._waiting.released(time.monotonic())
            else:
                self._look_for_a_standstill()
            self._carry_out_orders()
        self._follow_schedule()
        return len(self._cleared) < self._np and not self._given_up

    # What the ranks do

    def _add_link(self, link: LauncherEnd) -> None:
        self._links[link] = link.watched
        self._selector.register(*link.watched, lambda: self._take_messages(link))

    def _take_messages(self, link: LauncherEnd) -> None:
        for word, rest in link.receive():
            self._take_message(link, word, rest)
            if link not in self._links:
                return
        if link.watched != self._links[link]:
            self._selector.unregister(self._links[link][0])
            self._add_link(link)

    def _take_message(self, link: LauncherEnd, word: str, rest: str) -> None:
        if word == "rank":
            link.hello = Hello.of(rest)
            self._hellos[link.hello.rank] = link.hello
            if self._is_ending:
                self._drop(link)  # it is too late
            elif len(self._hellos) == self._np:
                self._begin()
        elif word == "command":
            link.give_command(self._command[int(rest) :][:PIECE_BYTES])
        elif word == "":
            self._drop(link)
        elif link.hello:
            self._take_news(link, link.hello, word, rest)

    def _take_news(self, link: LauncherEnd, of: Hello, word: str, rest: str) -> None:
        now = time.monotonic()
        match word:
            case "told" if not self.policy.go_on_when_told():
                self._note_asked(link)
                self.told.append(of.host)
                self._end(TERMINATE)
            case "abandoned":
                self.abandoned.append(of.host)
                if not self.policy.go_on_without_mpirun(of.host, now):
                    self._end(TERMINATE, after=SETTLE_SECONDS)
            case "failure":
                self.failures[of.rank] = Failure.of(of.rank, rest)
                self.policy.fail(self.failures[of.rank], now)
                self._end(TERMINATE, after=EXIT_SECONDS)
            case "ended":
                why, status = self._killed.get(of.rank, ""), int(rest)
                if link.asked and os.WIFSIGNALED(status):  # perhaps while it waited in MPI_Finalize
                    status = self._left_with.get(of.rank, 0) << 8 or status
                self._take_ending(link, of, Ending(of.rank, time.time(), status, link.asked, why, link.had_left))
            case "cleared":
                self._cleared.add(of.rank)
            case "phase":
                reached, process = rest.split()
                phase, *details = reached.split(":")
                self.has_state |= phase == "training"
                self._waiting.reached(of.rank, phase, int(process), now)
                if phase == "exit":
                    self._left_with[of.rank] = int(details[0])
                self.policy.reached(of.rank, phase, now, *map(int, details))
            case "state":
                process, state = rest.split()
                self._waiting.answered(of.rank, int(process), state)
                self.policy.answered(of.rank, state, now)
            case "status":
                self._waiting.answered(of.rank, *self._desk.take(of.rank, rest))
            case "read":
                self._read_stdin_for(link)

    def _take_ending(self, link: LauncherEnd, of: Hello, ending: Ending) -> None:
        now = time.monotonic()
        is_needed = self._waiting.is_needed(of.rank)
        if self.policy.go_on_without(ending, of.host, now, is_needed=is_needed):
            self._waiting.ended(of.rank, now)
            return
        self._endings.append(ending)
        if ending.status == 0:
            self._waiting.ended(of.rank, now)
            if is_needed and not ending.asked:
                self.left.append(of.rank)
        if ending.status != 0 or self.policy.must_be_ended:
            self._end(TERMINATE, after=SETTLE_SECONDS)
        else:
            link.leave()

    def _carry_out_orders(self) -> None:
        links = {link.hello.rank: link for link in self._links if link.hello}
        busy = [rank for rank, link in links.items() if link.is_stuck]
        orders = self.policy.take_orders(busy, time.monotonic())
        for rank, news in orders.news:
            if rank in links:
                links[rank].tell(news)
        self._killed.update(orders.kill)
        for rank, _ in orders.kill:
            if rank in links:
                links[rank].signal(signal.SIGKILL)
        if orders.ends:
            self._end(KILL if orders.at_once else TERMINATE)
        for link in self._links if orders.asks else ():
            link.ask_state()
        for rank in orders.drop:
            if rank in links:
                self._drop(links[rank])

    def _begin(self) -> None:
        """All supervisors have reported: starts the ranks, or none of them."""
        for rank, problem in named_twice(self._hellos.values(), self.options.host_ranks).items():
            self._hellos[rank] = replace(self._hellos[rank], problem=problem)
        hellos = self._hellos.values()
        self.refusal = refusal_of(hellos)
        try:
            variables = rank_variables(
                hellos, with_threads=self._with_threads, gpus_per_rank=self.options.gpus_per_rank
            )
        except SettingError as problem:
            self.refusal = self.refusal or Refusal(2, str(problem))
        if self.refusal:
            self._end(GIVE_UP)
            return
        self._has_begun = True
        self._waiting.began({hello.rank: (hello.host, hello.process) for hello in hellos})
        for notice in threads_notices(hellos) if self._with_threads else []:
            say_unless_stuck(notice)
        torchs = torchs_variables(hellos, self._address_of_rank_0(), self._environ)
        for link in self._links:
            assert link.hello is not None
            rank = link.hello.rank
            files = self._output.files(rank, is_far=isinstance(link, TcpLauncherEnd))
            link.start(files, {**torchs[rank], **variables[rank]}, has_stdin=rank == 0)
            self._output.given(rank)
        self._output.start(when_closed=lambda: os.write(self._waker, bytes([signal.SIGPIPE])))

    def _address_of_rank_0(self) -> str:
        """At which the ranks of other hosts reach its host."""
        far = [link for link in self._links if isinstance(link, TcpLauncherEnd)]
        for link in far:
            if link.hello and link.hello.rank == 0:
                return str(link.connection.getpeername()[0])
        return str(far[0].connection.getsockname()[0]) if far else "127.0.0.1"

    def _read_stdin_for(self, link: LauncherEnd) -> None:
        def feed() -> None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(0)
            try:
                link.feed(os.read(0, PIECE_BYTES))
            except OSError:
                link.feed(b"")  # stdin is closed, or we are in the background of a terminal

        try:
            self._selector.register(0, selectors.EVENT_READ, feed)
        except OSError:
            feed()  # a regular file, which cannot be watched and is always readable

    def _drop(self, link: LauncherEnd, why: str = UNREACHABLE) -> None:
        self._selector.unregister(self._links.pop(link)[0])
        its, now = link.hello, time.monotonic()
        others = {self.hosts.get(rank) for rank in self.policy.alive - {its.rank}} if its else set()
        link.leave(keep=its is not None and its.host in others)  # their state is there, too
        link.close()
        if its and any(ending.rank == its.rank for ending in self._endings):
            self._cleared.add(its.rank)
        elif its and self._has_begun and self.policy.go_on_without_link(its.rank, its.host, why, now):
            self._waiting.ended(its.rank, now)
            self._cleared.add(its.rank)
        else:
            if its and self._has_begun and not link.asked:
                self.lost.append(its.rank)
            self._end(TERMINATE, after=SETTLE_SECONDS)  # with a host, several ranks are lost

    def _look_for_a_standstill(self) -> None:
        now = time.monotonic()
        self.standstill = self._waiting.deserted(now)
        if warning := self._waiting.left_behind(now):
            say_unless_stuck(f"warning: {warning}")
        if self._waiting.asks(now):
            for link in self._links:
                link.ask_state()
        notice = self._waiting.notice(now)
        if notice and notice.ends_job:
            self.standstill = notice.text
        elif notice:
            say_unless_stuck(f"warning: {notice.text}")
        if self.standstill:
            self._end(TERMINATE)

    def _ask_status(self, number: int, question: str) -> None:
        for link in self._links if self._has_begun else ():
            link.ask_status(number, question)

    def _describe(self) -> dict[str, Any]:
        """The launcher's own part of the answer to `horovodish status`."""
        now = time.monotonic()
        return {
            "np": self._np,
            "awaited": self.awaited,
            "is_ending": self._is_ending,
            "waits": self._waiting.standing(now),
            "ranks": self._waiting.places(now),
        }

    # What the launcher is told by signals

    def take_signal(self, number: int) -> None:
        """Does, in its next `turn()`, what a signal to the launcher asks for. Can be called in a signal handler."""
        with contextlib.suppress(OSError):  # it is full, or the job has ended
            os.write(self._waker, bytes([number]))

    def _take_signals(self) -> None:
        for number in os.read(self._wakeup, 64):
            if number in PASSED_ON:
                self._signal(number)
            elif number == signal.SIGTSTP:
                self._signal(signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGSTOP)
                self._signal(signal.SIGCONT)
            elif self._is_ending and number in ENDING:
                self._is_ending = False
                self._schedule = []
                self._end(KILL)
            elif not self._is_ending and number in (*ENDING, signal.SIGPIPE):
                self.stopped_by = number
                self._end(INTERRUPT if number == signal.SIGINT else TERMINATE)
                if number == signal.SIGINT:
                    say_unless_stuck("ending the ranks; Ctrl-C once more kills them")
                elif number != signal.SIGPIPE:  # nobody would read it
                    say_unless_stuck(f"ending the ranks because of {signal_name(number)}")

    # How the job is ended

    def _end(self, schedule: Schedule, after: float = 0.0) -> None:
        """Begins this schedule in `after` seconds, unless the job is ending already or is due to end sooner."""
        if not self._has_begun:
            schedule = GIVE_UP  # there are no ranks yet
        begin = time.monotonic() + after
        if not self._is_ending and (not self._schedule or begin < self._schedule[0][0]):
            self._schedule = [(begin + seconds, number) for seconds, number in schedule]
            self._follow_schedule()

    def _follow_schedule(self) -> None:
        while self._schedule and time.monotonic() >= self._schedule[0][0]:
            _, number = self._schedule.pop(0)
            self._is_ending = True
            for link in self._links:
                self._note_asked(link)
            if number is None:
                self._given_up = True
            else:
                self._signal(number)
                self._signal(signal.SIGCONT)  # a stopped rank handles signals when it continues

    def _note_asked(self, link: LauncherEnd) -> None:
        if not link.asked and link.hello and self._has_begun:
            link.had_left = self._waiting.has_left(link.hello.rank)
        link.asked = True

    def _signal(self, number: int) -> None:
        for link in self._links:
            link.signal(number)

    def _dismiss(self) -> None:
        """Closes the links, at which supervisors end ranks that still run, and waits for mpirun to end."""
        for link in self._links:
            link.leave(keep=link.hello is not None and link.hello.rank in self.keep_state_of)
            link.close()
        self._listener.close()
        is_stuck = len(self._hellos) < self._np or (self._given_up and self._has_begun)
        self.mpirun.end(at_once=is_stuck)

    def _finish_output(self) -> None:
        """Waits until the ranks' output has been read. After a signal, waits for `LAST_WORDS_SECONDS` only."""
        self._output.finish()
        while not self._output.is_done(within=LAST_WORDS_SECONDS if self.stopped_by else POLL_SECONDS):
            if self.stopped_by:
                say_unless_stuck("the last output of the ranks is lost, because nobody reads it")
                break
            with contextlib.suppress(BlockingIOError):
                self.stopped_by = next((each for each in os.read(self._wakeup, 64) if each in ENDING), None)
