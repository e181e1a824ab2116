"""The links between the caller of `horovodish.run()` and its ranks."""

from __future__ import annotations

import pickle
import selectors
import socket
import threading

import pytest

from horovodish.launcher.function.call import Report
from horovodish.launcher.function.exchange import Exchange, receive, send
from horovodish.launcher.supervisor.tcp_end import NONCE_BYTES, PROOF_BYTES, dial


@pytest.fixture
def selector():
    with selectors.DefaultSelector() as made:
        yield made


@pytest.fixture
def exchange(selector):
    made = Exchange(selector, ["127.0.0.1"], lambda: None)
    yield made
    made.close()


def serve(selector, until):
    while not until():
        for key, _ in selector.select(10):
            key.data()


def test_messages_of_any_size_go_both_ways(selector, exchange) -> None:
    large = bytes(range(256)) * (1 << 16)
    heard = []

    def rank() -> None:
        connection = dial(exchange.contact)
        while message := receive(connection):
            heard.append(message)
            send(connection, pickle.dumps(Report(1, "here", 0, 0.0, large)))

    thread = threading.Thread(target=rank)
    thread.start()
    exchange.offer(large)
    serve(selector, lambda: exchange.reports)
    assert exchange.reports[0].result == large
    exchange.offer(b"again")
    serve(selector, lambda: exchange.reports)
    exchange.offer(b"")
    serve(selector, lambda: not exchange.has_links)
    thread.join()
    assert heard == [large, b"again"]


def test_who_does_not_know_the_secret_gets_no_function(selector, exchange) -> None:
    exchange.offer(b"the function")
    _, port, address = exchange.contact.split()
    with socket.create_connection((address, int(port))) as stranger:
        stranger.sendall(bytes(NONCE_BYTES) + bytes(PROOF_BYTES) + pickle.dumps("never loaded"))
        stranger.settimeout(0)
        heard = b""
        while True:
            for key, _ in selector.select(0.1):
                key.data()
            try:
                data = stranger.recv(1 << 16)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                break
            if not data:
                break
            heard += data
    assert len(heard) == NONCE_BYTES + PROOF_BYTES
    assert not exchange.has_links
