"""The links between the caller of `horovodish.run()` and its ranks: each rank connects to the caller by TCP.

Both sides first prove that they know a secret of the run. Then the caller sends calls, and the rank answers each with
a report. Both are messages: a length in 8 bytes, then the bytes. An empty message tells the rank to leave.
"""

import contextlib
import pickle
import selectors
import socket
import struct
from collections.abc import Callable, Sequence

from horovodish.launcher.function.call import Report
from horovodish.launcher.job.listener import TcpListener

HEAD = struct.Struct("!Q")
LEAVE = HEAD.pack(0)
MOST_READ_BYTES = 1 << 20


class Exchange:
    """The caller's side. Its methods are called in one thread, which serves the selector.

    Args:
        selector: serves the sockets; each key's data is a function to call.
        addresses: at which the ranks reach this host.
        changed: called when a report has come.

    Attributes:
        contact: what a rank needs to connect.
        offered: how many calls have been sent.
        reports: what the ranks have answered to the last call.
    """

    def __init__(
        self, selector: selectors.BaseSelector, addresses: Sequence[str], changed: Callable[[], object]
    ) -> None:
        self.offered = 0
        self.reports: list[Report] = []
        self._is_last = False
        self._selector = selector
        self._changed = changed
        self._links: list[_RankLink] = []
        self._message: bytes | None = None
        self._listener = TcpListener(selector, self._add, addresses)
        self.contact = self._listener.contact

    @property
    def has_links(self) -> bool:
        """Whether a rank is connected."""
        return bool(self._links)

    def offer(self, message: bytes, *, is_last: bool = False) -> None:
        """Sends a call to all ranks, also to those that connect later. Without bytes the ranks leave.

        Args:
            message: the call.
            is_last: whether each rank leaves when it has answered.
        """
        self.offered += 1
        self.reports = []
        self._is_last = is_last
        self._message = HEAD.pack(len(message)) + message
        for link in list(self._links):
            self._send(link, self._message)

    def maintain(self) -> None:
        """Call it from time to time."""
        self._listener.maintain()

    def close(self) -> None:
        """Closes all links."""
        self._listener.close()
        for link in list(self._links):
            self._drop(link)

    def _add(self, connection: socket.socket) -> None:
        link = _RankLink(connection)
        self._links.append(link)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._serve(link))
        if self._message is not None:
            self._send(link, self._message)

    def _send(self, link: "_RankLink", message: bytes) -> None:
        link.outgoing.append(memoryview(message))
        self._serve(link)

    def _serve(self, link: "_RankLink") -> None:
        try:
            for message in link.receive():
                report: Report = pickle.loads(message)
                self.reports.append(report)
                if self._is_last and not report.error:
                    link.outgoing.append(memoryview(LEAVE))
                self._changed()
            link.flush()
        except OSError:
            self._drop(link)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.outgoing else 0)
        self._selector.modify(link.connection, events, lambda: self._serve(link))

    def _drop(self, link: "_RankLink") -> None:
        self._links.remove(link)
        self._selector.unregister(link.connection)
        link.connection.close()


class _RankLink:
    """The link to one rank. Nothing here blocks."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.connection.setblocking(False)
        self.outgoing: list[memoryview] = []
        self._incoming = bytearray()

    def receive(self) -> list[bytes]:
        """The messages that are complete.

        Raises:
            OSError: the rank has closed the link.
        """
        with contextlib.suppress(BlockingIOError):
            data = self.connection.recv(MOST_READ_BYTES)
            if not data:
                raise ConnectionError("the rank is gone")
            self._incoming += data
        messages = []
        while len(self._incoming) >= HEAD.size:
            (length,) = HEAD.unpack_from(self._incoming)
            end = HEAD.size + length
            if len(self._incoming) < end:
                break
            messages.append(bytes(memoryview(self._incoming)[HEAD.size : end]))
            del self._incoming[:end]
        return messages

    def flush(self) -> None:
        """Sends what the connection takes."""
        with contextlib.suppress(BlockingIOError):
            while self.outgoing:
                sent = self.connection.send(self.outgoing[0])
                self.outgoing[0] = self.outgoing[0][sent:]
                if not self.outgoing[0]:
                    self.outgoing.pop(0)


def send(connection: socket.socket, message: bytes) -> None:
    """A rank sends a message. Blocks."""
    connection.sendall(HEAD.pack(len(message)))
    connection.sendall(message)


def receive(connection: socket.socket) -> bytes:
    """A rank waits for a message. Without bytes there is none any more."""
    head = _received(connection, HEAD.size)
    return _received(connection, HEAD.unpack(head)[0]) if len(head) == HEAD.size else b""


def _received(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        piece = connection.recv(min(MOST_READ_BYTES, length - len(data)))
        if not piece:
            return b""
        data += piece
    return bytes(data)
