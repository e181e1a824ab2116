"""One run: starts mpirun, serves the supervisors of the ranks, ends the job when it is time."""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from horovodish.errors import SettingError
from horovodish.launcher.environment import rank_variables, threads_notices
from horovodish.launcher.link import Arrival, FarLink, Link
from horovodish.launcher.outcome import Ending, Failure, Fault, Refusal, first_fault, refusal_of, signal_name
from horovodish.launcher.output import Output
from horovodish.launcher.program import socket_path
from horovodish.launcher.reception import Reception
from horovodish.launcher.supervisor import LAUNCHER_VARIABLE

__all__ = ["Job"]

POLL_SECONDS = 0.2
EXIT_SECONDS = 1.0
"""How long a rank that raised may take to exit: MPI waits for the other ranks then, and they may wait for this one."""
SETTLE_SECONDS = 0.3
"""How long to wait for the cause: what is seen first may be a consequence of what happens on another host."""
MPIRUN_SECONDS = 3.0
"""How long mpirun may take to end when all ranks have."""
LAST_WORDS_SECONDS = 3.0
"""How long, once a signal has ended the job, reading what the ranks have written may take: the reader may be stuck."""
STDIN_BYTES = 1 << 15

Schedule = tuple[tuple[float, int | None], ...]
"""How a job is ended: what signal the ranks get after how many seconds. None: they are given up, which leaves the
supervisors `REST_SECONDS` after SIGKILL for what the ranks have started."""
INTERRUPT: Schedule = ((0.0, signal.SIGINT), (1.5, signal.SIGTERM), (2.5, signal.SIGKILL), (4.0, None))
TERMINATE: Schedule = ((0.0, signal.SIGTERM), (2.5, signal.SIGKILL), (4.0, None))
KILL: Schedule = ((0.0, signal.SIGKILL), (1.5, None))
GIVE_UP: Schedule = ((0.0, None),)

PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Job:
    """A run. No rank is started before the supervisors of all ranks have reported.

    Args:
        arguments: the command that starts the supervisors.
        np: number of ranks.
        environ: the variables of that command.
        run_dir: an empty folder of this run alone, with a short path.
        output: takes what the ranks write.
        at: this host's addresses for supervisors on other hosts; None if there are none.
        with_threads: whether to choose how many threads each rank computes with.
        gpus_per_rank: how many GPUs each rank sees; None: all of its host.
        start_timeout: how many seconds the supervisors may take to report.
        is_hopeless: whether to wait no longer, by the ranks that have reported and what mpirun has written.
        tell: gets each line that the launcher has to say while the job runs.

    Attributes:
        arguments: the command that is run.

    Attributes after `run()`:
        stopped_by: the signal to the launcher that ended the job, if one did.
        refusal: why no rank was started, if that was decided when all supervisors had reported.
        fault: the rank that failed first, if one did.
        failures: what ranks have told of their exceptions.
        lost: the ranks whose supervisors vanished, in this order.
        abandoned: the hosts where mpirun, or its daemon, ended before the ranks did, in this order.
        timed_out: whether the job was ended because not all of them had reported in time.
        completed: how many ranks ended with exit status 0.
        mpirun_status: exit status of mpirun, negative for a signal.
        mpirun_was_killed: whether a signal ended mpirun that did not come from here.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        np: int,
        environ: Mapping[str, str],
        run_dir: Path,
        output: Output,
        *,
        at: Sequence[str] | None,
        with_threads: bool,
        gpus_per_rank: int | None,
        start_timeout: float,
        is_hopeless: Callable[[set[int], str], bool],
        tell: Callable[[str], None],
    ) -> None:
        self.arguments = arguments
        self._mpirun_log = run_dir / "mpirun.log"
        self.stopped_by: int | None = None
        self.refusal: Refusal | None = None
        self.fault: Fault | None = None
        self.failures: dict[int, Failure] = {}
        self.lost: list[int] = []
        self.abandoned: list[str] = []
        self.timed_out = False
        self.completed = 0
        self.mpirun_status = 0
        self.mpirun_was_killed = False

        self._np = np
        self._output = output
        self._with_threads = with_threads
        self._gpus_per_rank = gpus_per_rank
        self._start_timeout = start_timeout
        self._is_hopeless = is_hopeless
        self._tell = tell
        self._links: dict[Link, tuple[int, int]] = {}  # and what is waited for
        self._arrivals: dict[int, Arrival] = {}
        self._has_begun = False
        self._endings: list[Ending] = []
        self._cleared: set[int] = set()  # the ranks whose supervisors have nothing left to do
        self._schedule: list[tuple[float, int | None]] = []  # what is left to do to end the job, by time.monotonic()
        self._is_ending = False
        self._given_up = False

        self._wakeup, self._waker = os.pipe()
        for end in (self._wakeup, self._waker):
            os.set_blocking(end, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._take_signals)
        self._reception = Reception(self._selector, socket_path(run_dir), self._admit, at)
        self._environ = {**environ, LAUNCHER_VARIABLE: self._reception.address} if at is not None else environ

    @property
    def hosts(self) -> dict[int, str]:
        """The host of each rank whose supervisor has reported."""
        return {rank: arrival.host for rank, arrival in self._arrivals.items()}

    @property
    def said_by_mpirun(self) -> str:
        """What mpirun itself has written so far."""
        return self._mpirun_log.read_text(encoding="utf-8", errors="replace").replace("\0", "")

    def run(self) -> None:
        """Starts the ranks and returns when all of them have ended. Blocks; must be called in the main thread, once.

        Raises:
            OSError: mpirun cannot be started.
        """
        with self._signals_in_the_pipe(), self._mpirun_log.open("wb") as log:
            mpirun = subprocess.Popen(
                self.arguments,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # signals from the terminal reach the ranks through us alone
            )
            try:
                self._serve(mpirun)
            finally:
                self._dismiss(mpirun)
                self._finish_output()
                os.close(self._waker)
                os.close(self._wakeup)
        self.fault = first_fault(self._endings, self.failures.values())
        self.completed = sum(ending.status == 0 for ending in self._endings)

    def _serve(self, mpirun: subprocess.Popen[bytes]) -> None:
        start_by = time.monotonic() + self._start_timeout
        while len(self._cleared) < self._np and not self._given_up:
            ready = self._selector.select(POLL_SECONDS)
            for key, _ in ready:
                key.data()
            if not self._has_begun and time.monotonic() > start_by and not self._is_ending:
                self.timed_out = True
                self._end(GIVE_UP)
            if not ready and mpirun.poll() is not None:  # not as long as supervisors have something to say
                self._end(TERMINATE)
            if not ready and not self._has_begun and self._is_hopeless(set(self._arrivals), self.said_by_mpirun):
                self._end(GIVE_UP)
            if self._is_ending and not self._links:
                break
            self._follow_schedule()

    # What the ranks do

    def _admit(self, link: Link) -> None:
        self._links[link] = link.watched
        self._selector.register(*link.watched, lambda: self._take_messages(link))

    def _take_messages(self, link: Link) -> None:
        for word, rest in link.receive():
            self._take_message(link, word, rest)
            if link not in self._links:
                return
        if link.watched != self._links[link]:
            self._selector.unregister(self._links[link][0])
            self._admit(link)

    def _take_message(self, link: Link, word: str, rest: str) -> None:
        match word:
            case "rank":
                link.arrival = Arrival.of(rest)
                self._arrivals[link.arrival.rank] = link.arrival
                if self._is_ending:
                    self._drop(link)  # it is too late
                elif len(self._arrivals) == self._np:
                    self._begin()
            case "told":
                link.asked = True
                self._end(TERMINATE)
            case "abandoned" if link.arrival:
                self.abandoned.append(link.arrival.host)
                self._end(TERMINATE, after=SETTLE_SECONDS)
            case "failure" if link.arrival:
                self.failures[link.arrival.rank] = Failure.of(link.arrival.rank, rest)
                self._end(TERMINATE, after=EXIT_SECONDS)
            case "ended" if link.arrival:
                rank, status = link.arrival.rank, int(rest)
                self._endings.append(Ending(rank, time.time(), status, link.asked))
                if status == 0:
                    link.leave()
                else:
                    self._end(TERMINATE, after=SETTLE_SECONDS)
            case "cleared" if link.arrival:
                self._cleared.add(link.arrival.rank)
            case "read":
                self._read_stdin_for(link)
            case "":
                self._drop(link)

    def _begin(self) -> None:
        """All supervisors are there: starts the ranks, or none of them."""
        arrivals = self._arrivals.values()
        self.refusal = refusal_of(arrivals)
        try:
            variables = rank_variables(arrivals, with_threads=self._with_threads, gpus_per_rank=self._gpus_per_rank)
        except SettingError as problem:
            self.refusal = self.refusal or Refusal(2, str(problem))
        if self.refusal:
            self._end(GIVE_UP)
            return
        self._has_begun = True
        for notice in threads_notices(arrivals) if self._with_threads else []:
            self._tell(notice)
        for link in self._links:
            assert link.arrival is not None
            rank = link.arrival.rank
            files = self._output.files(rank, is_far=isinstance(link, FarLink))
            link.start(files, variables[rank], has_stdin=rank == 0)
            self._output.given(rank)
        self._output.start(when_closed=lambda: os.write(self._waker, bytes([signal.SIGPIPE])))

    def _read_stdin_for(self, link: Link) -> None:
        def feed() -> None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(0)
            try:
                link.feed(os.read(0, STDIN_BYTES))
            except OSError:
                link.feed(b"")  # it is closed, or a terminal in whose background we are

        try:
            self._selector.register(0, selectors.EVENT_READ, feed)
        except OSError:
            feed()  # a file, in which there is always something to read

    def _drop(self, link: Link) -> None:
        self._selector.unregister(self._links.pop(link)[0])
        link.leave()
        link.close()
        rank = link.arrival.rank if link.arrival else None
        if rank is not None and any(ending.rank == rank for ending in self._endings):
            self._cleared.add(rank)
        else:
            if rank is not None and self._has_begun and not link.asked:
                self.lost.append(rank)
            self._end(TERMINATE, after=SETTLE_SECONDS)  # with a host, several ranks are lost

    # What the launcher is told by signals

    @contextlib.contextmanager
    def _signals_in_the_pipe(self) -> Iterator[None]:
        ours = [*ENDING, *PASSED_ON, signal.SIGTSTP]
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            ours.remove(signal.SIGHUP)  # under nohup
        former = {number: signal.signal(number, lambda *_: None) for number in ours}
        former_wakeup = signal.set_wakeup_fd(self._waker)
        try:
            yield
        finally:
            signal.set_wakeup_fd(former_wakeup)
            for number, handler in former.items():
                signal.signal(number, handler)

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
                    self._tell("ending the ranks; Ctrl-C once more kills them")
                elif number != signal.SIGPIPE:  # nobody would read it
                    self._tell(f"ending the ranks because of {signal_name(number)}")

    # How the job is ended

    def _end(self, schedule: Schedule, after: float = 0.0) -> None:
        """Ends the job by this schedule, `after` so many seconds, unless that was begun or comes earlier already."""
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
                link.asked = True
            if number is None:
                self._given_up = True
            else:
                self._signal(number)
                self._signal(signal.SIGCONT)  # a stopped rank takes a signal when it goes on

    def _signal(self, number: int) -> None:
        for link in self._links:
            link.signal(number)

    def _dismiss(self, mpirun: subprocess.Popen[bytes]) -> None:
        """Lets the supervisors go, which ends ranks that are still there, and waits for mpirun to end."""
        for link in self._links:
            link.leave()
            link.close()
        self._reception.close()
        self._selector.close()
        is_stuck = len(self._arrivals) < self._np or (self._given_up and self._has_begun)
        patience = 0.0 if is_stuck else MPIRUN_SECONDS
        for number, seconds in ((None, patience), (signal.SIGTERM, 1.0), (signal.SIGKILL, None)):
            if number is not None:
                os.killpg(mpirun.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.mpirun_status = mpirun.wait(seconds)
                self.mpirun_was_killed = number is None and self.mpirun_status < 0
                break

    def _finish_output(self) -> None:
        """Waits for what there is to be read on stdout and stderr; for long only as long as no signal ends that."""
        self._output.finish()
        while not self._output.is_done(within=LAST_WORDS_SECONDS if self.stopped_by else POLL_SECONDS):
            if self.stopped_by:
                self._tell("nobody reads what the ranks wrote last; it is lost")
                break
            with contextlib.suppress(BlockingIOError):
                self.stopped_by = next((each for each in os.read(self._wakeup, 64) if each in ENDING), None)
