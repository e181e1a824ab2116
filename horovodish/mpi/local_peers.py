"""How the ranks of one host come to share memory: each passes a memfd to every other over a Unix socket.

Every rank listens. It dials the ranks below its own and is dialled by the ranks above. A hello says which rank speaks,
and proves it by the secret that the listener has told all ranks over MPI; the memfd comes with the hello. The socket
lies in the private folder of the run where there is one. Elsewhere its name is visible to everybody on the host, so
strangers may connect: the listener dismisses them, and a rank that finds its queue full dials again.

The sockets stay open. The end-of-file on one tells the rank at its other end that this rank has gone, however it went.
"""

import contextlib
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from horovodish.errors import LaunchError
from horovodish.settings import RUN_DIR_VARIABLE

__all__ = ["LocalPeers", "connect"]

_SECRET_BYTES = 16
_HELLO = struct.Struct(f"=I{_SECRET_BYTES}s")  # the sender's local rank, the receiver's secret
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_DESCRIPTOR = struct.Struct("i")
_TIME = struct.Struct("@ll")  # seconds, microseconds
_DIAL_SECONDS = 0.05
"""How long a rank waits for room in a listener's queue before it looks who has dialled it."""
_MOST_UNKNOWN = 64
"""Connections that have not said hello yet. A rank does so at once, so the oldest ones are strangers."""


@dataclass
class LocalPeers:
    """This rank's connections to the ranks of its host, by local rank. The engine takes the sockets over.

    Attributes:
        descriptors: every rank's memfd, this rank's own included.
        sockets: a connected socket to every rank, -1 for this rank itself.
    """

    descriptors: list[int]
    sockets: list[int]

    def close_memory(self) -> None:
        """Closes the memfds, once they are mapped."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []

    def close_sockets(self) -> None:
        """Closes the sockets: for a forked child, which must not keep them open in its parent's name."""
        for descriptor in self.sockets:
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)


def connect(local_comm: Any, memory_bytes: int, timeout_seconds: float) -> LocalPeers:
    """Exchange memory among the ranks of this host. All of them must call it; it blocks.

    Args:
        local_comm: an `mpi4py.MPI.Intracomm` of exactly these ranks.
        memory_bytes: size of every rank's memory; pages count once they are touched.
        timeout_seconds: how long to wait for the others, all of them together.

    Returns:
        The memory of all ranks and the sockets to them.

    Raises:
        LaunchError: a rank did not come, or said what cannot be, or the system refused.
    """
    own, size = local_comm.Get_rank(), local_comm.Get_size()
    try:
        memory = os.memfd_create("horovodish", os.MFD_CLOEXEC)
        os.ftruncate(memory, memory_bytes)
        with _listener(size) as listener:
            told = local_comm.allgather((listener.getsockname(), secrets.token_bytes(_SECRET_BYTES)))
            with _Meeting(listener, told, own, memory) as meeting:
                return meeting.result(timeout_seconds)
    except OSError as problem:
        raise LaunchError(
            f"local rank {own} could not exchange memory with the other {size - 1} ranks of this host: {problem}. "
            "Check whether they still run; HOROVODISH_PLANE=mpi_ring needs no shared memory."
        ) from problem


@contextlib.contextmanager
def _listener(size: int) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        path = _bind(listener)
        try:
            listener.listen(size)
            listener.setblocking(False)
            yield listener
        finally:
            if path:
                os.unlink(path)


def _bind(listener: socket.socket) -> str:
    """Gives the path of the socket, empty for a name in the abstract namespace, which leaves no file behind."""
    name, folder = f"horovodish-{secrets.token_hex(8)}", os.environ.get(RUN_DIR_VARIABLE)
    if folder:
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):  # the path is too long, or the file system has no sockets
            listener.bind(path)
            return path
    listener.bind(f"\0{name}")
    return ""


class _Meeting:
    """One rank's part in the exchange.

    Args:
        told: every rank's address and secret, by local rank.
        own: this rank's local rank.
        memory: its memfd.
    """

    def __init__(self, listener: socket.socket, told: list[tuple[Any, bytes]], own: int, memory: int):
        self._listener, self._told, self._own, self._memory = listener, told, own, memory
        self._met: dict[int, tuple[socket.socket, int]] = {}  # by local rank, with its memfd
        self._to_dial = set(range(own))
        self._unknown: dict[socket.socket, None] = {}  # that have dialled and not said hello, the oldest first
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> "_Meeting":
        return self

    def __exit__(self, *_: object) -> None:
        for key in list(self._selector.get_map().values()):
            if key.fileobj is not self._listener:
                self._hang_up(key.fileobj)
        self._selector.close()
        for peer, memory in self._met.values():  # none once there is a result
            peer.close()
            os.close(memory)

    def result(self, timeout_seconds: float) -> LocalPeers:
        """Meets all other ranks.

        Raises:
            OSError: it failed; the text says at which rank.
        """
        ends_at = time.monotonic() + timeout_seconds
        others = set(range(len(self._told))) - {self._own}
        while missing := sorted(others - self._met.keys()):
            for rank in sorted(self._to_dial):
                self._dial(rank)
            left = ends_at - time.monotonic()
            if left <= 0:
                raise TimeoutError(
                    f"local rank {', '.join(map(str, missing))} did not come within {timeout_seconds:g} s"
                )
            for key, _ in self._selector.select(0 if self._to_dial else left):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj.fileno() >= 0:  # not dismissed meanwhile
                    self._hear(key.fileobj, key.data)
        descriptors, sockets = [self._memory] * len(self._told), [-1] * len(self._told)
        for rank, (peer, memory) in self._met.items():
            peer.setblocking(True)
            descriptors[rank], sockets[rank] = memory, peer.detach()
        self._met = {}
        return LocalPeers(descriptors, sockets)

    def _dial(self, rank: int) -> None:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Waiting, it has a place in the listener's queue, which it would have to hit at the right moment otherwise.
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(0, int(_DIAL_SECONDS * 1e6)))
        try:
            peer.connect(self._told[rank][0])
            if _user_of(peer) != os.getuid():
                raise PermissionError(f"the socket of local rank {rank} belongs to another user")
            peer.setblocking(False)
            self._say_hello(peer, rank)
        except (
            BlockingIOError,
            BrokenPipeError,
            ConnectionResetError,
        ):  # the queue is full, or it was taken for a stranger
            peer.close()
        except OSError as problem:
            peer.close()
            raise OSError(f"local rank {rank} cannot be reached: {problem}") from problem
        else:
            self._to_dial.remove(rank)
            self._selector.register(peer, selectors.EVENT_READ, rank)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            peer, _ = self._listener.accept()
            if _user_of(peer) != os.getuid():
                peer.close()
                return
            peer.setblocking(False)
            self._selector.register(peer, selectors.EVENT_READ)
            self._unknown[peer] = None
            if len(self._unknown) > _MOST_UNKNOWN:
                self._hang_up(next(iter(self._unknown)))

    def _hear(self, peer: socket.socket, dialled: int | None) -> None:
        """Reads a hello: of the rank that was dialled, or of whoever has dialled this one."""
        hello, descriptors = _received(peer)
        if len(hello) < _HELLO.size or len(descriptors) != 1 or hello[-_SECRET_BYTES:] != self._told[self._own][1]:
            for descriptor in descriptors:
                os.close(descriptor)
            self._hang_up(peer)
            if dialled is not None:
                self._to_dial.add(dialled)
            return
        rank: int = _HELLO.unpack(hello)[0]
        self._selector.unregister(peer)
        self._unknown.pop(peer, None)
        expected = range(self._own + 1, len(self._told)) if dialled is None else [dialled]
        if rank not in expected or rank in self._met:
            peer.close()
            os.close(descriptors[0])
            again = "a second time" if rank in self._met else f"where local rank {expected[0]} was expected"
            raise OSError(f"a process said that it is local rank {rank}, {again}")
        self._met[rank] = peer, descriptors[0]
        if dialled is None:
            self._say_hello(peer, rank)

    def _say_hello(self, peer: socket.socket, rank: int) -> None:
        socket.send_fds(peer, [_HELLO.pack(self._own, self._told[rank][1])], [self._memory])

    def _hang_up(self, peer: Any) -> None:
        self._selector.unregister(peer)
        self._unknown.pop(peer, None)
        peer.close()


def _received(peer: socket.socket) -> tuple[bytes, list[int]]:
    """Return the bytes and descriptors that have arrived; none of either if the other end has closed."""
    # Not by socket.recv_fds, which ignores its flags.
    room = socket.CMSG_LEN(_DESCRIPTOR.size)
    try:
        text, ancillary, _, _ = peer.recvmsg(_HELLO.size, room, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return b"", []
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS)
    return text, [_DESCRIPTOR.unpack(data)[0] for level, kind, data in ancillary if (level, kind) == rights]


def _user_of(peer: socket.socket) -> int:
    """Who runs the process at the other end."""
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)
