"""The launcher's ends of its links to the supervisors. The docstring of supervisor.py lists the messages."""

import contextlib
import os
import selectors
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from horovodish.launcher.supervisor.tcp_end import LONGEST_MESSAGE, MESSAGE, STDERR, STDIN, STDOUT, Frames, frame

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


@dataclass(frozen=True)
class Hello:
    """The first message of a supervisor.

    Attributes:
        rank: its rank.
        process: the process id of the supervisor.
        daemon: the process id of its parent: mpirun, or its daemon on that host.
        host: the name of its host.
        machine: the boot id of its host, which tells hosts of the same name apart.
        cores: how many cores of the host the daemon that started the supervisor may use.
        own_cores: how many the supervisor itself may use; fewer if ranks are bound.
        python: the version of Python there, where the launcher's own is on this host.
        gpus: the devices in CUDA_VISIBLE_DEVICES, else the numbers of all devices.
        port: a TCP port that was free there.
        problem: why the command cannot be run there: a shell's exit status and a reason. Empty if it can.
    """

    rank: int
    process: int
    daemon: int
    host: str
    machine: str
    cores: int
    own_cores: int
    python: str
    gpus: tuple[str, ...]
    port: int
    problem: str

    @staticmethod
    def of(text: str) -> "Hello":
        """Reads what comes after the word `rank`."""
        rank, process, daemon, host, machine, cores, own, python, gpus, port, problem = text.split(" ", 10)
        return Hello(
            int(rank),
            int(process),
            int(daemon),
            host,
            machine,
            int(cores),
            int(own),
            python,
            () if gpus == "-" else tuple(filter(None, gpus.split(","))),
            int(port),
            problem,
        )

    @property
    def host_id(self) -> tuple[str, str]:
        """Equal for the ranks of one host and no others."""
        return self.host, self.machine


class LauncherEnd:
    """The launcher's end of the link to one supervisor. Nothing here blocks.

    Attributes:
        connection: the socket.
        hello: the supervisor's first message; None until it arrives.
        asked: whether the launcher or mpirun has asked the rank to end.
        had_left: whether its script had ended by then.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.connection.setblocking(False)
        self.hello: Hello | None = None
        self.asked = self.had_left = False

    @property
    def watched(self) -> tuple[int, int]:
        """The file, and the events on it, to wait for before `receive()` is called."""
        return self.connection.fileno(), READ

    @property
    def is_stuck(self) -> bool:
        """Whether messages may wait behind output that nobody reads."""
        return False

    def receive(self) -> list[tuple[str, str]]:
        """The messages that have arrived, each a word and the rest. An empty word: the supervisor is gone."""
        raise NotImplementedError

    def start(self, files: Sequence[int], variables: Mapping[str, str], *, has_stdin: bool) -> None:
        """Lets the supervisor start the rank.

        Args:
            files: the files for the rank's stdout and stderr.
            variables: environment variables of this rank alone.
            has_stdin: whether the rank reads the launcher's stdin.
        """
        raise NotImplementedError

    def give_command(self, piece: bytes) -> None:
        """Sends a piece of the command, in answer to the message `command`. No bytes mean its end."""
        self._send(b"command " + piece)

    def feed(self, data: bytes) -> None:
        """Sends a piece of stdin, in answer to the message `read`. No bytes mean the end of stdin."""
        raise NotImplementedError

    def signal(self, number: int) -> None:
        """Sends a signal to the rank's process group."""
        self._send(f"signal {number}".encode())

    def ask_state(self) -> None:
        """Asks the supervisor what its rank is doing. It answers with a message `state`."""
        self._send(b"state")

    def ask_status(self, number: int, question: str) -> None:
        """Asks the supervisor for its rank's status. It answers with a message `status` of the same number."""
        self._send(f"status {number} {question}".encode())

    def tell(self, news: str) -> None:
        """Passes a line on to the rank: `horovodish.elastic.membership` lists what it can be."""
        self._send(f"news {news}".encode())

    def say(self, message: str) -> None:
        """Sends words that only the other side understands."""
        self._send(message.encode(errors="replace"))

    def leave(self, *, keep: bool = False) -> None:
        """Tells the supervisor of a rank that has ended to exit.

        Args:
            keep: whether the state in memory of its host will be wanted.
        """
        self._send(b"leave keep" if keep else b"leave")

    def close(self) -> None:
        """Closes the link. The supervisor then ends a rank that still runs."""
        self.connection.close()

    def _send(self, message: bytes) -> None:
        raise NotImplementedError


class UnixLauncherEnd(LauncherEnd):
    """For a supervisor on this host. It gets the rank's files themselves, as descriptors."""

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
            socket.send_fds(self.connection, [_start(variables, has_stdin)], [stdin, *files])
        if not has_stdin:
            os.close(stdin)

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):
            self.connection.send(message)


class TcpLauncherEnd(LauncherEnd):
    """For a supervisor on another host. The link also carries what the rank reads and writes.

    Args:
        connection: after the handshake.
    """

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * LONGEST_MESSAGE)
        self._frames = Frames()
        self._files: dict[int, int] = {}
        self._arrived: list[tuple[int, bytes]] = []  # frames that are not passed on yet

    @property
    def watched(self) -> tuple[int, int]:
        if self._arrived:
            return self._files[self._arrived[0][0]], WRITE
        return super().watched

    @property
    def is_stuck(self) -> bool:
        return bool(self._arrived)

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

    def _send(self, message: bytes) -> None:
        self._transmit(frame(MESSAGE, message))

    def _transmit(self, data: bytes) -> None:
        """The socket always has room: at most one piece of stdin and a few messages are under way."""
        with contextlib.suppress(OSError):  # the supervisor is gone; receive() says so
            if self.connection.send(data) < len(data):
                self.connection.shutdown(socket.SHUT_RDWR)  # the supervisor has read nothing for long

    def _write(self, file: int, data: bytes) -> bytes:
        """Writes what can be written, and returns the rest."""
        try:
            return data[os.write(file, data) :]
        except BlockingIOError:
            return data
        except OSError:
            return b""  # the reader is gone


def _start(variables: Mapping[str, str], has_stdin: bool) -> bytes:
    assignments = "\0".join(f"{name}={value}" for name, value in variables.items())
    return f"start {int(has_stdin)} {assignments}".encode()


def _parted(message: bytes) -> tuple[str, str]:
    word, _, rest = message.decode(errors="replace").partition(" ")
    return word, rest
