"""Ranks that call functions for this process, one after the other."""

import codecs
import contextlib
import functools
import os
import pickle
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from horovodish.errors import LaunchError, RankLostError
from horovodish.launcher.agents.meeting import LOST
from horovodish.launcher.function.call import UNREACHED, Call, Report
from horovodish.launcher.function.exchange import Exchange
from horovodish.launcher.hosts.addresses import addresses
from horovodish.launcher.job.environment import HOROVOD_FOLDER
from horovodish.launcher.options import LaunchOptions
from horovodish.launcher.own_python import module_command
from horovodish.settings import CALLER_VARIABLE

LAUNCHERS_LINE = "horovodish: "
LOOPBACK = "127.0.0.1"
MAINTAIN_SECONDS = 1.0
LAST_REPORTS_SECONDS = 1.0
"""How long to wait for the ends of the links when the launcher has ended."""
REASON_SECONDS = 3.0
"""How long whoever has started the agents may take to find out why one is lost."""
READ_BYTES = 1 << 16

Problem = Callable[[float], str]
"""Returns what has happened to agents, such as which actor has died; empty if all are well. The argument says how many
seconds it may take."""


class RankTraceback(Exception):
    """The cause of an exception that `run()` raises: the traceback that it has on its rank, as text."""


class Ranks:
    """The processes of a launcher that wait for calls. They end at the end of the context.

    A thread of its own starts the launcher, passes its output on and serves the ranks. So the launcher lives as long
    as this process: the kernel tells it when the thread that started it ends.

    Args:
        options: of the launcher.
        environ: of the launcher.
        problem: of the agents that start the ranks.
        files: what to use instead of `sys.stdout` and `sys.stderr`, by the names "stdout" and "stderr".

    Attributes:
        is_over: whether the launcher has ended.
    """

    def __init__(
        self,
        options: LaunchOptions,
        environ: Mapping[str, str],
        *,
        problem: Problem = lambda _: "",
        files: Mapping[str, Any] | None = None,
    ) -> None:
        self.is_over = False
        self._np = options.np
        self._as_horovod = options.as_horovod
        self._words: list[str] = []  # the lines that the launcher itself has written
        self._problem: BaseException | None = None
        self._status = 0
        self._calls = 0
        self._changed = threading.Condition()
        self._asked: list[Callable[[], object]] = []  # guarded by _changed
        self._selector = selectors.DefaultSelector()
        own = [*addresses(options.network_interfaces), LOOPBACK] if options.is_far else [LOOPBACK]
        self._exchange = Exchange(self._selector, own, self._notify)
        self._wakeup, self._waker = os.pipe()
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._do_what_is_asked)
        self._options = replace(options, command=module_command("horovodish.launcher.function.rank"))
        self._environ = {**environ, CALLER_VARIABLE: self._exchange.contact}
        self._problem_of_agents = problem
        self._files = files or {}
        self._awaits_launcher = 0  # a signal that came before it was started
        self._launcher: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._serve, name="horovodish-ranks", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def end(self) -> None:
        """Ends the ranks, also in the middle of a call, and waits for that. Any thread may call it."""
        self._signal(signal.SIGTERM)
        self._thread.join()

    def call(self, call: Call, *, is_last: bool = False) -> list[Any]:
        """Every rank calls the function. Waits for that.

        Args:
            call: the function.
            is_last: whether the ranks leave then. What goes wrong at their ends counts, too.

        Returns:
            What it returned, by rank.

        Raises:
            Exception: what it raised on the rank that failed first, with the traceback it has there as its cause.
            RankLostError: a rank was lost.
            LaunchError: there are no ranks.
            TypeError: a result cannot be pickled, or not be loaded here.
        """
        if self._as_horovod:
            call.path.insert(0, HOROVOD_FOLDER)
        message = pickle.dumps(call)
        self._calls += 1
        self._ask(lambda: self._exchange.offer(message, is_last=is_last))
        self._wait(lambda: not is_last and self._has_results())
        # Ranks that have ended since the call before have not been offered this one.
        reports = list(self._exchange.reports) if self._exchange.offered == self._calls else []
        if not self.is_over:
            return results(reports, self._np, 0, [])
        words = list(self._words)
        if words and words[-1].startswith(LOST) and (problem := self._problem_of_agents(REASON_SECONDS)):
            words[-1] += f"; {problem}"
        # An elastic job has as many ranks as have begun together last, without those that were lost or told to leave.
        np = None if self._options.is_elastic else self._np
        return results(reports, np, self._status, words)

    def _has_results(self) -> bool:
        """Whether the function has returned on all ranks. If it raises on one, the launcher ends the ranks."""
        reports = self._exchange.reports
        is_answered = self._exchange.offered == self._calls and len(reports) == self._np
        return is_answered and not any(report.error for report in reports)

    def leave(self, within_seconds: float | None = None) -> None:
        """Lets the ranks end, and waits for that.

        Args:
            within_seconds: how long at most; None: as long as it takes.
        """
        self._ask(lambda: self._exchange.offer(b""))
        self._wait(lambda: False, within_seconds)

    def _wait(self, is_done: Callable[[], bool], seconds: float | None = None) -> None:
        """Waits until `is_done()`, until the launcher has ended, or for `seconds`.

        Raises:
            KeyboardInterrupt: the user interrupted the ranks; they have ended.
            BaseException: what the thread that serves the ranks has raised.
        """
        interrupts: list[KeyboardInterrupt] = []
        while True:
            try:
                with self._changed:
                    self._changed.wait_for(lambda: self.is_over or (not interrupts and is_done()), seconds)
                break
            except KeyboardInterrupt as pressed:
                interrupts.append(pressed)
                self._signal(signal.SIGINT)
        if interrupts:
            raise interrupts[0]
        if self._problem:
            raise self._problem

    def _ask(self, what: Callable[[], object]) -> None:
        with self._changed:
            if not self.is_over:
                self._asked.append(what)
                os.write(self._waker, b"x")

    def _do_what_is_asked(self) -> None:
        os.read(self._wakeup, READ_BYTES)
        with self._changed:
            asked, self._asked = self._asked, []
        for what in asked:
            what()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _signal(self, number: int) -> None:
        with self._changed:
            if self._launcher and not self.is_over:
                self._launcher.send_signal(number)
            elif not self._launcher:
                self._awaits_launcher = number

    # What the thread does

    def _serve(self) -> None:
        try:
            self._run_launcher()
        except BaseException as problem:
            self._problem = problem
        self._exchange.close()
        with self._changed:
            self.is_over = True
            for end in (self._wakeup, self._waker):
                os.close(end)
            self._selector.close()
            self._changed.notify_all()

    def _run_launcher(self) -> None:
        problems, problem_file = os.pipe()
        with open(problems, "rb") as told, self._started(problem_file) as launcher:
            os.close(problem_file)
            try:
                relay = Relay(launcher, self._selector, self._files)
                while not relay.is_done:
                    self._turn(MAINTAIN_SECONDS)
            finally:
                if launcher.poll() is None and not relay.is_done:
                    launcher.terminate()
            self._status = launcher.wait()
            gives_up_at = time.monotonic() + LAST_REPORTS_SECONDS
            while self._exchange.has_links and time.monotonic() < gives_up_at:
                self._turn(0.0)
            self._words = relay.words
            if problem := told.read():
                self._problem = pickle.loads(problem)

    def _turn(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            key.data()
        self._exchange.maintain()

    def _started(self, problem_file: int) -> "subprocess.Popen[bytes]":
        command = module_command("horovodish.launcher.function.launcher", str(os.getpid()), str(problem_file))
        launcher = subprocess.Popen(
            command,
            env=self._environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[problem_file],
            start_new_session=True,  # signals from the terminal reach the launcher through us alone
        )
        assert launcher.stdin is not None
        with contextlib.suppress(BrokenPipeError), launcher.stdin as stdin:
            pickle.dump(self._options, stdin)
        with self._changed:
            self._launcher = launcher
            if self._awaits_launcher:
                launcher.send_signal(self._awaits_launcher)
        return launcher


class Relay:
    """Pass on the output of the launcher to this process's `sys.stdout` and `sys.stderr`, as it comes.

    Args:
        launcher: the process.
        selector: each key's data is a function to call.
        files: what to use instead, by the names "stdout" and "stderr".

    Attributes:
        words: the lines that the launcher itself has written.
        is_done: whether the launcher has closed both.
    """

    def __init__(
        self, launcher: "subprocess.Popen[bytes]", selector: selectors.BaseSelector, files: Mapping[str, Any]
    ) -> None:
        self.words: list[str] = []
        self._line = ""
        self._selector = selector
        self._files = files
        self._open = 0
        for source, target in ((launcher.stdout, "stdout"), (launcher.stderr, "stderr")):
            assert source is not None
            decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
            pass_on = functools.partial(self._pass_on, source.fileno(), decoder, target)
            selector.register(source, selectors.EVENT_READ, pass_on)
            self._open += 1

    @property
    def is_done(self) -> bool:
        return self._open == 0

    def _pass_on(self, file: int, decoder: codecs.IncrementalDecoder, target: str) -> None:
        data = os.read(file, READ_BYTES)
        text = decoder.decode(data, final=not data)
        if not data:
            self._selector.unregister(file)
            self._open -= 1
        if target == "stderr":
            self._listen(text)
        _show(text, self._files.get(target) or getattr(sys, target))

    def _listen(self, text: str) -> None:
        *lines, self._line = (self._line + text).split("\n")
        self.words += [line.removeprefix(LAUNCHERS_LINE) for line in lines if line.startswith(LAUNCHERS_LINE)]


def _show(text: str, target: Any) -> None:
    """Writes to what stands for stdout or stderr here: None, anything with `write()`, or a file of few characters."""
    if target is None:
        return
    try:
        target.write(text)
    except UnicodeEncodeError:
        target.write(text.encode(target.encoding, errors="replace").decode(target.encoding))
    if hasattr(target, "flush"):
        target.flush()


def results(reports: Sequence[Report], np: int | None, status: int, words: list[str]) -> list[Any]:
    """The function's results, by rank, or the reason why there are none.

    Args:
        reports: that have come.
        np: how many ranks there should be; None: any number.
        status: the exit status of the launcher, if it has ended.
        words: its own lines.

    Raises:
        Exception: see `Ranks.call`.
    """
    # The launcher knows the cause from its consequences.
    root = re.match(r"ranks? (\d+)", words[-1]) if words else None
    newest = max((report.start for report in reports if status or not report.error), default=0)
    by_rank = {report.rank: report for report in reports if report.start == newest}
    causes = [report for report in by_rank.values() if report.error]
    if words and status != 0:
        causes = [report for report in causes if root and report.rank == int(root[1])]
    if causes:
        _raise(min(causes, key=lambda report: report.time))
    if status == 0 and np is not None and len(by_rank) < np:
        missing = next(rank for rank in range(np) if rank not in by_rank)
        raise RankLostError(f"rank {missing} ended before the function returned")
    if status != 0:
        last = words[-1] if words else f"the launcher ended with exit status {status}"
        unusable = next((word for word in words if UNREACHED in word), None)
        is_lost = (root or last.startswith(LOST)) and not unusable
        raise RankLostError(last) if is_lost else LaunchError(unusable or last)
    return [_loaded(by_rank[rank]) for rank in sorted(by_rank)]


def _raise(report: Report) -> None:
    error: Exception = RankLostError(f"rank {report.rank} on {report.host} raised {report.error}")
    if report.exception:
        with contextlib.suppress(Exception):  # a class of the ranks alone
            loaded = pickle.loads(report.exception)
            error = loaded if isinstance(loaded, Exception) else error
    raise error from RankTraceback(f"rank {report.rank} on {report.host}:\n{report.traceback}")


def _loaded(report: Report) -> Any:
    try:
        return pickle.loads(report.result or b"")
    except Exception as problem:
        raise TypeError(f"what rank {report.rank} returned cannot be loaded here: {problem}") from problem
