"""`run_on_hosts`: as `run_ranks`, on several hosts that are network namespaces of this machine, joined by a bridge.

Each host has a network address and a hostname of its own, so that MPI takes its ranks for ranks of another machine and
sends what goes between hosts over a link, whose bytes are counted. It needs root and iproute2's `ip`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.mpi_command import is_open_mpi, mpirun
from support.outcome import Outcome
from support.ranks import let_idle_ranks_leave, run_ranks, run_ranks_to_their_ends

REQUIRED_VARIABLE = "HOROVODISH_TEST_HOSTS"
"""Set to 1, a machine on which no hosts can be made fails the tests that need them instead of skipping them."""

_COMMAND_SECONDS = 60

# What the link may send at once, and how long it keeps what has to wait.
_BURST, _LONGEST_WAIT = "256kb", "10ms"

# mpirun calls it as `agent ADDRESS COMMAND...`; the last byte of the address says which host is meant.
_AGENT = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=${{1##*.}}; shift
exec ip netns exec {prefix}-$host unshare --uts sh -c "hostname {prefix}-$host; exec sh -c \\"\\$0\\"" "$*"
"""


@dataclass(frozen=True)
class Hosts:
    """Some hosts that are up.

    Attributes:
        prefix: begins the name of each host and device; no other run has it.
        count: how many there are.
        agent: the program that takes the place of ssh.
    """

    prefix: str
    count: int
    agent: Path

    def name(self, host: int) -> str:
        """The namespace and hostname of a host, counted from 0."""
        return f"{self.prefix}-{host + 1}"

    def address(self, host: int) -> str:
        """Its network address; every run uses the same ones, each on a bridge that leads nowhere else."""
        return f"10.78.0.{host + 1}"

    def sent_bytes(self) -> list[int]:
        """How many bytes each host has sent over its link so far."""
        counters = [Path("/sys/class/net", self._link(host), "statistics/rx_bytes") for host in range(self.count)]
        return [int(counter.read_text()) for counter in counters]

    def inside(self, host: int) -> list[str]:
        """What runs a program, which is appended, on a host."""
        name = self.name(host)
        return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$0" "$@"']

    def command(self, ranks_per_host: Sequence[int], survivors: bool) -> list[str]:
        """What starts that many ranks on each host, to which a program and its arguments are appended."""
        places = ",".join(f"{self.address(host)}:{ranks}" for host, ranks in enumerate(ranks_per_host))
        shared = sum(ranks_per_host) > (os.cpu_count() or 1)  # cores, by ranks that wait and ranks that work
        return [
            *self.inside(0),
            *(mpirun(), "-np", str(sum(ranks_per_host)), "--host", places),
            *("--mca", "plm_rsh_agent", str(self.agent), "--mca", "mpi_yield_when_idle", "1" if shared else "0"),
            *("--bind-to", "none", "--oversubscribe", "--allow-run-as-root"),
            *(["--with-ft", "ulfm"] if survivors else []),
        ]

    def _link(self, host: int) -> str:
        """The end of the host's link that lies in this namespace; what the host sends, this end receives."""
        return f"{self.prefix}v{host + 1}"


def limit_links(on: Hosts, gbit_per_second: float) -> None:
    """Lets every host send no faster."""
    rate = f"{gbit_per_second}gbit"
    for host in range(on.count):
        command = ["ip", "netns", "exec", on.name(host), "tc", "qdisc", "add", "dev", "e0", "root"]
        subprocess.run([*command, "tbf", "rate", rate, "burst", _BURST, "latency", _LONGEST_WAIT], check=True)


@contextmanager
def hosts(count: int, *, for_mpirun: bool = True) -> Iterator[Hosts]:
    """Makes hosts and takes them down again, whatever happens in between.

    A signal that would end this process ends it as soon as they are down; until then it is a KeyboardInterrupt.

    Skips the test, with the reason, on a machine where this is not possible; see `REQUIRED_VARIABLE`.

    Args:
        count: how many.
        for_mpirun: whether `run_on_hosts` shall run there, which is written for Open MPI.
    """
    reason = why_there_are_no_hosts(for_mpirun=for_mpirun)
    if reason:
        if os.environ.get(REQUIRED_VARIABLE) == "1":
            pytest.fail(f"{REQUIRED_VARIABLE}=1, but no hosts can be made here: {reason}")
        pytest.skip(f"no hosts can be made here: {reason}; as root, with iproute2 installed: make test")
    with _interrupted_by_signals(), tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        prefix = f"h{uuid.uuid4().hex[:7]}"  # with what follows it, a device's name may have 15 characters
        agent = Path(folder, "agent")
        agent.write_text(_AGENT.format(prefix=prefix))
        agent.chmod(0o755)
        made = Hosts(prefix, count, agent)
        try:
            _make(made)
            yield made
        finally:
            try:
                let_idle_ranks_leave(str(agent))
            finally:
                with _without_signals():
                    _remove(made)


def run_on_hosts(
    function: Callable[..., Any],
    on: Hosts,
    ranks_per_host: Sequence[int],
    *,
    args: tuple[Any, ...] = (),
    timeout: float = 300,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """As `run_ranks`, with `ranks_per_host[i]` ranks on host i; ranks are numbered host by host."""
    command = on.command(ranks_per_host, survivors=False)
    return run_ranks(function, sum(ranks_per_host), args=args, timeout=timeout, env=env, command=command)


def run_on_hosts_to_their_ends(
    function: Callable[..., Any],
    on: Hosts,
    ranks_per_host: Sequence[int],
    *,
    args: tuple[Any, ...] = (),
    timeout: float = 300,
    env: Mapping[str, str] | None = None,
    survivors: bool = True,
) -> list[Outcome]:
    """As `run_ranks_to_their_ends`, on hosts.

    Args:
        survivors: whether MPI lets ranks go on when another one dies; otherwise it ends the job.
    """
    command = on.command(ranks_per_host, survivors)
    return run_ranks_to_their_ends(function, sum(ranks_per_host), args=args, timeout=timeout, env=env, command=command)


def why_there_are_no_hosts(*, for_mpirun: bool = True) -> str:
    """What is missing on this machine; nothing where hosts can be made."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    missing = [program for program in ("ip", "unshare", "hostname") if shutil.which(program) is None]
    if missing:
        return f"there is no {' and no '.join(missing)}; install iproute2, util-linux and hostname"
    if for_mpirun and not is_open_mpi():
        return "this is not Open MPI, whose mpirun takes an agent in place of ssh"
    probe = f"probe{uuid.uuid4().hex[:7]}"
    with _without_signals():
        tried = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, timeout=_COMMAND_SECONDS)
        if tried.returncode != 0:
            return f"network namespaces are refused: {tried.stderr.strip()}"
        _ip("netns", "delete", probe)
    return ""


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    caught: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        caught.append(number)
        raise KeyboardInterrupt

    in_main_thread = threading.current_thread() is threading.main_thread()  # elsewhere Python sets no handlers
    ending = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if in_main_thread and signal.getsignal(number) is signal.SIG_DFL
    ]
    for number in ending:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in ending:
            signal.signal(number, signal.SIG_DFL)
        for number in caught:
            signal.raise_signal(number)


@contextmanager
def _without_signals() -> Iterator[None]:
    """What ends a process comes afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _make(made: Hosts) -> None:
    bridge = f"{made.prefix}br"
    _ip("link", "add", bridge, "type", "bridge")
    _ip("link", "set", bridge, "up")
    for host in range(made.count):
        name, link = made.name(host), made._link(host)
        _ip("netns", "add", name)
        _ip("link", "add", link, "type", "veth", "peer", "name", "e0", "netns", name)
        _ip("link", "set", link, "master", bridge, "up")
        _ip("-n", name, "address", "add", f"{made.address(host)}/24", "dev", "e0")
        _ip("-n", name, "link", "set", "e0", "up")
        _ip("-n", name, "link", "set", "lo", "up")


def _remove(made: Hosts) -> None:
    """Removes what there is: `_make` may have come only so far. A link goes with the namespace of its other end."""
    for host in range(made.count):
        _ip("link", "delete", made._link(host), check=False)
        _ip("netns", "delete", made.name(host), check=False)
    _ip("link", "delete", f"{made.prefix}br", check=False)


def _ip(*arguments: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=_COMMAND_SECONDS)
    if check and done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
