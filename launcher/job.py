"""One run: starts mpirun, serves the supervisors of the ranks, ends the job when it is time."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from horovodish.launcher.link import Link, listen
from horovodish.launcher.mpirun import Mpirun, arguments, rank_variable
from horovodish.launcher.outcome import Ending, Fault, first_fault, read_failures, signal_name
from horovodish.launcher.output import Output

__all__ = ["Job"]

SUPERVISOR = Path(__file__).with_name("supervisor.py")

POLL_SECONDS = 0.2
"""How often the run folder is looked at for a rank that raised."""
EXIT_SECONDS = 1.0
"""How long a rank that raised may take to exit: MPI waits for the other ranks then, and they may wait for this one."""
SETTLE_SECONDS = 0.3
"""How long to wait for the cause when a rank has only reported the failure of another."""
MPIRUN_SECONDS = 3.0
"""How long mpirun may take to end when all ranks have."""

Schedule = tuple[tuple[float, int | None], ...]
"""How a job is ended: what signal the ranks get after how many seconds. None: they are given up."""
INTERRUPT: Schedule = ((0.0, signal.SIGINT), (1.5, signal.SIGTERM), (2.5, signal.SIGKILL), (3.5, None))
TERMINATE: Schedule = ((0.0, signal.SIGTERM), (2.5, signal.SIGKILL), (3.5, None))
KILL: Schedule = ((0.0, signal.SIGKILL), (1.0, None))

PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Job:
    """A run on this host.

    Args:
        mpirun: the one that belongs to the MPI of the ranks.
        np: number of ranks.
        command: what each rank runs.
        environ: the variables of the ranks.
        run_dir: an empty folder of this run alone, with a short path.
        prefix: begin each line that a rank writes with `[rank] `.
        start_timeout: how many seconds the ranks may take to start.
        tell: gets each line that the launcher has to say while the job runs.

    Attributes:
        arguments: the command that is run.
        mpirun_log: the file with the output of mpirun itself.

    Attributes after `run()`:
        stopped_by: the signal to the launcher that ended the job, if one did.
        fault: the rank that failed first, if one did.
        started: how many ranks were started.
        timed_out: whether the job was ended because not all of them had started in time.
        completed: how many ranks ended with exit status 0.
        mpirun_status: exit status of mpirun, negative for a signal.
    """

    def __init__(
        self,
        mpirun: Mpirun,
        np: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        run_dir: Path,
        *,
        prefix: bool,
        start_timeout: float,
        tell: Callable[[str], None],
    ) -> None:
        socket_path = run_dir / "launcher.socket"
        program = [sys.executable, "-I", "-S", str(SUPERVISOR), str(socket_path), rank_variable(mpirun), *command]
        self.arguments = arguments(mpirun, np, program, as_root=os.geteuid() == 0)
        self.mpirun_log = run_dir / "mpirun.log"
        self.stopped_by: int | None = None
        self.fault: Fault | None = None
        self.started = 0
        self.timed_out = False
        self.completed = 0
        self.mpirun_status = 0

        self._np = np
        self._environ = environ
        self._run_dir = run_dir
        self._start_timeout = start_timeout
        self._tell = tell
        self._links: set[Link] = set()
        self._endings: list[Ending] = []
        self._raised: set[int] = set()
        self._schedule: list[tuple[float, int | None]] = []  # what is left to do to end the job, by time.monotonic()
        self._is_ending = False
        self._given_up = False

        self._wakeup, self._waker = os.pipe()
        for end in (self._wakeup, self._waker):
            os.set_blocking(end, False)
        self._listener = listen(socket_path)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._take_signals)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._output = Output(np, prefix=prefix, when_closed=lambda: os.write(self._waker, bytes([signal.SIGPIPE])))

    def run(self) -> None:
        """Starts the ranks and returns when all of them have ended. Blocks; must be called in the main thread, once.

        Raises:
            OSError: mpirun cannot be started.
        """
        with self._signals_in_the_pipe(), self.mpirun_log.open("wb") as log:
            mpirun = subprocess.Popen(
                self.arguments,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # signals from the terminal reach the ranks through us alone
            )
            self._output.start()
            try:
                self._serve(mpirun)
            finally:
                self._dismiss(mpirun)
                self._output.finish()
                os.close(self._waker)
                os.close(self._wakeup)
        self.fault = first_fault(self._endings, read_failures(self._run_dir))
        self.completed = sum(ending.status == 0 for ending in self._endings)

    def _serve(self, mpirun: subprocess.Popen[bytes]) -> None:
        start_by = time.monotonic() + self._start_timeout
        while len(self._endings) < self._np and not self._given_up:
            ready = self._selector.select(POLL_SECONDS)
            for key, _ in ready:
                key.data()
            if self.started < self._np and time.monotonic() > start_by and not self._is_ending:
                self.timed_out = True
                self._end(TERMINATE)
            if not ready and mpirun.poll() is not None:  # not as long as supervisors have something to say
                self._end(TERMINATE)
            if self._is_ending and not self._links:
                break
            for failure in read_failures(self._run_dir):
                if failure.rank not in self._raised:
                    self._raised.add(failure.rank)
                    self._end(TERMINATE, after=EXIT_SECONDS)
            self._follow_schedule()

    # What the ranks do

    def _accept(self) -> None:
        link = Link(self._listener.accept()[0])
        self._links.add(link)
        self._selector.register(link.connection, selectors.EVENT_READ, lambda: self._take_message(link))

    def _take_message(self, link: Link) -> None:
        match link.receive():
            case ["rank", rank]:
                link.rank = int(rank)
                if self._is_ending:
                    self._drop(link)  # which tells the supervisor that it is too late
                else:
                    self._give_files(link, link.rank)
            case ["started"]:
                self.started += 1
            case ["told"]:
                link.asked = True
                self._end(TERMINATE)
            case ["ended", status] if link.rank is not None:
                self._endings.append(Ending(link.rank, time.time(), int(status), link.asked))
                if int(status) == 0:
                    link.leave()
                else:
                    self._end(TERMINATE, after=SETTLE_SECONDS if self._is_consequence(link.rank) else 0)
            case []:
                self._drop(link)

    def _give_files(self, link: Link, rank: int) -> None:
        nothing = os.open(os.devnull, os.O_RDWR)
        link.start([0 if rank == 0 else nothing, *self._output.files(rank)])
        self._output.given(rank)
        os.close(nothing)

    def _is_consequence(self, rank: int) -> bool:
        return any(failure.rank == rank and failure.is_consequence for failure in read_failures(self._run_dir))

    def _drop(self, link: Link) -> None:
        self._selector.unregister(link.connection)
        link.connection.close()
        self._links.discard(link)
        if not any(ending.rank == link.rank for ending in self._endings):
            self._end(TERMINATE)  # somebody killed the supervisor

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
            link.connection.close()
        self._listener.close()
        self._selector.close()
        patience = 0.0 if self.timed_out or self._given_up else MPIRUN_SECONDS
        for number, seconds in ((None, patience), (signal.SIGTERM, 1.0), (signal.SIGKILL, None)):
            if number is not None:
                os.killpg(mpirun.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.mpirun_status = mpirun.wait(seconds)
                break
