"""What the ranks write, merged into the launcher's own stdout and stderr, and kept in files on request.

Where the launcher writes to a terminal, the ranks of this host get the terminal itself, unless lines shall begin with
something or be kept. Otherwise each rank writes into a pipe, and a thread passes whole lines on, so that lines of
different ranks never mix.
"""

import os
import re
import select
import selectors
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from horovodish.errors import SettingError

__all__ = ["Output", "Style", "style"]

STDOUT, STDERR = 1, 2
QUIET_SECONDS = 0.1
"""A line without an end is passed on as it is when nothing more comes for this long, such as a question to the user."""
LONGEST_LINE_BYTES = 1 << 20
DRAIN_SECONDS = 2.0
"""How long a process that outlives its rank can keep the launcher reading what it writes."""
COLOURS = (36, 33, 35, 32, 34, 31)  # cyan, yellow, magenta, green, blue, red
NAMES = {STDOUT: "stdout", STDERR: "stderr"}


@dataclass(frozen=True)
class Style:
    """How the lines of ranks look.

    Attributes:
        prefix: begin each with the number of its rank.
        timestamp: begin each with the time at which it was complete.
        coloured: the files, of stdout and stderr, on which the beginnings have colours.
        folder: where everything is kept in addition, as `rank.<rank>/stdout` and `rank.<rank>/stderr`; or None.
    """

    prefix: bool = False
    timestamp: bool = False
    coloured: frozenset[int] = frozenset()
    folder: Path | None = None

    @property
    def is_plain(self) -> bool:
        """Whether lines begin with nothing."""
        return not (self.prefix or self.timestamp)

    def beginning(self, rank: int, target: int, now: datetime) -> bytes:
        """What a line of this rank begins with."""
        text = f"{now.isoformat(sep=' ', timespec='milliseconds')} " * self.timestamp + f"[{rank}]" * self.prefix
        if target in self.coloured:
            text = f"\x1b[{COLOURS[rank % len(COLOURS)]}m{text.rstrip()}\x1b[0m"
        return f"{text.rstrip()} ".encode() if text else b""


def style(environ: Mapping[str, str], *, prefix: bool, timestamp: bool, folder: str | None) -> Style:
    """The style that the user wants. Colours are for terminals; NO_COLOR turns them off.

    Args:
        environ: the user's environment.
        prefix: whether to begin lines with the number of their rank.
        timestamp: whether to begin them with the time; the number of the rank comes with it.
        folder: where to keep what ranks write, or None.
    """
    wanted = not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
    coloured = frozenset(target for target in (STDOUT, STDERR) if wanted and os.isatty(target))
    return Style(prefix or timestamp, timestamp, coloured, Path(folder) if folder else None)


class Line:
    """The unfinished line of one pipe.

    Args:
        target: the file that the lines go to.
        beginning: gives what a line begins with; None if lines are not changed.
        kept: a file that gets everything in addition, unchanged; None if there is none.
    """

    def __init__(self, target: int, beginning: Callable[[], bytes] | None = None, kept: int | None = None) -> None:
        self.target = target
        self.beginning = beginning
        self.kept = kept
        self.rest = b""

    def take(self, data: bytes) -> bytes:
        """The lines that `data` completes. A carriage return ends a line, too, so that progress bars are live."""
        data = self.rest + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not end and len(data) >= LONGEST_LINE_BYTES:
            end = len(data)
        self.rest = data[end:]
        if self.beginning is None:
            return data[:end]
        begin = self.beginning()
        # Not splitlines(): a form feed can be part of a line.
        return re.sub(rb"[^\r\n]*(?:\r?\n|\r)|[^\r\n]+", lambda line: begin + line[0], data[:end])

    def flush(self) -> bytes:
        """What there is of the line. With a beginning it gets an end, so that the next line has its own, too."""
        rest, self.rest = self.rest, b""
        if not rest or self.beginning is None:
            return rest
        return self.beginning() + rest + b"\n"


class Output:
    """Gives every rank its stdout and stderr and passes on what comes through them.

    Args:
        np: number of ranks.
        style: how lines look, and where they are kept.

    Raises:
        SettingError: nothing can be kept in the folder of the style.
    """

    def __init__(self, np: int, style: Style) -> None:
        self._style = style
        self._when_closed: Callable[[], object] = lambda: None
        self._closed: set[int] = set()
        self._selector = selectors.DefaultSelector()
        stop, self._stopper = os.pipe()
        self._selector.register(stop, selectors.EVENT_READ)
        self._thread: threading.Thread | None = None
        self._own: dict[int, list[int]] = {}
        self._kept = {(rank, target): self._open(rank, np, target) for rank in range(np) for target in NAMES}

    def files(self, rank: int, *, is_far: bool) -> list[int]:
        """The files that take what the rank writes to stdout and stderr. Call it before `start()`.

        Args:
            rank: the rank.
            is_far: whether it runs on another host, so that it cannot have the terminal.
        """
        self._own[rank] = []
        return [self._file_for(rank, target, is_far) for target in (STDOUT, STDERR)]

    def given(self, rank: int) -> None:
        """The rank has its files; the launcher's copies are closed, so that their end can be seen."""
        for file in self._own.pop(rank, ()):
            os.close(file)

    def start(self, when_closed: Callable[[], object]) -> None:
        """Begins to pass on. Comes after the launcher's last fork, because it starts a thread.

        Args:
            when_closed: called, from the thread, when the launcher's stdout or stderr is a pipe that is read no more.
        """
        self._when_closed = when_closed
        self._thread = threading.Thread(target=self._pass_on, name="horovodish-output", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Begins to end: only what there still is will be passed on. Call it when the ranks have ended."""
        for rank in list(self._own):
            self.given(rank)
        os.close(self._stopper)

    def is_done(self, within: float) -> bool:
        """Whether all has been passed on before so many seconds have passed. It never is if a reader is stuck."""
        if self._thread is not None:
            self._thread.join(within)
            if self._thread.is_alive():
                return False
        for file in filter(None, self._kept.values()):
            os.close(file)
        return True

    def _open(self, rank: int, np: int, target: int) -> int | None:
        if self._style.folder is None:
            return None
        path = self._style.folder / f"rank.{rank:0{len(str(np - 1))}d}" / NAMES[target]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        except OSError as problem:
            raise SettingError(f"--output-filename: {path} cannot be written: {problem.strerror}") from problem

    def _file_for(self, rank: int, target: int, is_far: bool) -> int:
        kept, plain = self._kept[rank, target], self._style.is_plain
        if plain and kept is None and not is_far and os.isatty(target):
            return target
        source, file = os.pipe()
        os.set_blocking(source, False)
        self._own[rank].append(file)
        beginning = None if plain else lambda: self._style.beginning(rank, target, datetime.now())
        self._selector.register(source, selectors.EVENT_READ, Line(target, beginning, kept))
        return file

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
                self._flush()
        self._flush()
        for key in list(self._selector.get_map().values()):
            self._close(key.fd)
        self._selector.close()

    def _lines(self) -> list[Line]:
        return [key.data for key in self._selector.get_map().values() if key.data is not None]

    def _quiet(self) -> float | None:
        """How long to wait before unfinished lines are passed on; with a prefix they wait for their end."""
        return QUIET_SECONDS if self._style.is_plain and any(line.rest for line in self._lines()) else None

    def _flush(self) -> None:
        for line in self._lines():
            self._write(line.target, line.flush())

    def _close(self, source: int) -> None:
        self._selector.unregister(source)
        os.close(source)

    def _read(self, source: int, line: Line) -> None:
        data = os.read(source, 1 << 16)
        if data:
            self._keep(line, data)
            self._write(line.target, line.take(data))
        else:
            self._close(source)
            self._write(line.target, line.flush())

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
        while data and target not in self._closed:
            try:
                data = data[os.write(target, data) :]
            except BlockingIOError:
                select.select([], [target], [])
            except OSError as problem:
                self._closed.add(target)  # what ranks write there from now on is read and dropped: they must not hang
                if isinstance(problem, BrokenPipeError):
                    self._when_closed()
                else:
                    rest = f"in {self._style.folder} alone" if self._style.folder else "lost"
                    self._say(f"{NAMES[target]} cannot be written: {problem.strerror}; the rest is {rest}")
