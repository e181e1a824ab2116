"""How the ranks of a host meet: beside strangers, with ranks that leave, and with hellos that cannot be."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from horovodish.errors import LaunchError
from horovodish.mpi import local_peers
from horovodish.mpi.local_peers import LocalPeers, connect
from support.other_user import as_other_user, sockets_of_another_user

MEMORY_BYTES = 4096
SECONDS = 60.0


class World:
    """The communicators of some ranks of one host, which are threads.

    Attributes:
        told: what each rank has told the others, by rank.
    """

    def __init__(self, size: int):
        self.size = size
        self.told: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=SECONDS)

    def before_they_meet(self) -> None:
        """Called once, when every rank listens."""

    def communicator(self, rank: int) -> Any:
        world = self

        class Communicator:
            def Get_rank(self) -> int:  # noqa: N802, mpi4py's name
                return rank

            def Get_size(self) -> int:  # noqa: N802, mpi4py's name
                return world.size

            def allgather(self, told: Any) -> list[Any]:
                world.told[rank] = told
                if world.barrier.wait() == 0:
                    world.before_they_meet()
                world.barrier.wait()
                return world.told

        return Communicator()

    def connect(self, timeout_seconds: float = SECONDS) -> list[LocalPeers]:
        with ThreadPoolExecutor(self.size) as threads:
            return list(
                threads.map(
                    lambda rank: connect(self.communicator(rank), MEMORY_BYTES, timeout_seconds), range(self.size)
                )
            )


def check(peers: list[LocalPeers]) -> None:
    """Every rank sees what every rank has written, and hears the others' ends."""
    for rank, own in enumerate(peers):
        with mmap.mmap(own.descriptors[rank], MEMORY_BYTES) as memory:
            memory[0] = 100 + rank
    for rank, own in enumerate(peers):
        for other, descriptor in enumerate(own.descriptors):
            with mmap.mmap(descriptor, MEMORY_BYTES) as memory:
                assert memory[0] == 100 + other
            assert not os.get_inheritable(descriptor)
        assert own.sockets[rank] == -1
        assert all(descriptor >= 0 for other, descriptor in enumerate(own.sockets) if other != rank)
    for own in peers:
        own.close_sockets()
        own.close_memory()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_share_memory(size: int) -> None:
    check(World(size).connect())


def test_the_socket_lies_in_the_private_folder_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVODISH_RUN_DIR", str(tmp_path))
    world = World(2)
    check(world.connect())
    assert all(Path(address).parent == tmp_path for address, _ in world.told)
    assert not list(tmp_path.iterdir())


def test_a_path_that_is_too_long_for_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setenv("HOROVODISH_RUN_DIR", str(folder))
    world = World(2)
    check(world.connect())
    assert all(address.startswith(b"\0") for address, _ in world.told)


# Connects to the sockets as fast as it can, and keeps every connection that it gets.
STRANGER = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
kept, full = [], set()
while True:
    for name in sys.argv[1:]:
        stranger = socket.socket(socket.AF_UNIX)
        stranger.setblocking(False)
        try:
            stranger.connect(chr(0) + name)
        except BlockingIOError:
            full.add(name)
            if full == set(sys.argv[1:]):
                print("full", flush=True)
                full.add("")
        except OSError:
            pass
        kept.append(stranger)
        del kept[:-500]
"""


class Besieged(World):
    """No rank begins before there is no room in any queue."""

    strangers: subprocess.Popen[str]

    def before_they_meet(self) -> None:
        names = [address[1:].decode() for address, _ in self.told]
        self.strangers = subprocess.Popen([sys.executable, "-c", STRANGER, *names], stdout=subprocess.PIPE, text=True)
        assert self.strangers.stdout is not None
        assert self.strangers.stdout.readline() == "full\n"


def test_strangers_in_any_number_do_not_keep_the_ranks_apart() -> None:
    world = Besieged(3)
    try:
        check(world.connect())
    finally:
        world.strangers.kill()
        world.strangers.communicate()


class WithAPeerThatLeaves(World):
    """A world of two ranks: the other rank connects and leaves, or leaves at once."""

    def __init__(self, *, dials: bool) -> None:
        super().__init__(2)
        self.dials = dials

    def communicator(self, rank: int) -> Any:
        communicator = super().communicator(rank)

        def allgather(told: Any) -> list[Any]:
            with socket.socket(socket.AF_UNIX) as peer:
                if self.dials:
                    peer.connect(told[0])
                else:
                    peer.bind(f"\0{os.urandom(8).hex()}")
                other = (peer.getsockname(), b"")
            return [told, other] if rank == 0 else [other, told]

        communicator.allgather = allgather
        return communicator


def test_a_rank_that_leaves() -> None:
    begin = time.monotonic()
    with pytest.raises(
        LaunchError, match=r"local rank 0 could not exchange memory .*: local rank 1 did not come within 1 s"
    ):
        connect(WithAPeerThatLeaves(dials=True).communicator(0), MEMORY_BYTES, timeout_seconds=1)
    with pytest.raises(LaunchError, match=r"local rank 1 could not .*: local rank 0 cannot be reached: .*refused"):
        connect(WithAPeerThatLeaves(dials=False).communicator(1), MEMORY_BYTES, timeout_seconds=SECONDS)
    assert time.monotonic() - begin < SECONDS / 2


def test_one_limit_for_all_of_them_however_often_somebody_connects() -> None:
    class WithVisitors(World):
        def before_they_meet(self) -> None:
            self.visitors = threading.Thread(target=self.visit)
            self.visitors.start()

        def visit(self) -> None:
            ends_at = time.monotonic() + SECONDS
            while time.monotonic() < ends_at:
                with socket.socket(socket.AF_UNIX) as visitor:
                    try:
                        visitor.connect(self.told[0][0])
                    except ConnectionRefusedError:
                        return
                time.sleep(0.1)

    world = WithVisitors(1)
    communicator = world.communicator(0)
    allgather = communicator.allgather
    communicator.allgather = lambda told: [*allgather(told), (b"", b"")]  # of a rank that never comes
    with pytest.raises(LaunchError, match="local rank 1 did not come within 1 s"):
        connect(communicator, MEMORY_BYTES, timeout_seconds=1)
    world.visitors.join(SECONDS / 2)
    assert not world.visitors.is_alive()


class WithAPretender(World):
    """A world of two ranks: the other one knows the secret, and claims to be each of `said`, one after the other."""

    def __init__(self, *said: int):
        super().__init__(2)
        self.said = said
        self.pretenders: list[socket.socket] = []

    def communicator(self, rank: int) -> Any:
        communicator = super().communicator(rank)

        def allgather(told: Any) -> list[Any]:
            address, secret = told
            memory = os.memfd_create("pretender")
            for number in self.said:
                pretender = socket.socket(socket.AF_UNIX)
                pretender.connect(address)
                socket.send_fds(pretender, [struct.pack(f"=I{len(secret)}s", number, secret)], [memory])
                self.pretenders.append(pretender)
            os.close(memory)
            return [told, (b"", secret), (b"", secret)]

        communicator.allgather = allgather
        return communicator


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ([7], "said that it is local rank 7, where local rank 1 was expected"),
        ([0], "said that it is local rank 0, where local rank 1 was expected"),
        ([1, 1], "said that it is local rank 1, a second time"),
    ],
)
def test_a_hello_that_cannot_be(said: list[int], problem: str) -> None:
    world = WithAPretender(*said)
    with pytest.raises(LaunchError, match=f"local rank 0 could not exchange memory .* a process {re.escape(problem)}"):
        connect(world.communicator(0), MEMORY_BYTES, timeout_seconds=SECONDS)
    for pretender in world.pretenders:
        pretender.close()


def test_memory_is_not_sent_to_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that another user has taken in the meantime: the dialler sends nothing."""
    with closing(socket.socket(socket.AF_UNIX)) as other:
        other.bind("")
        other.listen()
        other.setblocking(False)
        communicator = World(2).communicator(1)
        communicator.allgather = lambda told: [(other.getsockname(), b"secret"), told]
        monkeypatch.setattr(local_peers, "_user_of", lambda _: os.getuid() + 1)
        with pytest.raises(LaunchError, match=r"local rank 0 cannot be reached: .* belongs to another user"):
            connect(communicator, MEMORY_BYTES, timeout_seconds=SECONDS)
        dialled, _ = other.accept()
        with dialled:
            assert dialled.recv(1) == b""


class Watched(World):
    """A second user, who even knows the secrets, dials each rank, and offers memory as if it were the last rank."""

    def before_they_meet(self) -> None:
        self.strangers = []
        memory = os.memfd_create("theirs")
        for address, secret in self.told:
            stranger = socket.socket(socket.AF_UNIX)
            with sockets_of_another_user():
                stranger.connect(address)
            socket.send_fds(stranger, [struct.pack(f"=I{len(secret)}s", self.size - 1, secret)], [memory])
            self.strangers.append(stranger)
        os.close(memory)


def test_a_second_user_who_dials_gets_no_memory_and_gives_none() -> None:
    world = Watched(3)
    check(world.connect())
    for stranger in world.strangers:
        # A hello that was never read resets the connection.
        with stranger, contextlib.suppress(ConnectionResetError):
            assert socket.recv_fds(stranger, 100, 1)[:2] == (b"", [])


def test_a_second_user_who_listens_in_a_ranks_place_gets_no_memory() -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind("")
        with sockets_of_another_user():
            other.listen()
        communicator = World(2).communicator(1)
        communicator.allgather = lambda told: [(other.getsockname(), b"secret"), told]
        with pytest.raises(LaunchError, match=r"local rank 0 cannot be reached: .* belongs to another user"):
            connect(communicator, MEMORY_BYTES, timeout_seconds=SECONDS)
        dialled, _ = other.accept()
        with dialled:
            assert dialled.recv(1) == b""


def test_a_second_user_cannot_open_the_memory_of_a_rank() -> None:
    (own,) = World(1).connect()
    path = f"/proc/{os.getpid()}/fd/{own.descriptors[0]}"
    os.close(os.open(path, os.O_RDWR))
    assert isinstance(as_other_user(lambda: os.open(path, os.O_RDWR)), PermissionError)
    check([own])
