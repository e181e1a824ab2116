"""The link to a launcher on another host, and the supervisor's end of it.

One TCP connection carries the messages and what the rank reads and writes. Neither side reads a message before both
have proved that they know the secret of the run. The connection is not encrypted, and neither is the traffic of MPI.

The text of this file and of supervisor.py travels to the other hosts, so both need only the standard library.
"""

import contextlib
import errno
import hmac
import os
import select
import socket
import struct
import time
from collections.abc import Mapping

CALL_SECONDS = 10.0
"""How long the launcher may take to answer."""
LAST_WORDS_SECONDS = 5.0
"""How long the launcher may take to read the rest of a rank's output, before the supervisor exits."""
LONGEST_MESSAGE = 1 << 16
MOST_WAITING_BYTES = 1 << 18
"""While more than this waits to be sent to the launcher, nothing is read from the rank."""

# A frame: its kind, the number of its bytes, the bytes. A frame of stdin without bytes means its end.
MESSAGE, STDIN, STDOUT, STDERR = range(4)
HEAD = struct.Struct("!BI")
NONCE_BYTES = PROOF_BYTES = 32


def frame(kind: int, content: bytes) -> bytes:
    """A frame, ready to be sent."""
    return HEAD.pack(kind, len(content)) + content


class Frames:
    """Puts the frames of a stream together from its pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, data: bytes) -> list[tuple[int, bytes]]:
        """The frames that `data` completes, each with its kind.

        Raises:
            ValueError: the data is not made of frames.
        """
        data = self._rest + data
        frames, at = [], 0
        while len(data) - at >= HEAD.size:
            kind, length = HEAD.unpack_from(data, at)
            if kind > STDERR or length > LONGEST_MESSAGE:
                raise ValueError(f"a frame of kind {kind} with {length} bytes")
            end = at + HEAD.size + length
            if end > len(data):
                break
            frames.append((kind, data[at + HEAD.size : end]))
            at = end
        self._rest = data[at:]
        return frames


class NotAdmittedError(OSError):
    """Somebody listens there, but has not let this process in."""


def proof(secret: bytes, side: bytes, own_nonce: bytes, other_nonce: bytes) -> bytes:
    """The bytes that prove to the other side that this one knows the secret, without sending it."""
    return hmac.digest(secret, side + own_nonce + other_nonce, "sha256")


class TcpSupervisorEnd:
    """The supervisor's end of a link to a launcher on another host.

    Attributes:
        is_open: False once the launcher is gone.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.setblocking(False)
        self._frames = Frames()
        self._outgoing = bytearray()
        self._sources: dict[int, int] = {}  # what the rank writes: the kind of frame by the end that is read
        self._stdin: int | None = None
        self._to_read = b""
        self.is_open = True

    def interests(self) -> dict[int, int]:
        """The events to wait for, by file."""
        waited = {}
        if self.is_open:
            waited[self._connection.fileno()] = select.POLLIN | (select.POLLOUT if self._outgoing else 0)
        if len(self._outgoing) < MOST_WAITING_BYTES:
            waited.update(dict.fromkeys(self._sources, select.POLLIN))
        if self._stdin is not None and self._to_read:
            waited[self._stdin] = select.POLLOUT
        return waited

    def serve(self, ready: Mapping[int, int]) -> list[bytes]:
        """Sends and receives without blocking, and returns the messages that have arrived."""
        messages = self._receive() if self._connection.fileno() in ready else []
        for source in [source for source in self._sources if source in ready]:
            self._take(source)
        if self._stdin in ready:
            self._pass_on()
        self._flush()
        return messages

    def rank_files(self, has_stdin: bool) -> list[int]:
        """The rank's stdin, stdout and stderr."""
        if has_stdin:
            stdin, self._stdin = os.pipe()
            os.set_blocking(self._stdin, False)
            self.send("read")
        else:
            stdin = os.open(os.devnull, os.O_RDONLY)
        files = [stdin]
        for kind in (STDOUT, STDERR):
            source, file = os.pipe()
            os.set_blocking(source, False)
            self._sources[source] = kind
            files.append(file)
        return files

    def send(self, message: str) -> None:
        self._outgoing += frame(MESSAGE, message.encode(errors="surrogateescape"))
        self._flush()

    def take_rest(self) -> None:
        """Takes what an ended rank has left in its pipes, so that it is sent before any later message."""
        for source in list(self._sources):
            for _ in range(32):  # at most 2 MiB: a process that outlives the rank may write for ever
                if not self._take(source):
                    break

    def finish(self) -> None:
        """Sends all that still waits to be sent."""
        self.take_rest()
        self._connection.settimeout(LAST_WORDS_SECONDS)
        with contextlib.suppress(OSError):
            self._connection.sendall(self._outgoing)

    def _receive(self) -> list[bytes]:
        try:
            data = self._connection.recv(LONGEST_MESSAGE)
            frames = self._frames.take(data)
        except BlockingIOError:
            return []
        except (OSError, ValueError):
            data, frames = b"", []
        self.is_open = bool(data)
        for _, content in (each for each in frames if each[0] == STDIN):
            self._to_read = content
            if not content:
                self._close_stdin()
        return [content for kind, content in frames if kind == MESSAGE]

    def _flush(self) -> None:
        if not self.is_open:
            self._outgoing.clear()  # a rank that is being ended must not wait for a reader
        elif self._outgoing:
            with contextlib.suppress(OSError):  # no room; or the launcher is gone, as _receive() finds out
                del self._outgoing[: self._connection.send(self._outgoing)]

    def _take(self, source: int) -> bool:
        """Reads from a pipe of the rank. False if there was nothing to read."""
        try:
            data = os.read(source, LONGEST_MESSAGE)
        except BlockingIOError:
            return False
        if data:
            self._outgoing += frame(self._sources[source], data)
        else:
            del self._sources[source]
            os.close(source)
        return bool(data)

    def _pass_on(self) -> None:
        try:
            self._to_read = self._to_read[os.write(self._stdin or 0, self._to_read) :]
        except OSError:
            self._close_stdin()  # the rank reads no more
        if self._stdin is not None and not self._to_read:
            self.send("read")

    def _close_stdin(self) -> None:
        if self._stdin is not None:
            os.close(self._stdin)
        self._stdin = None


def call(launcher: str) -> TcpSupervisorEnd:
    """Connects to a launcher on another host, as `dial()` does, and gives the supervisor's end of the link."""
    return TcpSupervisorEnd(dial(launcher))


def dial(launcher: str) -> socket.socket:
    """Connects to the first address at which the other side proves that it knows the secret. Blocks.

    Args:
        launcher: the secret as hexadecimal digits, the port and the addresses, separated by spaces.

    Raises:
        NotAdmittedError: somebody listens at an address, but no address works.
        OSError: nobody listens. The message says what happened at each address.
    """
    secret, port, *addresses = launcher.split()
    callers, problems, somebody_listens = {}, [], False
    for address in addresses:
        try:
            places = socket.getaddrinfo(address, int(port), type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as failure:
            problems.append(f"{address}: {getattr(failure, 'strerror', None) or failure}")
            continue
        for family, kind, protocol, _, place in places:
            caller = socket.socket(family, kind, protocol)
            caller.setblocking(False)
            problem = caller.connect_ex(place)
            if problem in (0, errno.EINPROGRESS):
                callers[caller] = str(place[0])
            else:
                problems.append(f"{place[0]}: {os.strerror(problem)}")
    ends_at = time.monotonic() + CALL_SECONDS
    while callers:
        poller = select.poll()  # select() takes no file from number 1024 on
        for caller in callers:
            poller.register(caller, select.POLLOUT)
        ready = {file for file, _ in poller.poll(max(0.0, ends_at - time.monotonic()) * 1000)}
        answered = [caller for caller in callers if caller.fileno() in ready]
        for caller in answered:
            address = callers.pop(caller)
            problem = caller.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            try:
                if problem:
                    raise OSError(problem, os.strerror(problem))
                somebody_listens = True
                shake_hands(caller, bytes.fromhex(secret))
            except OSError as refusal:
                problems.append(f"{address}: {refusal.strerror or refusal}")
                caller.close()
            else:
                return caller
        if not answered:
            problems += [f"{address}: no answer" for address in callers.values()]
            break
    raise (NotAdmittedError if somebody_listens else OSError)(f"port {port} of {', '.join(problems)}")


def shake_hands(caller: socket.socket, secret: bytes) -> None:
    """The supervisor's part of the handshake: both sides prove that they know the secret. Blocks.

    Raises:
        OSError: the other side does not know it, or does not answer in time.
    """
    caller.settimeout(CALL_SECONDS)
    keep_alive(caller)
    nonce = os.urandom(NONCE_BYTES)
    caller.sendall(nonce)
    answer = b""
    while len(answer) < NONCE_BYTES + PROOF_BYTES:
        data = caller.recv(NONCE_BYTES + PROOF_BYTES - len(answer))
        if not data:
            raise OSError("the launcher has closed the connection")
        answer += data
    other = answer[:NONCE_BYTES]
    if not hmac.compare_digest(answer[NONCE_BYTES:], proof(secret, b"launcher", other, nonce)):
        raise OSError("somebody else answers, or with another secret")
    caller.sendall(proof(secret, b"supervisor", nonce, other))


def keep_alive(connection: socket.socket) -> None:
    """Makes the connection fail within half a minute after the other host has vanished."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000)
