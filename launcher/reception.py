"""Where supervisors report to the launcher.

Those of this host come to a Unix socket in the folder of the run, which only the user can enter. Those of other hosts
come to a TCP port, where nobody is heard who does not know the secret of the run. It is sent to the supervisors as a
variable of theirs, by the means of mpirun.
"""

import contextlib
import fcntl
import hmac
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from horovodish.errors import SettingError
from horovodish.launcher.far_link import NONCE_BYTES, PROOF_BYTES, keep_alive, proof
from horovodish.launcher.link import FarLink, Link, NearLink

__all__ = ["LONGEST_PATH_BYTES", "Introduction", "Reception", "addresses"]

LONGEST_PATH_BYTES = 107  # the kernel's limit for the name of a socket
INTRODUCTION_SECONDS = 10.0
"""How long a stranger may take to prove that it is none."""
MOST_STRANGERS = 1024
SIOCGIFADDR = 0x8915


class Introduction:
    """The launcher's part in the exchange by which both sides prove that they know the secret; moves no bytes itself.

    The supervisor begins with a nonce. The launcher answers with one of its own and its proof, the supervisor with its.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._own = secrets.token_bytes(NONCE_BYTES)
        self._other = b""
        self._heard = b""
        self.is_done = False

    @property
    def expected_bytes(self) -> int:
        """How many bytes may be read now."""
        return (PROOF_BYTES if self._other else NONCE_BYTES) - len(self._heard)

    def take(self, data: bytes) -> bytes:
        """What to answer to these bytes, if anything.

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


class Reception:
    """Lets supervisors in.

    Args:
        selector: serves the sockets; each key's data is a function to call.
        path: of the Unix socket.
        admit: gets the link to each supervisor.
        at: this host's addresses for supervisors on other hosts; None if there are none.

    Attributes:
        address: what supervisors on other hosts must be told, with the secret; empty if there are none.

    Raises:
        OSError: `path` is longer than the kernel allows, or there is no network.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        path: Path,
        admit: Callable[[Link], None],
        at: Sequence[str] | None,
    ) -> None:
        self._selector = selector
        self._admit = admit
        self._strangers: dict[socket.socket, float] = {}  # and when they came
        self._near = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._near.bind(str(path))
        self._near.listen(socket.SOMAXCONN)
        selector.register(self._near, selectors.EVENT_READ, self._let_in)
        self._far: socket.socket | None = None
        self.address = ""
        if at is not None:
            self._secret = secrets.token_bytes(32)
            self._far = _listen()
            self.address = " ".join([self._secret.hex(), str(self._far.getsockname()[1]), *at])
            selector.register(self._far, selectors.EVENT_READ, self._let_in_stranger)

    def close(self) -> None:
        """Lets nobody in any more."""
        for stranger in list(self._strangers):
            self._dismiss(stranger)
        for listener in filter(None, (self._near, self._far)):
            self._selector.unregister(listener)
            listener.close()

    def _let_in(self) -> None:
        self._admit(NearLink(self._near.accept()[0]))

    def _let_in_stranger(self) -> None:
        assert self._far is not None
        with contextlib.suppress(OSError):  # it has gone already
            stranger, _ = self._far.accept()
            now = time.monotonic()
            for other, came in list(self._strangers.items()):  # in the order in which they came
                if now - came > INTRODUCTION_SECONDS or len(self._strangers) >= MOST_STRANGERS:
                    self._dismiss(other)
            stranger.setblocking(False)
            self._strangers[stranger] = now
            introduction = Introduction(self._secret)
            self._selector.register(stranger, selectors.EVENT_READ, lambda: self._hear(stranger, introduction))

    def _hear(self, stranger: socket.socket, introduction: Introduction) -> None:
        try:
            data = stranger.recv(introduction.expected_bytes)
            answer = introduction.take(data) if data else b""
            if answer:
                stranger.send(answer)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._dismiss(stranger)
        elif introduction.is_done:
            self._selector.unregister(stranger)
            del self._strangers[stranger]
            keep_alive(stranger)
            self._admit(FarLink(stranger))

    def _dismiss(self, stranger: socket.socket) -> None:
        self._selector.unregister(stranger)
        stranger.close()
        self._strangers.pop(stranger, None)


def addresses(interfaces: Sequence[str] = ()) -> list[str]:
    """The addresses under which other hosts may reach this one.

    Args:
        interfaces: of these network interfaces; without any, of all but the loopback.

    Raises:
        SettingError: there is no such interface, or it has no address.
    """
    known = [name for _, name in socket.if_nameindex()]
    for name in interfaces:
        if name not in known:
            raise SettingError(f"--network-interfaces: there is no {name!r} on this host, only {', '.join(known)}")
    chosen = interfaces or [name for name in known if name != "lo"]
    found = [*_ipv4(chosen), *_ipv6(chosen)]
    if not found:
        raise SettingError(f"this host has no network address on {', '.join(chosen) or 'any interface'}")
    return found


def _ipv4(interfaces: Sequence[str]) -> list[str]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for name in interfaces:
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()))
                found.append(socket.inet_ntoa(answer[20:24]))
    return found


def _ipv6(interfaces: Sequence[str]) -> list[str]:
    """Those that are not only valid on a link, which would have to be named on the other host, too."""
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    fields = [line.split() for line in lines]
    return [
        socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
        for digits, _, _, scope, _, name in fields
        if name in interfaces and scope in ("00", "10")
    ]


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=socket.SOMAXCONN, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=socket.SOMAXCONN)
