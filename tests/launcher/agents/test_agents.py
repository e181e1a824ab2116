"""Ranks on the hosts of agents, which need no ssh."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from horovodish.errors import LaunchError, SettingError
from horovodish.launcher import run as launcher_run
from horovodish.launcher.agents import program
from horovodish.launcher.agents.agent import key_of, last_line, run_agent, written
from horovodish.launcher.agents.meeting import Meeting, hosts_of_meeting, on_agents
from horovodish.launcher.hosts.addresses import addresses
from horovodish.launcher.options import LaunchOptions
from horovodish.launcher.supervisor.supervisor import describe_host
from horovodish.launcher.supervisor.tcp_end import NotAdmittedError, call, dial
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
    assert cluster.finish() == 128 + signal.SIGKILL
    assert "signal" not in "\n".join(cluster.job.stderr.lines), "the launcher got none"
    why = "it got SIGTERM" if number == signal.SIGTERM else "its process was killed, or its host cannot be reached"
    assert re.fullmatch(f"horovodish: the agent on .* has gone: {why}", cluster.job.stderr.lines[-1])


def test_a_signal_to_the_launcher_is_no_loss_of_an_agent(cluster: Cluster) -> None:
    cluster.run(slots=[1], code="print('ready', flush=True)\nsignal.pause()")
    cluster.job.stdout.wait_for("ready", 1)
    cluster.job.process.terminate()
    assert cluster.finish() == 128 + signal.SIGTERM
    assert cluster.job.stderr.lines[-1] == "horovodish: the job was ended by signal 15 (SIGTERM)"


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


def test_an_agent_in_a_process_with_many_open_files() -> None:
    """Ray's and Spark's processes have many. select() takes no file from number 1024 on."""
    with contextlib.ExitStack() as opened:
        for _ in range(1024):
            opened.enter_context(open(os.devnull))
        with Meeting(["127.0.0.1"]) as meeting:
            agent = call(meeting.contact)
            agent.send(f"agent 0 1 - {describe_host()}")
            wait_until(lambda: len(meeting._agents) == 1)


def test_who_asks_waits_while_no_more_files_can_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    may = threading.Event()
    accept = socket.socket.accept

    def accepts_later(listener: socket.socket) -> Any:
        if not may.is_set():
            may.set()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(listener)

    with Meeting(["127.0.0.1"]) as meeting, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asker:
        monkeypatch.setattr(socket.socket, "accept", accepts_later)
        asker.settimeout(60)
        asker.connect("\0" + meeting.name)
        asker.send(b"hosts")
        assert asker.recv(100) == b"hosts "


def test_an_agent_that_is_lost_before_there_is_a_job(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
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

    runs = launcher_run.run

    def begins(options: LaunchOptions, environ: Mapping[str, str]) -> int:
        agents[0]._connection.close()
        return runs(options, environ)

    monkeypatch.setattr(launcher_run, "run", begins)
    threading.Thread(target=joins, daemon=True).start()
    options = LaunchOptions(["true"], agents=1, agent_port=port)
    assert launcher_run._run_on_agents(options, {**os.environ, **SECRET}) == 128 + signal.SIGKILL
    why = "its process was killed, or its host cannot be reached"
    assert re.fullmatch(f"horovodish: the agent on .* has gone: {why}", capfd.readouterr().err.splitlines()[-1])


def test_all_agents_are_lost_before_there_is_a_job() -> None:
    with Meeting(["127.0.0.1"]) as meeting:
        agent = call(meeting.contact)
        agent.send(f"agent 0 1 - {describe_host()}")
        meeting.gather(1, time.monotonic() + 60, lambda _: None, lambda: "")
        agent._connection.close()
        wait_until(lambda: meeting.allocation() is None)
        with pytest.raises(LaunchError, match=r"the agent on .* has gone: its process was killed"):
            on_agents(LaunchOptions(["true"]), meeting)
        assert on_agents(LaunchOptions(["true"], min_np=1), meeting).allocation is None  # it waits for others


def test_an_agent_with_another_secret(launch: Callable[..., Any]) -> None:
    job = launch("run", "--agents", "1", "python", "x.py", env=SECRET)
    wait_until(lambda: job.stderr.lines)
    at = re.sub(".* --join ", "", job.stderr.lines[0])
    agent = launch("agent", "--join", at, env={"HOROVODISH_AGENT_SECRET": "another"})
    wait_until(lambda: len(job.stderr.lines) > 1 and agent.stderr.lines)
    assert re.fullmatch(
        r"horovodish: somebody at \S+ may not join: an agent needs the same HOROVODISH_AGENT_SECRET as the launcher",
        job.stderr.lines[1],
    )
    assert re.match(r"horovodish: the agent cannot join yet: port .*: somebody else answers, or", agent.stderr.lines[0])
    job.process.kill()
    job.finish()
    agent.finish(ENDS_WITHIN_SECONDS)
    assert agent.process.returncode == 1
    assert agent.stderr.lines[1:] == ["horovodish: the agent ends: the launcher is gone, and did not let it in"]
    assert len(set(job.stderr.lines)) == len(job.stderr.lines), "one line for each address"


def test_who_does_not_know_the_secret_is_told_of_a_few_times() -> None:
    refused: list[str] = []
    with Meeting(["127.0.0.1"]) as meeting:
        meeting.when_refused = refused.append
        _, port, address = meeting.contact.split()
        for _ in range(3):
            with pytest.raises(NotAdmittedError):
                dial(f"{'0' * 64} {port} {address}")
        wait_until(lambda: refused)
        for number in range(99):
            meeting._refuse(f"10.0.0.{number}")
    assert refused == ["127.0.0.1", "10.0.0.0", "10.0.0.1", "10.0.0.2"]


def test_an_agent_joins_at_an_ipv6_address(launch: Callable[..., Any]) -> None:
    with Meeting(["::1", "127.0.0.1"], key_of(SECRET["HOROVODISH_AGENT_SECRET"])) as meeting:
        _, port, *own = meeting.contact.split()
        assert written(own) == "[::1],127.0.0.1"
        agents = [launch("agent", "--join", f"{at}:{port}", env=SECRET) for at in ("[::1]", written(own))]
        meeting.gather(2, time.monotonic() + 60, lambda _: None, lambda: "")
    for agent in agents:
        agent.finish(ENDS_WITHIN_SECONDS)
        assert (agent.process.returncode, agent.stderr.lines) == (0, [])


def test_the_line_of_what_is_written_that_names_the_error() -> None:
    missing = "ModuleNotFoundError: No module named 'horovodish'"
    for said in (
        f"Traceback (most recent call last):\n  File ...\n{missing}\n",
        f": SparkException: Traceback ...\n{missing}\n\n\tat Error.java:1\nCaused by: Exception: x\n\t... 20 more",
    ):
        assert last_line(said) == missing
    lost = 'SparkException: Lost task 0.0: java.io.IOException: Cannot run program "python"'
    assert last_line(f": {lost}\n\tat A.java:1\nCaused by: java.io.IOException: error=2\n\t... 20 more") == lost
    assert last_line("it was killed\n") == "it was killed"
    assert last_line("") == "without a word"


def test_a_name_that_is_not_known_hides_no_address() -> None:
    with Meeting(["127.0.0.1"]) as meeting:
        secret, port, address = meeting.contact.split()
        dial(f"{secret} {port} unknown.invalid {'x' * 64} {address}").close()
        with pytest.raises(OSError, match=rf"port {port} of unknown\.invalid: .*, {'x' * 64}: .*too long"):
            dial(f"{secret} {port} unknown.invalid {'x' * 64}")


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
        joins = (
            "import sys; from horovodish.launcher.agents.agent import Agent, call; Agent(call(sys.argv[1])).run(0, 1)"
        )
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


def test_an_agent_that_has_joined_and_ends_by_itself_is_started_again() -> None:
    ends: list[str] = []
    with Meeting(["127.0.0.1"]) as meeting:
        runs = threading.Thread(target=lambda: ends.append(run_agent(meeting.contact, 0, starts_again=True)))
        runs.start()
        for losses, number in enumerate((signal.SIGTERM, signal.SIGKILL), 1):
            wait_until(lambda: len(meeting._agents) == 1)
            (agent,) = meeting._agents.values()
            os.kill(agent.host.process, number)
            wait_until(lambda losses=losses: len(meeting.lost) == losses)
        wait_until(lambda: len(meeting._agents) == 1)
    runs.join()
    assert ends == [""]


def test_an_agent_that_cannot_join_is_not_started_again() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        contact = f"{'0' * 64} {nobody.getsockname()[1]} 127.0.0.1"
        assert "cannot reach the launcher" in run_agent(contact, 0, starts_again=True)


def test_an_agent_of_another_version_is_sent_away() -> None:
    with Meeting(["127.0.0.1"]) as meeting:
        for words in ("of a later version", f"0 1000000 - {describe_host()}"):
            stranger = call(meeting.contact)
            stranger.send(f"agent {words}")
            wait_until(lambda it=stranger: not (it.serve(dict.fromkeys(it.interests(), 1)) or it.is_open))
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
        (["agent", "--join", "[::1]"], "--join [::1]: it is written as ADDRESS:PORT"),
        (["agent", "--join", "::1:7700"], "--join ::1:7700: it is written as ADDRESS:PORT, with an IPv6 address in"),
        (["agent", "--join", "a:1", "--slots", "1000000"], "--slots: a host can have 4096 ranks at most"),
        (["agent", "--join", "a:1"], "HOROVODISH_AGENT_SECRET is missing: the launcher prints it"),
    ],
)
def test_mistakes(launch: Callable[..., Any], arguments: list[str], message: str) -> None:
    job = launch(*arguments)
    assert job.finish() == 2
    assert message in job.stderr.lines[-1]
