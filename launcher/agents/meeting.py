"""Where agents meet, and where what mpirun runs in place of ssh asks for them.

Agents on one machine are one host, whose slots are added up: MPI's daemon is started there once, by the first of them.
A host gets a name of ours. mpirun would start a daemon of its own where it knows the name for this host's.
"""

import os
import re
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from horovodish.errors import LaunchError, SettingError
from horovodish.launcher.agents import program
from horovodish.launcher.hosts.allocation import (
    MOST_LISTED,
    MOST_RANKS_OF_HOST,
    Allocation,
    Host,
    allocation,
    counted,
    hosts_of,
    listed,
)
from horovodish.launcher.job.launcher_end import Hello, LauncherEnd, TcpLauncherEnd, UnixLauncherEnd
from horovodish.launcher.job.listener import Acceptor, TcpListener, unix_listener
from horovodish.launcher.options import LaunchOptions
from horovodish.launcher.supervisor.supervisor import user_of
from horovodish.launcher.supervisor.tcp_end import LONGEST_MESSAGE

SUFFIX = "-agent"
"""Ends the names of hosts. A name that mpirun takes for this host's would not reach the agent."""
MAINTAIN_SECONDS = 0.5
SOURCE = "the agents"
LOST = "the agent on "
"""Begins the message about an agent that has gone."""


@dataclass(frozen=True)
class AgentHello:
    """The first message of an agent.

    Attributes:
        number: agents are ordered by it.
        slots: for how many ranks it stands.
        gpus: the value of CUDA_VISIBLE_DEVICES there; "-" without it, "," for no GPU.
        host: what a supervisor there would say of the host.
    """

    number: int
    slots: int
    gpus: str
    host: Hello

    @staticmethod
    def of(text: str) -> "AgentHello":
        """Reads what comes after the word `agent`.

        Raises:
            ValueError: the agent is of another version, or has more slots than a host can have.
        """
        number, slots, gpus, rest = text.split(" ", 3)
        if not 0 < int(slots) <= MOST_RANKS_OF_HOST:
            raise ValueError(f"an agent with {slots} slots")
        return AgentHello(int(number), int(slots), gpus, Hello.of(f"{number} {rest} "))


class Meeting:
    """Agents, and a thread that serves them until the end of the context.

    Args:
        addresses: at which agents on other hosts connect to this one.
        secret: that the agents know; empty: a new one.
        port: at which they connect; 0: one that is free.

    Attributes:
        contact: what an agent needs to connect.
        name: of the socket at which `program.py` asks, in the abstract namespace.
        when_lost: called, in the thread, when an agent has gone and the meeting was not over.
        when_refused: called, in the thread, with the address of somebody who does not know the secret; once for each
            address, and for `MOST_LISTED` at most.
    """

    def __init__(self, addresses: Sequence[str], secret: bytes = b"", port: int = 0) -> None:
        self.name = f"horovodish-agents-{secrets.token_hex(8)}"
        self.when_lost: Callable[[], object] = lambda: None
        self.when_refused: Callable[[str], object] = lambda _: None
        self._changed = threading.Condition()
        self._links: set[LauncherEnd] = set()  # to agents, and to programs that ask
        self._agents: dict[LauncherEnd, AgentHello] = {}  # guarded by _changed
        self._watchers: set[LauncherEnd] = set()  # who wants to know of losses
        self._refused: set[str] = set()  # addresses
        self._chosen: set[LauncherEnd] | None = None  # guarded by _changed; None: all agents, also later ones
        self._lost: list[tuple[str, str]] = []  # the host's name for mpirun, and the message; guarded by _changed
        self._names: dict[tuple[str, str], str] = {}
        self._reasons: dict[LauncherEnd, str] = {}
        self._runs: dict[int, tuple[LauncherEnd, LauncherEnd]] = {}  # agent and asker
        self._last_run = 0
        self._selector = selectors.DefaultSelector()
        self._listener = TcpListener(
            self._selector, lambda it: self._add(TcpLauncherEnd(it)), addresses, secret, port, self._refuse
        )
        self.contact = self._listener.contact
        self._unix = Acceptor(self._selector, [unix_listener("\0" + self.name)], self._admit_asker)
        self._wakeup, self._waker = os.pipe()
        self._selector.register(self._wakeup, selectors.EVENT_READ, lambda: None)
        self._is_over = False
        self._thread = threading.Thread(target=self._serve, name="horovodish-agents", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Meeting":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_over = True
        os.close(self._waker)
        self._thread.join()
        os.close(self._wakeup)

    @property
    def lost(self) -> list[str]:
        """Which agents have gone, and why."""
        with self._changed:
            return [text for _, text in self._lost]

    def gather(
        self,
        count: int,
        until: float,
        progress: Callable[[str], object],
        stops: Callable[[], str],
        *,
        is_elastic: bool = False,
    ) -> None:
        """Waits for `count` agents.

        Args:
            count: how many.
            until: when to give up, by `time.monotonic()`.
            progress: gets a line that says what it waits for, at every turn.
            stops: returns the reason to stop waiting; empty as long as there is none.
            is_elastic: whether agents that join later are used, too. Otherwise they idle, and losing one is no loss.
                Losing an agent that another one has replaced is no loss either.

        Raises:
            LaunchError: they have not all joined.
        """
        while True:
            with self._changed:
                if len(self._agents) >= count:
                    if not is_elastic:
                        self._chosen = set(self._agents)
                        self._lost.clear()
                    return
                names = {self._names[hello.host.host_id].removesuffix(SUFFIX) for hello in self._agents.values()}
                joined = f"{len(self._agents)} of {counted(count, 'agent')} joined"
            of = f" (from {listed(sorted(names))})" if names else ""
            if problem := stops():
                raise LaunchError(f"only {joined}{of}: {problem}")
            if time.monotonic() >= until:
                raise LaunchError(f"only {joined} in time{of}")
            progress(f"waiting for agents: {joined}{of}")
            with self._changed:
                self._changed.wait(MAINTAIN_SECONDS)

    def allocation(self) -> Allocation | None:
        """The hosts of the agents in the order of their numbers; None if there are none."""
        with self._changed:
            used = [hello for link, hello in self._agents.items() if self._is_used(link)]
            hellos = sorted(used, key=lambda hello: (hello.number, hello.host.host))
            hosts = [Host(self._names[hello.host.host_id], hello.slots) for hello in hellos]
        return allocation(hosts, SOURCE) if hosts else None

    def _is_used(self, agent: LauncherEnd) -> bool:
        return self._chosen is None or agent in self._chosen

    # What the thread does

    def _serve(self) -> None:
        while not self._is_over:
            for key, _ in self._selector.select(MAINTAIN_SECONDS):
                key.data()
            self._listener.maintain()
            self._unix.resume()
        for link in self._links:
            if link in self._agents:
                link.leave()
            link.close()
        self._listener.close()
        self._unix.close()
        self._selector.close()

    def _admit_asker(self, connection: socket.socket, _: object) -> None:
        if user_of(connection) == os.geteuid():
            self._add(UnixLauncherEnd(connection))
        else:
            connection.close()

    def _add(self, link: LauncherEnd) -> None:
        self._links.add(link)
        self._selector.register(link.connection, selectors.EVENT_READ, lambda: self._receive(link))

    def _receive(self, link: LauncherEnd) -> None:
        for word, rest in link.receive():
            try:
                if word and isinstance(link, UnixLauncherEnd):
                    self._take_question(link, word, rest)
                elif word:
                    self._take_news(link, word, rest)
            except ValueError:  # an agent of another version
                word = ""
            if not word:
                self._drop(link)
                return

    def _refuse(self, address: str) -> None:
        if address not in self._refused and len(self._refused) < MOST_LISTED:
            self._refused.add(address)
            self.when_refused(address)

    def _take_question(self, asker: LauncherEnd, word: str, rest: str) -> None:
        if word == "hosts":
            hosts = self.allocation()
            asker.say("hosts " + "\n".join(f"{host.name}:{host.slots}" for host in (hosts.hosts if hosts else ())))
        if word == "losses":
            self._watchers.add(asker)
            with self._changed:
                lost = list(self._lost)
            for host, text in lost:
                asker.say(f"lost {host} {text}")
        if word != "start":
            return
        host, _, command = rest.partition(" ")
        with self._changed:
            of_host = [link for link, hello in self._agents.items() if self._names[hello.host.host_id] == host]
            of_host = [link for link in of_host if self._is_used(link)]
            of_host.sort(key=lambda link: self._agents[link].number)
            gpus = [self._agents[link].gpus for link in of_host]
        if not of_host:
            asker.say(f"said horovodish: there is no agent on {host}\n")
            asker.say(f"ended {program.FAILED}")
            return
        given = [each.strip(",") for each in gpus if each != "-"]
        seen = (",".join(filter(None, given)) or ",") if given else "-"
        self._last_run += 1
        self._runs[self._last_run] = of_host[0], asker
        of_host[0].say(f"run {self._last_run} {seen} {command}")

    def _take_news(self, agent: LauncherEnd, word: str, rest: str) -> None:
        if word == "agent":
            hello = AgentHello.of(rest)
            with self._changed:
                self._names.setdefault(hello.host.host_id, self._new_name(hello.host.host))
                self._agents[agent] = hello
                self._changed.notify_all()
        elif word == "leaving":
            self._reasons[agent] = rest
            self._lose(agent)
        elif word in ("said", "ended"):
            run, _, what = rest.partition(" ")
            if int(run) in self._runs:
                self._runs[int(run)][1].say(f"{word} {what}")

    def _new_name(self, host: str) -> str:
        name = re.sub(r"[^A-Za-z0-9-]", "-", host).strip("-") + SUFFIX
        taken = sum(known.startswith(name) for known in self._names.values())
        return f"{name}-{taken + 1}" if taken else name

    def _drop(self, link: LauncherEnd) -> None:
        self._links.remove(link)
        self._watchers.discard(link)
        self._selector.unregister(link.connection)
        self._lose(link)
        for run, (agent, asker) in list(self._runs.items()):
            if link is asker:
                agent.say(f"end {run}")
                del self._runs[run]
            elif link is agent:
                asker.say(f"ended {program.FAILED}")
        link.close()

    def _lose(self, agent: LauncherEnd) -> None:
        with self._changed:
            hello = self._agents.pop(agent, None)
            if hello is None:
                return
            reason = self._reasons.pop(agent, "its process was killed, or its host cannot be reached")
            if not self._is_used(agent):
                return
            lost = self._names[hello.host.host_id], f"{LOST}{hello.host.host} has gone: {reason}"
            self._lost.append(lost)
            self._changed.notify_all()
        for watcher in self._watchers:
            watcher.say(f"lost {' '.join(lost)}")
        self.when_lost()


def on_agents(options: LaunchOptions, meeting: Meeting) -> LaunchOptions:
    """The options of a job that runs on the hosts of the agents that have joined.

    Raises:
        LaunchError: they have all gone, and the job does not wait for others, as an elastic one does.
    """
    hosts = meeting.allocation()
    if hosts is None and not options.is_elastic:
        raise LaunchError(meeting.lost[-1])
    np = options.np if options.np or options.is_elastic or not hosts else hosts.slots
    return replace(options, meeting=meeting.name, allocation=hosts, np=np)


def hosts_of_meeting(name: str) -> Allocation | None:
    """The hosts of the agents that are there now; None if there are none. Any process of this user can ask.

    Args:
        name: of the meeting's socket.

    Raises:
        SettingError: the meeting is over.
    """
    try:
        with program.connected(name) as link:
            link.send(b"hosts")
            text = link.recv(LONGEST_MESSAGE).decode().removeprefix("hosts ")
    except OSError as problem:
        raise SettingError(f"{SOURCE} cannot be asked for: {problem}") from problem
    hosts = hosts_of(text, SOURCE)
    return allocation(hosts, SOURCE) if hosts else None


def watch(name: str) -> LauncherEnd:
    """A link over which a meeting says "lost HOST MESSAGE" for each agent that has gone, also before.

    Args:
        name: of the meeting's socket.

    Raises:
        OSError: the meeting is over.
    """
    link = UnixLauncherEnd(program.connected(name))
    link.say("losses")
    return link


def write_program(folder: Path, meeting: str) -> str:
    """Writes what mpirun calls as `PROGRAM HOST COMMAND`; returns its path.

    Args:
        folder: of the run.
        meeting: the name of the meeting's socket.
    """
    path = folder / "agent"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{program.__file__}" {meeting} "$@"\n')
    path.chmod(0o700)
    return str(path)
