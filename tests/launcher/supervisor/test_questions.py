"""What a rank answers never ends its supervisor, which would end the rank."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import Any

import pytest

from horovodish.launcher.supervisor import supervisor
from horovodish.launcher.supervisor.tcp_end import LONGEST_MESSAGE


class Link:
    """Keeps what the supervisor sends."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def send(self, message: str) -> None:
        self.messages.append(message)


def answered(question: supervisor.Question) -> str:
    """What the supervisor sends of an answer that is there."""
    asks: Any = supervisor.Supervisor.__new__(supervisor.Supervisor)
    asks.link, asks.questions = Link(), [question]
    while asks.questions:
        asks.take_answers({question.source: 1})
    (message,) = asks.link.messages
    return str(message)


def test_an_answer_of_any_bytes_fits_into_a_message() -> None:
    own, rank = socket.socketpair()
    with own, rank:
        rank.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        rank.sendall(b"\xff" * LONGEST_MESSAGE + b"x" * LONGEST_MESSAGE)
        rank.shutdown(socket.SHUT_WR)
        message = answered(supervisor.Question("status 1", 1, os.dup(own.fileno()), wants_stacks=False))
    assert len(message.encode()) < LONGEST_MESSAGE


def test_a_connection_that_is_reset_ends_the_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        own = socket.create_connection(server.getsockname())
        rank, _ = server.accept()
        rank.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        rank.close()
        assert answered(supervisor.Question("status 1", 1, own.detach(), wants_stacks=False)) == "status 1 "


def test_a_rank_without_a_socket_is_not_asked(tmp_path: Path) -> None:
    assert supervisor.question_to(str(tmp_path / "door"), b"s") is None


def test_a_py_spy_that_cannot_be_started_is_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "py-spy"
    program.write_text("no program")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert supervisor.py_spy(os.getpid()) == (None, 0)
