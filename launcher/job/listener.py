"""Where supervisors connect to the launcher.

Supervisors on this host connect to a Unix socket in the folder of the run, which only the user can enter. Supervisors
on other hosts connect to a TCP port. There the launcher reads no message before a handshake: both sides prove that they
know the secret of the run. mpirun passes the secret to the supervisors in an environment variable.
"""

import errno
import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from horovodish.launcher.job.launcher_end import LauncherEnd, TcpLauncherEnd, UnixLauncherEnd
from horovodish.launcher.supervisor.tcp_end import NONCE_BYTES, PROOF_BYTES, keep_alive, proof

HANDSHAKE_SECONDS = 10.0
"""How long a handshake may take. It takes a supervisor two round trips."""
CROWDED_SECONDS = 1.0
"""How long it may take while there are `MOST_PENDING` connections that have not finished theirs."""
MOST_PENDING = 256
"""A quarter of the usual limit of open files. The launcher needs some for each rank."""
RETRY_SECONDS = 0.2
"""How long to wait after a connection could not be accepted, for example because no more files can be open."""
PORT_TRIES = 20


class Handshake:
    """The launcher's part of the handshake. It moves no bytes itself.

    The supervisor sends a nonce. The launcher answers with a nonce of its own and its proof. The supervisor answers
    with its proof.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._own = secrets.token_bytes(NONCE_BYTES)
        self._other = b""
        self._heard = b""
        self.is_done = False

    @property
    def has_answered(self) -> bool:
        """Whether the other side has our proof."""
        return bool(self._other)

    @property
    def expected_bytes(self) -> int:
        """How many bytes may be read now."""
        return (PROOF_BYTES if self._other else NONCE_BYTES) - len(self._heard)

    def take(self, data: bytes) -> bytes:
        """The answer to these bytes, if any.

        Raises:
            PermissionError: the other side does not know the secret.
        """
        self._heard += data
        if self.expected_bytes > 0:
            return b""
        heard, self._heard = self._heard, b""
        if not self._other:
            self._other = heard
            return self._own + proof(self._secret, b"launcher", self._own, self._other)
        if not hmac.compare_digest(heard, proof(self._secret, b"supervisor", self._other, self._own)):
            raise PermissionError("a supervisor of another run")
        self.is_done = True
        return b""


class Acceptor:
    """Listening sockets. Nothing here blocks.

    Args:
        selector: serves them; each key's data is a function to call.
        listeners: the sockets; they are closed with this object.
        accept: gets each connection and the address of the other side.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listeners: Sequence[socket.socket],
        accept: Callable[[socket.socket, Any], None],
    ) -> None:
        self._selector = selector
        self._listeners = listeners
        self._accept = accept
        self._is_watching = False
        self._resume_at = 0.0
        self.resume()

    def resume(self) -> None:
        """Accepts connections, unless one could not be accepted a moment ago."""
        if not self._is_watching and time.monotonic() >= self._resume_at:
            self._is_watching = True
            for each in self._listeners:
                self._selector.register(each, selectors.EVENT_READ, lambda it=each: self._take(it))

    def pause(self, seconds: float = 0.0) -> None:
        """Leaves new connections in the kernel until `resume()` is called, and for `seconds` at least.

        A watched listener would wake us.
        """
        self._resume_at = time.monotonic() + seconds
        if self._is_watching:
            for each in self._listeners:
                self._selector.unregister(each)
        self._is_watching = False

    def close(self) -> None:
        """Accepts no more connections. May be called again."""
        self.pause()
        for each in self._listeners:
            each.close()
        self._listeners = []

    def _take(self, listener: socket.socket) -> None:
        if not self._is_watching:  # since an earlier event of this turn
            return
        try:
            connection, peer = listener.accept()
        except OSError:  # the other side is gone, or no more files can be open
            self.pause(RETRY_SECONDS)
            return
        connection.setblocking(False)
        self._accept(connection, peer)


def unix_listener(address: str, backlog: int = socket.SOMAXCONN) -> socket.socket:
    """A Unix socket that listens for messages at `address`. `backlog` connections may wait in the kernel."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(backlog)
    listener.setblocking(False)
    return listener


class TcpListener:
    """Accepts TCP connections of those who prove that they know the secret.

    Args:
        selector: serves the sockets; each key's data is a function to call.
        accept: gets each connection after its handshake.
        addresses: at which to listen.
        secret: that both sides must know; empty: a new one.
        port: at which to listen; 0: one that is free.
        refused: gets the address of whoever does not know the secret.

    Attributes:
        contact: what the other side needs to connect: the secret, the port and the addresses.

    Raises:
        OSError: there is no network, or the port is in use.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        accept: Callable[[socket.socket], None],
        addresses: Sequence[str],
        secret: bytes = b"",
        port: int = 0,
        refused: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._selector = selector
        self._accept = accept
        self._refused = refused
        self._pending: dict[socket.socket, float] = {}  # connections in their handshake, and since when
        self._secret = secret or secrets.token_bytes(32)
        listeners = _listen(addresses, port)
        names = [listener.getsockname()[:2] for listener in listeners]
        self.contact = " ".join([self._secret.hex(), str(names[0][1]), *(address for address, _ in names)])
        self._acceptor = Acceptor(selector, listeners, self._begin)

    def maintain(self) -> None:
        """Drops connections whose handshake takes too long, and accepts others instead. Call it at every turn."""
        patience = HANDSHAKE_SECONDS if len(self._pending) < MOST_PENDING else CROWDED_SECONDS
        now = time.monotonic()
        for connection, began in list(self._pending.items()):
            if now - began > patience:
                self._drop(connection)
        if len(self._pending) < MOST_PENDING:
            self._acceptor.resume()

    def close(self) -> None:
        """Accepts no more connections. May be called again."""
        for connection in list(self._pending):
            self._drop(connection)
        self._acceptor.close()

    def _begin(self, connection: socket.socket, peer: Any) -> None:
        self._pending[connection] = time.monotonic()
        handshake = Handshake(self._secret)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._go_on(connection, peer[0], handshake))
        if len(self._pending) >= MOST_PENDING:
            self._acceptor.pause()

    def _go_on(self, connection: socket.socket, peer: str, handshake: Handshake) -> None:
        try:
            data = connection.recv(handshake.expected_bytes)
            answer = handshake.take(data) if data else b""
            if answer:
                connection.send(answer)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            if handshake.has_answered:  # the other side has left because of our proof, or its own is wrong
                self._refused(peer)
            self._drop(connection)
        elif handshake.is_done:
            self._selector.unregister(connection)
            del self._pending[connection]
            keep_alive(connection)
            self._accept(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()
        del self._pending[connection]


class SupervisorListener:
    """Accepts the connections of supervisors.

    Args:
        selector: serves the sockets; each key's data is a function to call.
        path: of the Unix socket.
        accept: gets the launcher's end of the link to each supervisor.
        addresses: at which supervisors on other hosts connect to this one; None if there are no such supervisors.

    Attributes:
        contact: what a supervisor on another host needs to connect: the secret, the port and the addresses. Empty if
            there are no such supervisors.

    Raises:
        OSError: `path` is longer than the kernel allows, or there is no network.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        path: Path,
        accept: Callable[[LauncherEnd], None],
        addresses: Sequence[str] | None,
    ) -> None:
        self._unix = Acceptor(selector, [unix_listener(str(path))], lambda it, _: accept(UnixLauncherEnd(it)))
        self._tcp: TcpListener | None = None
        self.contact = ""
        if addresses is not None:
            self._tcp = TcpListener(selector, lambda connection: accept(TcpLauncherEnd(connection)), addresses)
            self.contact = self._tcp.contact

    def maintain(self) -> None:
        """As `TcpListener.maintain`. Call it at every turn."""
        self._unix.resume()
        if self._tcp:
            self._tcp.maintain()

    def close(self) -> None:
        """Accepts no more connections. May be called again."""
        if self._tcp:
            self._tcp.close()
        self._unix.close()


def _listen(addresses: Sequence[str], wanted: int) -> list[socket.socket]:
    """Listeners on one port of these addresses. Addresses that cannot be used are left out."""
    problem = None
    for _ in range(PORT_TRIES):
        listeners: list[socket.socket] = []
        for address in dict.fromkeys(addresses):  # two interfaces may have the same one
            port = listeners[0].getsockname()[1] if listeners else wanted
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            try:
                listeners.append(socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN))
            except OSError as failure:
                problem = failure
                if failure.errno == errno.EADDRINUSE:  # another program has this port at that address
                    break
        else:
            if listeners:
                return listeners
        for listener in listeners:
            listener.close()
    raise problem or OSError("there is no address at which to listen")
