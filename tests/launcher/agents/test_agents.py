"""Ranks on the hosts of agents, which need no ssh."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from horovodish.errors import LaunchError, SettingError
from horovodish.launcher import run as launcher_run
from horovodish.launcher.agents import program
from horovodish.launcher.agents.agent import key_of
from horovodish.launcher.agents.meeting import Meeting, hosts_of_meeting
from horovodish.launcher.hosts.addresses import addresses
from horovodish.launcher.options import LaunchOptions
from horovodish.launcher.supervisor.supervisor import describe_host
from horovodish.launcher.supervisor.tcp_end import call, dial
from support.other_user import as_other_user, skip_without_another_user, uid
from support.processes import wait_until

ENDS_WITHIN_SECONDS = 10
SECRET = {"HOROVODISH_AGENT_SECRET": "of the test"}


class Cluster:
    """A launcher that waits for agents, and agents."""

    def __init__(self, launch: Callable[..., Any]) -> None:
        self._launch = launch
        self.agents: list[Any] = []
        self.job: Any = None

    def run(self, *arguments: str, slots: list[int], code: str, env: list[dict[str, str]] | None = None) -> None:
        flags = ["run", "--agents", str(len(slots)), *arguments]
        self.job = self._launch(*flags, "python", "-c", f"import os, sys, signal\n{code}", env=SECRET)
        address = self.line(r"start .*: horovodish agent --join (.*)")[1]
        for number, each in enumerate(slots):
            own = {**SECRET, **(env[number] if env else {})}
            self.agents.append(self._launch("agent", "--join", address, "--slots", str(each), env=own))

    def line(self, pattern: str) -> re.Match[str]:
        """Waits for a line of the launcher's stderr."""
        ends_at = time.monotonic() + 60
        while not (found := re.search(pattern, "\n".join(self.job.stderr.lines))):
            assert time.monotonic() < ends_at, self.job.stderr.lines
            time.sleep(0.01)
        return found

    def finish(self) -> int:
        """Everything has ended."""
        status = self.job.finish(60)
        for agent in self.agents:
            agent.finish(ENDS_WITHIN_SECONDS)
        return status


@pytest.fixture
def cluster(launch: Callable[..., Any]) -> Iterator[Cluster]:
    return Cluster(launch)


WORLD = """
import horovodish as hvd
hvd.init()
print(hvd.rank(), hvd.local_size(), os.environ.get("CUDA_VISIBLE_DEVICES"), "HOROVODISH_AGENT_SECRET" in os.environ)
"""


def test_agents_on_one_machine_are_one_host(cluster: Cluster) -> None:
    cluster.run(slots=[1, 2], code=WORLD)
    assert cluster.finish() == 0, cluster.job.stderr.lines
    assert sorted(cluster.job.stdout.lines) == [f"{rank} 3 None False" for rank in range(3)]
    assert [agent.process.returncode for agent in cluster.agents] == [0, 0]


def test_ranks_see_the_gpus_of_their_agents(cluster: Cluster) -> None:
    gpus = [{"CUDA_VISIBLE_DEVICES": "5"}, {"CUDA_VISIBLE_DEVICES": "7"}]
    cluster.run("--gpus-per-rank", "1", slots=[1, 1], code="print(os.environ['CUDA_VISIBLE_DEVICES'])", env=gpus)
    assert cluster.finish() == 0, cluster.job.stderr.lines
    assert sorted(cluster.job.stdout.lines) == ["5", "7"]


def test_the_status_of_a_rank_comes_through(cluster: Cluster) -> None:
    cluster.run(slots=[1], code="sys.exit(7)")
    assert cluster.finish() == 7
    assert re.search("rank 0 on .* failed with exit status 7", cluster.job.stderr.lines[-1])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_job_ends_with_an_agent(cluster: Cluster, number: int) -> None:
    cluster.run(slots=[1, 1], code="print('ready', flush=True)\nsignal.pause()")
    cluster.job.stdout.wait_for("ready", 2)
    os.kill(cluster.agents[1].process.pid, number)
    assert cluster.finish() != 0
    why = "it got SIGTERM" if number == signal.SIGTERM else "its process was killed, or its host cannot be reached"
    assert re.fullmatch(f"horovodish: the agent on .* has gone: {why}", cluster.job.stderr.lines[-1])


def test_a_killed_launcher_leaves_nothing_behind(cluster: Cluster) -> None:
    cluster.run(slots=[1, 1], code="print('ready', flush=True)\nsignal.pause()")
    cluster.job.stdout.wait_for("ready", 2)
    cluster.job.process.kill()
    assert cluster.finish() == -signal.SIGKILL
    for agent in cluster.agents:
        assert agent.process.returncode == 1
        assert agent.stderr.lines[-1] == "horovodish: the agent ends: the launcher is gone"


def test_only_the_loss_of_an_agent_that_is_used_counts() -> None:
    with Meeting(["127.0.0.1"]) as meeting:

        def joined(number: int) -> Any:
            agent = call(meeting.contact)
            agent.send(f"agent {number} 1 - {describe_host()}")
            wait_until(lambda: len(meeting._agents) == number + 1)
            return agent

        def leaves(agent: Any) -> None:
            left = len(meeting._agents) - 1
            agent._connection.close()
            wait_until(lambda: len(meeting._agents) == left)

        leaves(joined(0))  # before there are enough
        assert len(meeting.lost) == 1
        used = joined(0)
        meeting.gather(1, time.monotonic() + 60, lambda _: None, lambda: "")
        assert meeting.lost == []
        late = joined(1)
        hosts = meeting.allocation()
        assert hosts is not None and hosts.slots == 1
        leaves(late)
        assert meeting.lost == []
        leaves(used)
        wait_until(lambda: len(meeting.lost) == 1)


def test_an_agent_that_is_lost_before_there_is_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    agents: list[Any] = []

    def joins() -> None:
        at = f"{key_of('of the test').hex()} {port} {' '.join(addresses())}"
        while not agents:
            with contextlib.suppress(OSError):
                agents.append(call(at))
            time.sleep(0.01)
        agents[0].send(f"agent 0 1 - {describe_host()}")

    def begins(*_: object) -> int:
        agents[0]._connection.close()
        time.sleep(60)
        return 0

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(launcher_run, "run", begins)
    threading.Thread(target=joins, daemon=True).start()
    options = LaunchOptions(agents=1, agent_port=port)
    try:
        with pytest.raises(LaunchError, match=r"the agent on .* has gone: its process was killed"):
            launcher_run._run_on_agents(options, SECRET)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_agent_with_another_secret_says_what_it_waits_for(launch: Callable[..., Any]) -> None:
    with Meeting(["127.0.0.1"]) as meeting:
        _, port, address = meeting.contact.split()
        agent = launch("agent", "--join", f"{address}:{port}", env=SECRET)
        wait_until(lambda: agent.stderr.lines)
        problem = f"port {port} of {address}: somebody else answers, or with another secret"
        assert agent.stderr.lines == [f"horovodish: the agent cannot join yet: {problem}; it tries again"]
        agent.process.send_signal(signal.SIGINT)
        agent.finish(ENDS_WITHIN_SECONDS)


def test_agents_that_do_not_come(launch: Callable[..., Any]) -> None:
    job = launch("run", "--agents", "2", "--elastic-timeout", "1", "python", "x.py", env=SECRET)
    assert job.finish() == 1
    assert job.stderr.lines[-1] == "horovodish: only 0 of 2 agents joined in time"


def test_who_does_not_know_the_secret_does_not_join() -> None:
    with Meeting(["127.0.0.1"]) as meeting:
        _, port, address = meeting.contact.split()
        with pytest.raises(OSError, match="somebody else answers"):
            dial(f"{'0' * 64} {port} {address}")
        with pytest.raises(LaunchError, match=r"only 0 of 1 agent joined in time"):
            meeting.gather(1, 0.0, lambda _: None, lambda: "")


def test_a_command_may_write_what_is_no_text(capfd: pytest.CaptureFixture[str]) -> None:
    with Meeting(["127.0.0.1"]) as meeting:
        joins = "import sys; from horovodish.launcher.agents.agent import join; join(sys.argv[1], 0, 1)"
        with subprocess.Popen([sys.executable, "-c", joins, meeting.contact]) as agent:
            try:
                meeting.gather(1, time.monotonic() + 60, lambda _: None, lambda: "")
                hosts = meeting.allocation()
                assert hosts is not None
                writes = r"head -c 30000 /dev/zero | tr '\0' '\377'"
                assert program.main(meeting.name, [hosts.hosts[0].name, writes]) == 0
            finally:
                agent.terminate()
    assert capfd.readouterr().err.count("\ufffd") == 30000


def test_an_agent_of_another_version_is_sent_away() -> None:
    with Meeting(["127.0.0.1"]) as meeting:
        stranger = call(meeting.contact)
        stranger.send("agent of a later version")
        wait_until(lambda: not (stranger.serve(dict.fromkeys(stranger.interests(), 1)) or stranger.is_open))
        agent = call(meeting.contact)
        agent.send(f"agent 0 2 - {describe_host()}")
        meeting.gather(1, time.monotonic() + 60, lambda _: None, lambda: "")
        hosts = meeting.allocation()
        assert hosts is not None and hosts.slots == 2


def test_a_second_user_gets_no_agent() -> None:
    def heard(meeting: str) -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            link.connect("\0" + meeting)
            link.send(b"hosts")
            return link.recv(100)

    with Meeting(["127.0.0.1"]) as meeting:
        assert heard(meeting.name) == b"hosts "
        refused = as_other_user(lambda: heard(meeting.name))
        assert refused == b"" or isinstance(refused, ConnectionError), refused


def test_a_meeting_of_a_second_user_is_not_asked() -> None:
    skip_without_another_user()
    name = f"of-the-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as ours:
        os.seteuid(uid())
        try:
            ours.bind("\0" + name)
            ours.listen()
        finally:
            os.seteuid(0)
        with pytest.raises(SettingError, match=f"the agents cannot be asked for: .* belongs to user {uid()}"):
            hosts_of_meeting(name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--agents", "2", "-H", "a:1", "x"], "--agents names the hosts: leave --hosts out"),
        (["agent", "--join", "nowhere"], "--join nowhere: it is written as ADDRESS:PORT"),
        (["agent", "--join", "a:99999"], "--join a:99999: it is written as ADDRESS:PORT"),
        (["agent", "--join", "a:1"], "HOROVODISH_AGENT_SECRET is missing: it is what the launcher prints"),
    ],
)
def test_mistakes(launch: Callable[..., Any], arguments: list[str], message: str) -> None:
    job = launch(*arguments)
    assert job.finish() == 2
    assert message in job.stderr.lines[-1]
