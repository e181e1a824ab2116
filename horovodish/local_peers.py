"""How the ranks of one host come to share memory: each passes a memfd to every other over a Unix socket.

The sockets stay open. The end-of-file on one tells the rank at its other end that this rank has gone, however it went.
"""

import contextlib
import os
import secrets
import socket
import struct
from dataclasses import dataclass
from typing import Any

from horovodish.errors import LaunchError

__all__ = ["LocalPeers", "connect"]

_HELLO = struct.Struct("=I")  # the sender's local rank
_CREDENTIALS = struct.Struct("3i")  # process, user, group


@dataclass
class LocalPeers:
    """What this rank holds of the ranks of its host, by local rank. The engine takes the sockets over.

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
        timeout_seconds: how long to wait for the others.

    Returns:
        The memory of all ranks and the sockets to them.

    Raises:
        LaunchError: a rank did not come, or the system refused.
    """
    own, size = local_comm.Get_rank(), local_comm.Get_size()
    try:
        memory = os.memfd_create("horovodish", os.MFD_CLOEXEC)
        os.ftruncate(memory, memory_bytes)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            # A name in the abstract namespace leaves no file behind; nobody can guess it beforehand.
            listener.bind(f"\0horovodish-{secrets.token_hex(16)}")
            listener.listen(size)
            listener.settimeout(timeout_seconds)
            addresses: list[bytes] = local_comm.allgather(listener.getsockname())
            peers: dict[int, socket.socket] = {}
            for rank in range(own):
                peers[rank] = _dial(addresses[rank], own, memory, timeout_seconds)
            while len(peers) < size - 1:
                _accept(listener, peers, own, memory, timeout_seconds)
        return _receive_memory(peers, own, memory)
    except OSError as problem:
        raise LaunchError(
            f"local rank {own} could not exchange memory with the other {size - 1} ranks of this host: {problem}. "
            "See whether they still run; HOROVODISH_PLANE=mpi_ring does without shared memory."
        ) from problem


def _dial(address: bytes, own: int, memory: int, timeout_seconds: float) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.settimeout(timeout_seconds)
    peer.connect(address)
    socket.send_fds(peer, [_HELLO.pack(own)], [memory])
    return peer


def _accept(
    listener: socket.socket, peers: dict[int, socket.socket], own: int, memory: int, timeout_seconds: float
) -> None:
    peer, _ = listener.accept()
    peer.settimeout(timeout_seconds)
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.getuid():
        peer.close()
        return
    hello = peer.recv(_HELLO.size, socket.MSG_PEEK)
    if len(hello) < _HELLO.size:
        peer.close()
        raise OSError("a rank left before it had said which it is")
    peers[_HELLO.unpack(hello)[0]] = peer
    socket.send_fds(peer, [_HELLO.pack(own)], [memory])


def _receive_memory(peers: dict[int, socket.socket], own: int, memory: int) -> LocalPeers:
    descriptors, sockets = [memory] * (len(peers) + 1), [-1] * (len(peers) + 1)
    for rank, peer in peers.items():
        _, received, _, _ = socket.recv_fds(peer, _HELLO.size, 1)
        if len(received) != 1:
            raise OSError(f"local rank {rank} left before it had passed on its memory")
        descriptors[rank] = received[0]
        peer.setblocking(True)
        sockets[rank] = peer.detach()
    return LocalPeers(descriptors, sockets)
