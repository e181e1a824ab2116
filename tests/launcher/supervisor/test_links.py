"""The link to supervisors on other hosts: frames, and who is let in."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from horovodish.errors import SettingError
from horovodish.launcher.hosts.addresses import addresses
from horovodish.launcher.job import listener
from horovodish.launcher.job.launcher_end import LauncherEnd, TcpLauncherEnd
from horovodish.launcher.job.listener import Handshake, SupervisorListener
from horovodish.launcher.job.status_desk import SOCKET, StatusDesk
from horovodish.launcher.supervisor import tcp_end
from horovodish.launcher.supervisor.tcp_end import (
    HEAD,
    LONGEST_MESSAGE,
    MESSAGE,
    NONCE_BYTES,
    PROOF_BYTES,
    STDERR,
    STDOUT,
    Frames,
    call,
    frame,
    proof,
)
from support.door import Door
from support.other_user import as_other_user

SECRET = b"s" * 32


@pytest.mark.parametrize("piece", [1, 3, 7, 1000])
def test_frames_are_put_together_from_pieces(piece: int) -> None:
    sent = [(MESSAGE, b"started"), (STDOUT, b""), (STDERR, bytes(range(256))), (STDOUT, b"x" * 900)]
    stream = b"".join(frame(kind, content) for kind, content in sent)
    frames = Frames()
    assert [each for at in range(0, len(stream), piece) for each in frames.take(stream[at : at + piece])] == sent


@pytest.mark.parametrize("head", [HEAD.pack(MESSAGE, LONGEST_MESSAGE + 1), HEAD.pack(STDERR + 1, 1)])
def test_what_is_no_frame_is_refused_before_it_is_read(head: bytes) -> None:
    with pytest.raises(ValueError, match="a frame of kind"):
        Frames().take(head)


def shake_hands(launcher: Handshake, secret: bytes, side: bytes = b"supervisor") -> None:
    """The supervisor's part."""
    nonce = os.urandom(NONCE_BYTES)
    answer = launcher.take(nonce[:5]) + launcher.take(nonce[5:])
    other, theirs = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    assert (theirs == proof(secret, b"launcher", other, nonce)) == (secret == SECRET)
    assert not launcher.is_done
    launcher.take(proof(secret, side, nonce, other))


def test_both_sides_prove_that_they_know_the_secret() -> None:
    launcher = Handshake(SECRET)
    shake_hands(launcher, SECRET)
    assert launcher.is_done


@pytest.mark.parametrize(("secret", "side"), [(b"t" * 32, b"supervisor"), (SECRET, b"launcher")])
def test_a_stranger_and_an_echo_are_refused(secret: bytes, side: bytes) -> None:
    launcher = Handshake(SECRET)
    with pytest.raises(PermissionError):
        shake_hands(launcher, secret, side)
    assert not launcher.is_done


def test_the_launchers_own_answer_is_no_proof() -> None:
    launcher = Handshake(SECRET)
    answer = launcher.take(b"n" * NONCE_BYTES)
    with pytest.raises(PermissionError):
        launcher.take(answer[NONCE_BYTES:])
    assert len(answer) == NONCE_BYTES + PROOF_BYTES


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    opened = Door(tmp_path)
    yield opened
    opened.close()


def what_comes(get: Callable[[], list[Any]]) -> list[Any]:
    """What `get` returns once it is something."""
    ends_at = time.monotonic() + 60
    while not (got := get()):
        assert time.monotonic() < ends_at, "nothing comes"
    return got


def test_a_supervisor_is_let_in_and_both_are_heard(door: Door) -> None:
    supervisor = call(door.address)
    supervisor.send("rank 1 b machine 8 8 - ")
    (link,) = what_comes(lambda: door.admitted)
    assert isinstance(link, TcpLauncherEnd)
    assert what_comes(link.receive) == [("rank", "1 b machine 8 8 - ")]
    link.start([1, 2], {"A": "b=c", "D": ""}, has_stdin=False)
    messages = what_comes(lambda: supervisor.serve(dict.fromkeys(supervisor.interests(), 1)))
    assert messages == [b"start 0 A=b=c\0D="]


def test_who_does_not_know_the_secret_is_told_nothing(door: Door) -> None:
    _, port, address = door.address.split()
    with pytest.raises(OSError, match=rf"port {port} of 127\.0\.0\.1: somebody else answers"):
        call(f"{'0' * 64} {port} {address}")
    with socket.create_connection((address, int(port)), timeout=300) as stranger:
        stranger.sendall(b"n" * NONCE_BYTES + b"p" * PROOF_BYTES)
        answer = stranger.recv(1024)
        assert len(answer) == NONCE_BYTES + PROOF_BYTES
        assert stranger.recv(1024) == b""
    assert door.admitted == []


def test_a_second_user_of_the_host_is_not_let_in(door: Door) -> None:
    """He sees the port, and can send back what the launcher says."""
    _, port, address = door.address.split()

    def knock() -> bytes:
        with socket.create_connection((address, int(port)), timeout=300) as stranger:
            stranger.sendall(b"n" * NONCE_BYTES)
            stranger.sendall(stranger.recv(NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL)[NONCE_BYTES:])
            return stranger.recv(1024)

    assert as_other_user(knock) == b""
    assert door.admitted == []
    assert call(door.address).is_open


def strangers(door: Door, count: int) -> list[socket.socket]:
    """Connections on which nobody says anything."""
    _, port, address = door.address.split()
    return [socket.create_connection((address, int(port)), timeout=60) for _ in range(count)]


def test_many_strangers_keep_neither_a_supervisor_out_nor_the_launcher_busy(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "MOST_PENDING", 20)
    monkeypatch.setattr(listener, "CROWDED_SECONDS", 0.1)
    idle = strangers(door, 200)
    supervisor = call(door.address)
    what_comes(lambda: door.admitted)
    assert supervisor.is_open
    assert door.events < 1000  # a listener that is watched while nobody can be let in gives that many in a moment
    for stranger in idle:
        stranger.close()


def test_a_stranger_who_comes_alone_is_dismissed_in_time(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 0.1)
    (stranger,) = strangers(door, 1)
    with stranger:
        assert stranger.recv(1) == b""


def test_where_no_more_files_can_be_open_the_launcher_tries_again_later(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, may = [], threading.Event()
    accept = socket.socket.accept

    def accept_or_not(listener: socket.socket) -> Any:
        tries.append(listener)
        if not may.is_set():
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_or_not)
    began = time.monotonic()
    (stranger,) = strangers(door, 1)
    what_comes(lambda: tries[5:])
    assert time.monotonic() - began > 4 * listener.RETRY_SECONDS
    stranger.close()
    may.set()
    assert call(door.address).is_open


@pytest.mark.parametrize("who", ["a supervisor", "who asks for the status"])
def test_a_unix_socket_waits_for_files_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    tries: list[socket.socket] = []
    links: list[LauncherEnd] = []
    accept = socket.socket.accept

    def accepts_later(listener: socket.socket) -> Any:
        tries.append(listener)
        if len(tries) < 3:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accepts_later)
    monkeypatch.setattr(listener, "RETRY_SECONDS", 0.5)
    turns: list[int] = []  # how many events each turn of the selector had
    with selectors.DefaultSelector() as selector, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
        if who == "a supervisor":
            listening = SupervisorListener(selector, tmp_path / "socket", links.append, None)
            maintain, close, path = listening.maintain, listening.close, tmp_path / "socket"
        else:
            desk = StatusDesk(selector, tmp_path, ["train"], lambda *_: None, dict)
            maintain, close, path = lambda: desk.turn(1), desk.close, tmp_path / SOCKET
        try:
            caller.connect(str(path))
            while len(tries) < 3:
                events = selector.select(0.02)
                turns.append(len(events))
                for key, _ in events:
                    key.data()
                maintain()
            assert 0 in turns, "each turn tries again"
        finally:
            close()
            for link in links:
                link.close()


def test_the_launcher_listens_at_the_addresses_that_it_names_and_no_others(door: Door) -> None:
    _, port, _ = door.address.split()
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    places = [line[1] for line in lines if line[3] == "0A" and line[1].endswith(f":{int(port):04X}")]
    assert places == [f"0100007F:{int(port):04X}"]


def test_several_addresses_have_one_port(tmp_path: Path) -> None:
    with selectors.DefaultSelector() as selector:
        at = ["127.0.0.1", "127.0.0.2", "192.0.2.1"]  # the last one is nobody's
        listening = SupervisorListener(selector, tmp_path / "socket", lambda _: None, at)
        _, port, *named = listening.contact.split()
        assert named == at[:2]
        for address in named:
            socket.create_connection((address, int(port)), timeout=300).close()
        listening.close()
        listening.close()


def test_an_address_of_two_interfaces_counts_once(tmp_path: Path) -> None:
    with selectors.DefaultSelector() as selector:
        listening = SupervisorListener(selector, tmp_path / "socket", lambda _: None, ["127.0.0.1", "127.0.0.1"])
        try:
            assert listening.contact.split()[2:] == ["127.0.0.1"]
        finally:
            listening.close()


def test_nobody_answers() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and so nobody else takes this port
        port = nobody.getsockname()[1]
        with pytest.raises(OSError, match=rf"port {port} of 127\.0\.0\.1: Connection refused"):
            call(f"{'0' * 64} {port} 127.0.0.1")


def test_who_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_end, "CALL_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(OSError, match="timed out"):
        call(f"{'0' * 64} {silent.getsockname()[1]} 127.0.0.1")


def test_addresses_of_this_host() -> None:
    assert addresses(["lo"])[0] == "127.0.0.1"
    with pytest.raises(SettingError, match="--network-interfaces: there is no 'none0' on this host, only lo"):
        addresses(["none0"])
