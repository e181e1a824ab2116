"""The launcher's ends of its links to the supervisors. The messages are listed in supervisor.py."""

import contextlib
import os
import selectors
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from horovodish.launcher.far_link import LONGEST_MESSAGE, MESSAGE, STDERR, STDIN, STDOUT, Frames, frame

__all__ = ["Arrival", "FarLink", "Link", "NearLink"]

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


@dataclass(frozen=True)
class Arrival:
    """What a supervisor says when it has been started.

    Attributes:
        rank: its rank.
        host: the name of its host.
        machine: another one on each host, even where two have the same name.
        cores: of the host, as far as the daemon that started the supervisor may use them.
        own_cores: those that the supervisor itself may use; fewer if ranks are bound.
        gpus: what CUDA_VISIBLE_DEVICES names, or the numbers of the devices.
        problem: why the command cannot be run there: a shell's exit status and a reason. Nothing if it can.
    """

    rank: int
    host: str
    machine: str
    cores: int
    own_cores: int
    gpus: tuple[str, ...]
    problem: str

    @staticmethod
    def of(text: str) -> "Arrival":
        """Reads what comes after the word `rank`."""
        rank, host, machine, cores, own_cores, gpus, problem = text.split(" ", 6)
        names = () if gpus == "-" else tuple(filter(None, gpus.split(",")))
        return Arrival(int(rank), host, machine, int(cores), int(own_cores), names, problem)

    @property
    def place(self) -> tuple[str, str]:
        """Equal for the ranks of one host and no others."""
        return self.host, self.machine


class Link:
    """One supervisor and its rank, as the launcher sees them. Nothing here blocks.

    Attributes:
        connection: the socket.
        arrival: what the supervisor has said of itself; None until then.
        asked: whether the launcher or mpirun has asked the rank to end.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.connection.setblocking(False)
        self.arrival: Arrival | None = None
        self.asked = False

    @property
    def watched(self) -> tuple[int, int]:
        """The file for which to wait before `receive()` is called, and for what."""
        return self.connection.fileno(), READ

    def receive(self) -> list[tuple[str, str]]:
        """The messages that have come: a word and the rest. An empty word: the supervisor is gone."""
        raise NotImplementedError

    def start(self, files: Sequence[int], variables: Mapping[str, str], *, has_stdin: bool) -> None:
        """Lets the supervisor start the rank.

        Args:
            files: what takes the rank's stdout and stderr.
            variables: set for this rank alone.
            has_stdin: whether it reads what the launcher can read.
        """
        raise NotImplementedError

    def feed(self, data: bytes) -> None:
        """Sends what the rank reads, in answer to the message `read`; no bytes: that was all."""
        raise NotImplementedError

    def signal(self, number: int) -> None:
        """Sends a signal to the rank's process group."""
        self._send(f"signal {number}")

    def leave(self) -> None:
        """The supervisor of a rank that has ended can go."""
        self._send("leave")

    def close(self) -> None:
        """Ends the link, at which the supervisor ends a rank that still runs."""
        self.connection.close()

    def _send(self, message: str) -> None:
        raise NotImplementedError


class NearLink(Link):
    """To a supervisor on this host, which gets the rank's files themselves."""

    def receive(self) -> list[tuple[str, str]]:
        try:
            return [_parted(self.connection.recv(LONGEST_MESSAGE))]
        except BlockingIOError:
            return []
        except OSError:
            return [("", "")]

    def start(self, files: Sequence[int], variables: Mapping[str, str], *, has_stdin: bool) -> None:
        stdin = 0 if has_stdin else os.open(os.devnull, os.O_RDONLY)
        with contextlib.suppress(OSError):  # the supervisor is gone; receive() says so
            socket.send_fds(self.connection, [_start(variables, has_stdin).encode()], [stdin, *files])
        if not has_stdin:
            os.close(stdin)

    def _send(self, message: str) -> None:
        with contextlib.suppress(OSError):
            self.connection.send(message.encode())


class FarLink(Link):
    """To a supervisor on another host, through which what the rank reads and writes goes, too.

    Args:
        connection: on which both sides have proved who they are.
    """

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * LONGEST_MESSAGE)
        self._frames = Frames()
        self._files: dict[int, int] = {}
        self._arrived: list[tuple[int, bytes]] = []  # not yet passed on, in order

    @property
    def watched(self) -> tuple[int, int]:
        if self._arrived:
            return self._files[self._arrived[0][0]], WRITE
        return super().watched

    def receive(self) -> list[tuple[str, str]]:
        if not self._arrived:
            try:
                data = self.connection.recv(LONGEST_MESSAGE)
                self._arrived = self._frames.take(data) if data else [(MESSAGE, b"")]
            except BlockingIOError:
                return []
            except (OSError, ValueError):
                self._arrived = [(MESSAGE, b"")]
        messages = []
        while self._arrived:
            kind, content = self._arrived[0]
            if kind == MESSAGE:
                messages.append(_parted(content))
            elif kind in self._files:
                rest = self._write(self._files[kind], content)
                if rest:
                    self._arrived[0] = kind, rest
                    break
            self._arrived.pop(0)
        return messages

    def start(self, files: Sequence[int], variables: Mapping[str, str], *, has_stdin: bool) -> None:
        for kind, file in zip((STDOUT, STDERR), files, strict=True):
            self._files[kind] = os.dup(file)
            os.set_blocking(file, False)
        self._send(_start(variables, has_stdin))

    def feed(self, data: bytes) -> None:
        self._transmit(frame(STDIN, data))

    def close(self) -> None:
        super().close()
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _send(self, message: str) -> None:
        self._transmit(frame(MESSAGE, message.encode()))

    def _transmit(self, data: bytes) -> None:
        """At most one piece of stdin and a few messages are ever under way, for which there is always room."""
        with contextlib.suppress(OSError):  # the supervisor is gone; receive() says so
            if self.connection.send(data) < len(data):
                self.connection.shutdown(socket.SHUT_RDWR)  # it has not read for long

    def _write(self, file: int, data: bytes) -> bytes:
        """What could not be written yet."""
        try:
            return data[os.write(file, data) :]
        except BlockingIOError:
            return data
        except OSError:
            return b""  # nobody reads it any more


def _start(variables: Mapping[str, str], has_stdin: bool) -> str:
    assignments = "\0".join(f"{name}={value}" for name, value in variables.items())
    return f"start {int(has_stdin)} {assignments}"


def _parted(message: bytes) -> tuple[str, str]:
    word, _, rest = message.decode(errors="replace").partition(" ")
    return word, rest
