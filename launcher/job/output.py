"""The output of the ranks: merged into the launcher's own stdout and stderr, and kept in files on request.

If the launcher writes to a terminal, the ranks of this host get the terminal itself, unless their lines get a prefix
or are kept in files. Otherwise each rank writes into a pipe. A thread passes on whole lines, so that the lines of
different ranks never mix.
"""

import contextlib
import errno
import os
import re
import select
import selectors
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

from horovodish.errors import SettingError
from horovodish.launch.output_files import is_link_of_another_user, opener
from horovodish.launcher.options import LaunchOptions

STDOUT, STDERR = 1, 2
QUIET_SECONDS, QUIET_SECONDS_OF_PREFIXED = 0.1, 0.5
"""An unfinished line, such as a question to the user, is passed on if no rank writes for this long. One with a prefix
is torn when another rank writes next, so it waits longer for its end."""
LONGEST_LINE_BYTES = 1 << 20
DRAIN_SECONDS = 2.0
"""How long the launcher goes on reading from a process that outlives its rank."""
COLOURS = (36, 33, 35, 32, 34, 31)  # cyan, yellow, magenta, green, blue, red
NAMES = {STDOUT: "stdout", STDERR: "stderr"}
TAIL_BYTES = 1024
ERROR = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception)(?:: .*)?")
"""The last line of a traceback that Python prints."""


_is_drawn = False


def is_drawable() -> bool:
    """Whether a line on stderr can go away again."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def draw(message: str) -> None:
    """Writes a line to the terminal that goes away when the launcher, or anybody else, writes the next one."""
    global _is_drawn
    _is_drawn = True
    _write_on_terminal(f"\r\x1b[Khorovodish: {message}\r")


def erase() -> None:
    """Takes away the line that was drawn, if there is one."""
    global _is_drawn
    if _is_drawn:
        _is_drawn = False
        _write_on_terminal("\r\x1b[K")


def _write_on_terminal(text: str) -> None:
    if select.select([], [STDERR], [], 0)[1]:  # a terminal may be halted
        with contextlib.suppress(OSError):
            print(text, end="", file=sys.stderr, flush=True)


def say(message: str, prefix: str = "horovodish: ") -> None:
    """Writes the lines of a message of the launcher to stderr, unless nobody can read them any more."""
    erase()
    with contextlib.suppress(OSError):
        for line in message.splitlines():
            print(f"{prefix}{line}", file=sys.stderr, flush=True)


def say_unless_stuck(message: str) -> None:
    """Says it if stderr has room for it: a running job must not wait for a reader."""
    if select.select([], [STDERR], [], 0)[1]:
        say(message)


def beginning(options: LaunchOptions, rank: int, now: datetime, *, coloured: bool) -> bytes:
    """The prefix of this rank's lines: the time and the rank, the rank alone, or nothing."""
    timestamp = options.prefix_output_with_timestamp
    text = f"{now.isoformat(sep=' ', timespec='milliseconds')} [{rank}]" if timestamp else f"[{rank}]"
    if not (timestamp or options.prefix_output):
        return b""
    return (f"\x1b[{COLOURS[rank % len(COLOURS)]}m{text}\x1b[0m " if coloured else f"{text} ").encode()


def coloured_files(environ: Mapping[str, str]) -> set[int]:
    """The files, of stdout and stderr, that get coloured line prefixes: terminals, unless NO_COLOR is set."""
    wanted = not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
    return {target for target in NAMES if wanted and os.isatty(target)}


class Line:
    """The unfinished line of one pipe.

    Args:
        target: the file that the lines go to.
        beginning: returns the prefix of a line; None: lines get no prefix.
        kept: a file that also gets everything, unchanged; None if there is none.
        is_live: whether its unfinished lines are passed on.

    Attributes:
        is_open: whether the beginning of an unfinished line, with its prefix, was passed on.
    """

    def __init__(
        self,
        target: int,
        beginning: Callable[[], bytes] | None = None,
        kept: int | None = None,
        *,
        is_live: bool = True,
    ) -> None:
        self.target = target
        self.beginning = beginning
        self.kept = kept
        self.is_live = is_live
        self.is_open = False
        self.rest = b""
        self.tail = b""  # of everything

    def take(self, data: bytes) -> bytes:
        """The lines that `data` completes. A carriage return also ends a line, so that progress bars are live."""
        data = self.rest + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not end and len(data) >= LONGEST_LINE_BYTES:
            end = len(data)
        self.rest = data[end:]
        if self.beginning is None:
            return data[:end]
        begin = self.beginning()
        # Not splitlines(): a form feed can be part of a line.
        lines = re.sub(rb"[^\r\n]*(?:\r?\n|\r)|[^\r\n]+", lambda line: begin + line[0], data[:end])
        if lines and self.is_open:
            lines = lines[len(begin) :]
            self.is_open = False
        return lines

    def unfinished(self) -> bytes:
        """The unfinished line so far. It may go on."""
        rest, self.rest = self.rest, b""
        if not rest or self.beginning is None or self.is_open:
            return rest
        self.is_open = True
        return self.beginning() + rest

    def flush(self) -> bytes:
        """The unfinished line. One with a prefix gets a line end, because the next line has a prefix, too."""
        rest = self.unfinished()
        end = b"\n" if self.is_open else b""
        self.is_open = False
        return rest + end


class Output:
    """Gives every rank its stdout and stderr, and passes on the output.

    Args:
        options: the prefix of lines, and the folder that also keeps all output, as `rank.N/stdout` and
            `rank.N/stderr`.
        environ: the user's environment.
        appends: whether these ranks continue the files of earlier ones of the same job.

    Raises:
        SettingError: nothing can be kept in that folder.
    """

    def __init__(self, options: LaunchOptions, environ: Mapping[str, str], *, appends: bool = False) -> None:
        self._options = options
        self._appends = appends
        self._is_plain = not (options.prefix_output or options.prefix_output_with_timestamp)
        self._coloured = coloured_files(environ)
        self._when_closed: Callable[[], object] = lambda: None
        self._closed: set[int] = set()
        self._selector = selectors.DefaultSelector()
        stop, self._stopper = os.pipe()
        self._selector.register(stop, selectors.EVENT_READ)
        self._thread: threading.Thread | None = None
        self._own: dict[int, list[int]] = {}
        self._errors: dict[int, Line] = {}  # what ranks write to stderr
        self._unfinished: Line | None = None  # the unfinished line with a prefix that was written last
        self._kept: dict[tuple[int, int], int | None] = {}
        try:
            for rank in range(options.np):
                self._kept.update({(rank, target): self._open(rank, target) for target in NAMES})
        except SettingError:
            self.close()
            raise

    def files(self, rank: int, *, is_far: bool) -> list[int]:
        """The files for the rank's stdout and stderr. Call it before `start()`.

        Args:
            rank: the rank.
            is_far: whether it runs on another host, so that it cannot have the terminal.
        """
        self._own[rank] = []
        return [self._file_for(rank, target, is_far) for target in (STDOUT, STDERR)]

    def given(self, rank: int) -> None:
        """Closes the launcher's copies of a rank's files, so that the end of the rank's output can be seen."""
        for file in self._own.pop(rank, ()):
            os.close(file)

    def start(self, when_closed: Callable[[], object]) -> None:
        """Begins to pass on output. Call it after the launcher's last fork, because it starts a thread.

        Args:
            when_closed: called, from the thread, when the reader of the launcher's stdout or stderr closes its pipe.
        """
        self._when_closed = when_closed
        self._thread = threading.Thread(target=self._pass_on, name="horovodish-output", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Lets the thread pass on the rest of the output and end. Call it when the ranks have ended."""
        for rank in list(self._own):
            self.given(rank)
        if self._stopper >= 0:
            os.close(self._stopper)
            self._stopper = -1
            if self._thread is None:
                self._close_sources()

    def is_done(self, within: float) -> bool:
        """Waits for the thread. False if it is not done `within` these seconds, such as when a reader is stuck."""
        if self._thread is not None:
            self._thread.join(within)
            if self._thread.is_alive():
                return False
        for file in filter(None, self._kept.values()):
            os.close(file)
        self._kept.clear()
        return True

    def close(self) -> None:
        """Closes all files, unless the thread waits for a reader. May be called at any time, and again."""
        self.finish()
        self.is_done(within=0.0)

    def last_errors(self) -> dict[int, str]:
        """The exceptions of ranks whose last line on stderr is one, unless stderr is the terminal.

        Call it when `is_done()`.
        """
        tails = {rank: line.tail.decode(errors="replace").strip() for rank, line in self._errors.items()}
        found = {rank: ERROR.fullmatch(tail.rpartition("\n")[2]) for rank, tail in tails.items()}
        return {rank: error[0] for rank, error in found.items() if error}

    def _open(self, rank: int, target: int) -> int | None:
        if self._options.output_filename is None:
            return None
        # An elastic job may grow: without a limit its numbers get no zeros.
        most = self._options.max_np or 1 if self._options.is_elastic else self._options.np
        digits = len(str(most - 1))
        path = Path(self._options.output_filename, f"rank.{rank:0{digits}d}", NAMES[target])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if is_link_of_another_user(path.parent):
                raise PermissionError(errno.EPERM, "another user has made the link to the folder")
            return opener(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if self._appends else os.O_TRUNC))
        except OSError as problem:
            raise SettingError(f"--output-filename: {path} cannot be written: {problem.strerror}") from problem

    def _file_for(self, rank: int, target: int, is_far: bool) -> int:
        kept = self._kept[rank, target]
        if self._is_plain and kept is None and not is_far and os.isatty(target):
            return target
        source, file = os.pipe()
        os.set_blocking(source, False)
        self._own[rank].append(file)
        begin = None if self._is_plain else lambda: self._beginning(rank, target)
        # Rank 0 alone can ask the user something. Unfinished lines of other ranks would tear each other apart.
        line = Line(target, begin, kept, is_live=self._is_plain or rank == 0)
        if target == STDERR:
            self._errors[rank] = line
        self._selector.register(source, selectors.EVENT_READ, line)
        return file

    def _beginning(self, rank: int, target: int) -> bytes:
        return beginning(self._options, rank, datetime.now(), coloured=target in self._coloured)

    def _pass_on(self) -> None:
        stop_at: float | None = None
        while stop_at is None or time.monotonic() < stop_at:
            events = self._selector.select(0 if stop_at is not None else self._quiet())
            for key, _ in events:
                if key.data is None:
                    stop_at = time.monotonic() + DRAIN_SECONDS
                    self._close(key.fd)
                else:
                    self._read(key.fd, key.data)
            if not events and stop_at is not None:
                break
            if not events:
                for line in self._lines():
                    self._write_of(line, line.unfinished() if line.is_live else b"")
        for line in self._lines():
            self._write_of(line, line.flush())
        self._close_sources()

    def _close_sources(self) -> None:
        for key in list(self._selector.get_map().values()):
            self._close(key.fd)
        self._selector.close()

    def _lines(self) -> list[Line]:
        return [key.data for key in self._selector.get_map().values() if key.data is not None]

    def _quiet(self) -> float | None:
        """How long to wait before unfinished lines are passed on."""
        if not any(line.rest and line.is_live for line in self._lines()):
            return None
        return QUIET_SECONDS if self._is_plain else QUIET_SECONDS_OF_PREFIXED

    def _close(self, source: int) -> None:
        self._selector.unregister(source)
        os.close(source)

    def _read(self, source: int, line: Line) -> None:
        data = os.read(source, 1 << 16)
        if data:
            line.tail = (line.tail + data)[-TAIL_BYTES:]
            self._keep(line, data)
            self._write_of(line, line.take(data))
        else:
            self._close(source)
            self._write_of(line, line.flush())

    def _write_of(self, line: Line, data: bytes) -> None:
        """Writes new data of this line, after ending another line that is unfinished."""
        if not data:
            return
        if self._unfinished is not None and self._unfinished is not line:
            self._write(self._unfinished.target, self._unfinished.flush())
        self._write(line.target, data)
        self._unfinished = line if line.is_open else None

    def _keep(self, line: Line, data: bytes) -> None:
        try:
            while data and line.kept is not None:
                data = data[os.write(line.kept, data) :]
        except OSError as problem:
            line.kept = None
            self._say(f"--output-filename: {problem.strerror}; the rest is lost")

    def _say(self, what: str) -> None:
        self._write(STDERR, f"horovodish: {what}\n".encode())

    def _write(self, target: int, data: bytes) -> None:
        erase()
        while data and target not in self._closed:
            try:
                data = data[os.write(target, data) :]
            except BlockingIOError:
                select.select([], [target], [])
            except OSError as problem:
                self._closed.add(target)  # from now on its output is read and dropped, so that no rank hangs
                if isinstance(problem, BrokenPipeError):
                    self._when_closed()
                else:
                    kept = self._options.output_filename
                    rest = f"in {kept} alone" if kept else "lost"
                    self._say(f"{NAMES[target]} cannot be written: {problem.strerror}; the rest is {rest}")
