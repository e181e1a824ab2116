"""What the ranks write, merged into the launcher's own stdout and stderr.

Where the launcher writes to a terminal, the ranks get the terminal itself. Otherwise each rank writes into a pipe, and
a thread passes whole lines on, so that lines of different ranks never mix.
"""

import os
import re
import select
import selectors
import threading
import time
from collections.abc import Callable

__all__ = ["Output"]

STDOUT, STDERR = 1, 2
QUIET_SECONDS = 0.1
"""A line without an end is passed on as it is when nothing more comes for this long, such as a question to the user."""
LONGEST_LINE_BYTES = 1 << 20


DRAIN_SECONDS = 2.0
"""How long a process that outlives its rank can keep the launcher reading what it writes."""


class Line:
    """The unfinished line of one pipe.

    Args:
        target: the file that the lines go to.
        prefix: what each line begins with.
    """

    def __init__(self, target: int, prefix: bytes) -> None:
        self.target = target
        self.prefix = prefix
        self.rest = b""

    def take(self, data: bytes) -> bytes:
        """The lines that `data` completes. A carriage return ends a line, too, so that progress bars are live."""
        data = self.rest + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not end and len(data) >= LONGEST_LINE_BYTES:
            end = len(data)
        self.rest = data[end:]
        if not self.prefix:
            return data[:end]
        # Not splitlines(): a form feed can be part of a line.
        return re.sub(rb"[^\r\n]*(?:\r?\n|\r)|[^\r\n]+", lambda line: self.prefix + line[0], data[:end])

    def flush(self) -> bytes:
        """What there is of the line. With a prefix it gets an end, so that the next line can have its own."""
        rest, self.rest = self.rest, b""
        if not rest or not self.prefix:
            return rest
        return self.prefix + rest + b"\n"


class Output:
    """Gives every rank its stdout and stderr and passes on what comes through them.

    Args:
        np: number of ranks.
        prefix: begin each line with `[rank] `.
        when_closed: called, from a thread, when the launcher's stdout or stderr is read no more.
    """

    def __init__(self, np: int, *, prefix: bool, when_closed: Callable[[], object]) -> None:
        self._prefix = prefix
        self._when_closed = when_closed
        self._closed: set[int] = set()
        self._selector = selectors.DefaultSelector()
        stop, self._stopper = os.pipe()
        self._selector.register(stop, selectors.EVENT_READ)
        self._own: dict[int, list[int]] = {rank: [] for rank in range(np)}
        self._files = {rank: [self._file_for(rank, target) for target in (STDOUT, STDERR)] for rank in range(np)}
        self._thread = threading.Thread(target=self._pass_on, name="horovodish-output", daemon=True)

    def files(self, rank: int) -> list[int]:
        """The files that the rank gets as its stdout and stderr."""
        return self._files[rank]

    def given(self, rank: int) -> None:
        """The rank has its files; the launcher's copies are closed, so that their end can be seen."""
        for file in self._own.pop(rank, ()):
            os.close(file)

    def start(self) -> None:
        """Begins to pass on. Comes after the launcher's last fork, because it starts a thread."""
        self._thread.start()

    def finish(self) -> None:
        """Passes on what there still is, and ends. Call it when the ranks have ended."""
        for rank in list(self._own):
            self.given(rank)
        os.close(self._stopper)
        self._thread.join()

    def _file_for(self, rank: int, target: int) -> int:
        if not self._prefix and os.isatty(target):
            return target
        source, file = os.pipe()
        os.set_blocking(source, False)
        self._own[rank].append(file)
        line = Line(target, f"[{rank}] ".encode() if self._prefix else b"")
        self._selector.register(source, selectors.EVENT_READ, line)
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
        return QUIET_SECONDS if not self._prefix and any(line.rest for line in self._lines()) else None

    def _flush(self) -> None:
        for line in self._lines():
            self._write(line.target, line.flush())

    def _close(self, source: int) -> None:
        self._selector.unregister(source)
        os.close(source)

    def _read(self, source: int, line: Line) -> None:
        data = os.read(source, 1 << 16)
        if data:
            self._write(line.target, line.take(data))
        else:
            self._close(source)
            self._write(line.target, line.flush())

    def _write(self, target: int, data: bytes) -> None:
        while data and target not in self._closed:
            try:
                data = data[os.write(target, data) :]
            except BlockingIOError:
                select.select([], [target], [])
            except OSError:
                self._closed.add(target)  # what ranks write there from now on is read and dropped: they must not hang
                self._when_closed()
