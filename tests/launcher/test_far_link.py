"""The link to supervisors on other hosts: frames, and who is let in."""

from __future__ import annotations

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
from horovodish.launcher import far_link
from horovodish.launcher.far_link import (
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
from horovodish.launcher.link import FarLink, Link
from horovodish.launcher.reception import Introduction, Reception, addresses

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


def introduced(launcher: Introduction, secret: bytes, side: bytes = b"supervisor") -> None:
    """The supervisor's part."""
    nonce = os.urandom(NONCE_BYTES)
    answer = launcher.take(nonce[:5]) + launcher.take(nonce[5:])
    other, theirs = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    assert (theirs == proof(secret, b"launcher", other, nonce)) == (secret == SECRET)
    assert not launcher.is_done
    launcher.take(proof(secret, side, nonce, other))


def test_both_sides_prove_that_they_know_the_secret() -> None:
    launcher = Introduction(SECRET)
    introduced(launcher, SECRET)
    assert launcher.is_done


@pytest.mark.parametrize(("secret", "side"), [(b"t" * 32, b"supervisor"), (SECRET, b"launcher")])
def test_a_stranger_and_an_echo_are_refused(secret: bytes, side: bytes) -> None:
    launcher = Introduction(SECRET)
    with pytest.raises(PermissionError):
        introduced(launcher, secret, side)
    assert not launcher.is_done


def test_the_launchers_own_answer_is_no_proof() -> None:
    launcher = Introduction(SECRET)
    answer = launcher.take(b"n" * NONCE_BYTES)
    with pytest.raises(PermissionError):
        launcher.take(answer[NONCE_BYTES:])
    assert len(answer) == NONCE_BYTES + PROOF_BYTES


class Door:
    """A reception that is served by a thread.

    Attributes:
        admitted: the links of those that were let in.
        address: what a supervisor is told.
    """

    def __init__(self, folder: Path) -> None:
        self.admitted: list[Link] = []
        self._selector = selectors.DefaultSelector()
        self._reception = Reception(self._selector, folder / "socket", self.admitted.append, ["127.0.0.1"])
        self.address = self._reception.address
        self._is_open = True
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._is_open = False
        self._thread.join()
        self._reception.close()
        for link in self.admitted:
            link.close()

    def _serve(self) -> None:
        while self._is_open:
            for key, _ in self._selector.select(0.02):
                key.data()


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
    assert isinstance(link, FarLink)
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


def test_nobody_answers() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and so nobody else takes this port
        port = nobody.getsockname()[1]
        with pytest.raises(OSError, match=rf"port {port} of 127\.0\.0\.1: Connection refused"):
            call(f"{'0' * 64} {port} 127.0.0.1")


def test_who_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far_link, "CALL_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(OSError, match="timed out"):
        call(f"{'0' * 64} {silent.getsockname()[1]} 127.0.0.1")


def test_addresses_of_this_host() -> None:
    assert addresses(["lo"])[0] == "127.0.0.1"
    with pytest.raises(SettingError, match="--network-interfaces: there is no 'none0' on this host, only lo"):
        addresses(["none0"])
