"""Tests the links between hosts, for `horovodish check --hosts`: each host connects to each other one by TCP.

A process on each host does so, which the launcher starts as it starts ranks. MPI is not initialized.
"""

import contextlib
import os
import socket
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from horovodish.launcher.function.call import Call
from horovodish.launcher.function.rank import RANK_VARIABLES
from horovodish.launcher.function.ranks import Ranks
from horovodish.launcher.hosts.addresses import addresses
from horovodish.launcher.hosts.allocation import Host
from horovodish.launcher.options import LaunchOptions

CONNECT_SECONDS = 5.0
PINGS = 50
PAYLOAD_BYTES = 8 << 20
PIECE_BYTES = 1 << 18
SLOW = 0.5
"""A link is slow that has less than this share of the median bandwidth."""

Place = tuple[str, int, list[tuple[str, str]]]
"""A host's name, the port at which it answers, and its interfaces, each with an address."""


@dataclass(frozen=True)
class Link:
    """The measurement from one host to another, at one of its addresses.

    Attributes:
        of: the host that has connected.
        to: the other one.
        interface: of the other host.
        address: of the interface.
        problem: why it could not connect; empty if it could.
        latency_us: half of the median round trip of a byte.
        gbit_per_second: how fast a payload went.
    """

    of: str
    to: str
    interface: str
    address: str
    problem: str = ""
    latency_us: float = 0.0
    gbit_per_second: float = 0.0


def measured(options: LaunchOptions, environ: Mapping[str, str]) -> list[Link]:
    """Measures every link between the hosts of these options, one after the other. Blocks.

    Raises:
        LaunchError: a host did not come up.
    """
    assert options.allocation
    hosts = tuple(Host(host.name, 1) for host in options.allocation.hosts)
    options = replace(options, np=len(hosts), allocation=replace(options.allocation, hosts=hosts))
    with Ranks(options, environ) as ranks:
        places: list[Place] = ranks.call(Call.of(_answer, (options.network_interfaces,)))
        found: list[Link] = []
        for of in range(len(hosts)):
            for to in range(len(hosts)):
                if of != to:
                    found += ranks.call(Call.of(_measure, (of, places[of][0], places[to])))[of]
        ranks.leave()
    return found


def in_words(links: Sequence[Link]) -> tuple[list[str], list[str]]:
    """A line for each link, and a problem for each host that another one reaches at none of its addresses."""
    usual = statistics.median([link.gbit_per_second for link in links if not link.problem] or [0.0])
    lines, problems = [], []
    for link in links:
        name = f"{link.of} to {link.to} at {link.address} ({link.interface})"
        if link.problem:
            lines.append(f"{name}: {link.problem}")
            if not any((each.of, each.to) == (link.of, link.to) and not each.problem for each in links):
                problems.append(
                    f"{link.of} cannot reach {link.to} at {link.address} ({link.interface}): {link.problem}"
                )
            continue
        is_slow = link.gbit_per_second < SLOW * usual
        lines.append(f"{name}: {link.latency_us:.0f} us, {link.gbit_per_second:.2f} Gbit/s" + ", slow" * is_slow)
    return lines, problems


def _answer(interfaces: Sequence[str]) -> Place:
    """Listens at all addresses of this host, and sends back what comes until this process ends."""
    listener = socket.create_server(("", 0), backlog=16)

    def serve(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(PINGS):
                connection.sendall(connection.recv(1))
            left = PAYLOAD_BYTES
            while left > 0 and (data := connection.recv(PIECE_BYTES)):
                left -= len(data)
            connection.sendall(b"x")

    def accept() -> None:
        while True:
            threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    names = interfaces or [name for _, name in socket.if_nameindex() if name != "lo"]
    known = []
    for name in names:
        with contextlib.suppress(Exception):  # an interface without an address
            known += [(name, address) for address in addresses([name]) if ":" not in address]
    return socket.gethostname(), int(listener.getsockname()[1]), known


def _measure(of: int, own_name: str, place: Place) -> list[Link]:
    """The measurements of rank `of` at each address of another host; empty on the other ranks."""
    rank = next(int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ)
    host, port, interfaces = place
    if rank != of:
        return []
    own = addresses()  # a bridge of containers has the same address on each host
    return [_link(own_name, host, port, *each) for each in interfaces if each[1] not in own]


def _link(own_name: str, host: str, port: int, interface: str, address: str) -> Link:
    try:
        with socket.create_connection((address, port), CONNECT_SECONDS) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            times = []
            for _ in range(PINGS):
                began = time.perf_counter()
                connection.sendall(b"x")
                connection.recv(1)
                times.append(time.perf_counter() - began)
            began = time.perf_counter()
            connection.sendall(bytes(PAYLOAD_BYTES))
            connection.recv(1)
            seconds = time.perf_counter() - began
    except OSError as problem:
        return Link(own_name, host, interface, address, problem.strerror or str(problem))
    return Link(own_name, host, interface, address, "", statistics.median(times) * 5e5, PAYLOAD_BYTES * 8e-9 / seconds)
