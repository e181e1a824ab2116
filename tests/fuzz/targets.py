"""What Python reads from outside, given any bytes: each target takes some, and raises what no user should ever see.

`python tests/fuzz/run.py TARGET` lets a fuzzer choose them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from horovodish.errors import LaunchError, SettingError
from horovodish.launcher import config_file
from horovodish.launcher.flags import run_parser
from horovodish.launcher.hosts.allocation import assign_ranks, from_hostfile, from_hosts_flag
from horovodish.launcher.job.launcher_end import Hello, TcpLauncherEnd
from horovodish.launcher.job.listener import Handshake
from horovodish.launcher.job.outcome import Failure
from horovodish.launcher.supervisor.tcp_end import MESSAGE, NONCE_BYTES, STDERR, STDIN, STDOUT, TcpSupervisorEnd, frame
from horovodish.mpi import local_peers
from horovodish.reports import merge_traces

__all__ = ["SEEDS", "TARGETS"]

PARSER = run_parser()
FOLDER = tempfile.TemporaryDirectory(prefix="fuzz-")


def file_of(data: bytes, name: str = "file") -> str:
    path = Path(FOLDER.name, name)
    path.write_bytes(data)
    return str(path)


def frames(data: bytes) -> None:
    """What a supervisor on another host sends, at the launcher; and what a launcher sends, at a supervisor."""
    for side in (TcpLauncherEnd, TcpSupervisorEnd):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(data[: 1 << 15])
            theirs.shutdown(socket.SHUT_WR)
            link: Any = side(ours)
            messages = link.receive() if side is TcpLauncherEnd else link.serve({ours.fileno(): 1})
            for word, rest in messages if side is TcpLauncherEnd else []:
                with contextlib.suppress(ValueError):  # the secret of the run is known to its supervisors alone
                    if word == "rank":
                        Hello.of(rest)
                    if word == "failure":
                        Failure.of(0, rest)


def introduction(data: bytes) -> None:
    """What a stranger says at the launcher's port."""
    launcher = Handshake(b"s" * 32)
    with contextlib.suppress(PermissionError):
        while data:
            expected = launcher.expected_bytes
            launcher.take(data[:expected])
            data = data[expected:]
    assert not launcher.is_done


class TwoRanks:
    """Stands for the communicator of two ranks. The other one dials, and says what the fuzzer wants."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.others: list[socket.socket] = []

    def Get_rank(self) -> int:  # noqa: N802
        return 0

    def Get_size(self) -> int:  # noqa: N802
        return 2

    def allgather(self, told: Any) -> list[Any]:
        address, secret = told if isinstance(told, tuple) else (told, b"")
        how, words = self.data[0], self.data[1:]
        if how & 1:  # it knows the secret
            words = words[:4] + secret + words[4:]
        other = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.others.append(other)
        other.connect(address)
        if words:
            socket.send_fds(other, [words], [other.fileno()] * (how >> 1 & 3))
        if how & 8:
            other.close()
        return [told, told]


def hello(data: bytes) -> None:
    """Bytes that reach a rank at the socket where the ranks of a host meet."""
    ranks = TwoRanks(data or b"\0")
    with contextlib.suppress(LaunchError):
        peers = local_peers.connect(ranks, 4096, 0.01)
        peers.close_memory()
        peers.close_sockets()
    for other in ranks.others:
        other.close()


def config(data: bytes) -> None:
    """The file of --config-file."""
    with contextlib.suppress(SettingError):
        config_file.read(file_of(data), PARSER)


def hostfile(data: bytes) -> None:
    """A hostfile, and the same as the text of --hosts."""
    with contextlib.suppress(SettingError):
        assign_ranks(3, from_hostfile(file_of(data)), oversubscribe=True)
    with contextlib.suppress(SettingError):
        assign_ranks(3, from_hosts_flag(data.decode(errors="replace")), oversubscribe=True)


def traces(data: bytes) -> None:
    """Files given to `horovodish merge-traces`."""
    paths = [file_of(data, "first"), file_of(data, "second")]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        status = merge_traces.merge(paths)
    assert status in ((0,) if data == TRACE else (0, 1))


TARGETS: dict[str, Callable[[bytes], None]] = {
    each.__name__: each for each in (frames, introduction, hello, config, hostfile, traces)
}
TRACE = b'[\n{"ph":"M","pid":0,"name":"process_name"}\n,{"ph":"X","pid":0,"ts":1.5,"dur":2,"name":"reduce"}\n]\n'
SEEDS = {
    "frames": [
        frame(MESSAGE, b"rank 1 2 3 b machine 8 8 0,1 ") + frame(STDOUT, b"text\n") + frame(MESSAGE, b"ended 0"),
        frame(MESSAGE, b"failure 1.5 ValueError\nTraceback") + frame(STDERR, b"") + frame(STDIN, b"line"),
        frame(MESSAGE, b"start 1 A=b\0C=d") + frame(MESSAGE, b"signal 15") + frame(MESSAGE, b"leave"),
    ],
    "introduction": [b"n" * NONCE_BYTES, b"n" * NONCE_BYTES + b"p" * 32, b"n" * 10],
    "hello": [b"\3\1\0\0\0", b"\3\0\0\0\0", b"\2\1\0\0\0", b"\5\1\0\0\0", b"\3\xff\xff\xff\xff", b"\13\1\0", b"\1"],
    "config": [
        b"np: 2\nfusion-threshold-mb: 32\nautotune:\n  enabled: true\n  log-file: a.csv\n",
        b"params: {cycle_time_ms: 1.5}\nhosts: 'a:2,b:4'\ntimeline:\n  filename: t.json\n",
        b"? [1, 2]\n: &a *a\n--- !!binary abc\n",
    ],
    "hostfile": [b"a slots=2 max_slots=4\nb:4\n# nobody\n", b"a:2,b:4", b"a slots = 0\n\xff", b"a max-slots=1\na"],
    "traces": [TRACE, TRACE[:60], b"", b"\0" * 20],
}
