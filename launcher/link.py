"""The launcher's end of the socket to one supervisor. The messages are listed in supervisor.py."""

import contextlib
import socket
from collections.abc import Sequence
from pathlib import Path

__all__ = ["Link", "listen"]

LONGEST_PATH_BYTES = 107  # the kernel's limit for the name of a socket


def listen(path: Path) -> socket.socket:
    """A socket on which supervisors connect.

    Raises:
        OSError: `path` is longer than the kernel allows.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(socket.SOMAXCONN)
    return listener


class Link:
    """One supervisor and its rank, as the launcher sees them.

    Attributes:
        connection: the socket.
        rank: its rank; None until the supervisor has said it.
        asked: whether the launcher or mpirun has asked the rank to end.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.rank: int | None = None
        self.asked = False

    def receive(self) -> list[str]:
        """The words of the next message; none when the supervisor is gone. Blocks if there is nothing to read."""
        try:
            return self.connection.recv(64).decode().split()
        except OSError:
            return []

    def start(self, files: Sequence[int]) -> None:
        """Lets the supervisor start the rank with these files as its stdin, stdout and stderr."""
        with contextlib.suppress(OSError):  # the supervisor is gone; receive() says so
            socket.send_fds(self.connection, [b"start"], files)

    def signal(self, number: int) -> None:
        """Sends a signal to the rank's process group."""
        self._send(f"signal {number}")

    def leave(self) -> None:
        """The supervisor of a rank that has ended can go."""
        self._send("leave")

    def _send(self, message: str) -> None:
        with contextlib.suppress(OSError):
            self.connection.send(message.encode())
