"""Agents on several hosts, and ranks that they start there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.hosts import Hosts, hosts
from support.sources import ROOT

SECRET = {"HOROVODISH_AGENT_SECRET": "of the test"}
CODE = """
import socket, numpy, horovodish as hvd
hvd.init()
print(hvd.rank(), hvd.local_size(), socket.gethostname(), hvd.allreduce(numpy.ones(1), op=hvd.Sum))
"""


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Hosts]:
    with hosts(2) as made:
        yield made


ELASTIC = """
import sys, time, pathlib, numpy, horovodish as hvd
hvd.init()
done = pathlib.Path(sys.argv[1])

@hvd.elastic.run
def train(state):
    while True:
        ends = hvd.allreduce(numpy.array([float(done.exists())]), op=hvd.Max, name="ends")[0]
        state.step += 1
        print(f"{hvd.size()} ranks on {hvd.cross_size()} hosts", flush=True)
        if ends:
            return
        state.commit()
        time.sleep(0.05)

train(hvd.elastic.ObjectState(step=0))
"""


FUNCTION = """
import horovodish as hvd

def train():
    import socket
    hvd.init()
    return hvd.rank(), socket.gethostname()

print(hvd.run(train, num_proc=2, hosts={places!r}, launch_agent={agent!r}))
"""


def started(on: Hosts, host: int, *arguments: str) -> subprocess.Popen[str]:
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin"
    environ = {"PYTHONPATH": str(ROOT), "PATH": path, **SECRET}  # and no HOME, as in a container
    pipe = subprocess.PIPE
    command = [*on.inside(host), sys.executable, "-m", "horovodish.launcher", *arguments]
    return subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe, text=True)


def test_ranks_on_both_hosts(two_hosts: Hosts) -> None:
    job = started(two_hosts, 0, "run", "--agents", "3", sys.executable, "-c", CODE)
    assert job.stderr is not None
    address = re.search("--join (.*)", job.stderr.readline())
    assert address
    agents = [started(two_hosts, host, "agent", "--join", address[1], "--slots", "1") for host in (0, 1, 1)]
    try:
        out, err = job.communicate(timeout=60)
        assert job.returncode == 0, err
        first, second = two_hosts.name(0), two_hosts.name(1)
        assert sorted(out.splitlines()) == [f"0 1 {first} [3.]", f"1 2 {second} [3.]", f"2 2 {second} [3.]"]
        assert [agent.wait(20) for agent in agents] == [0, 0, 0]
    finally:
        for process in (job, *agents):
            process.send_signal(signal.SIGTERM)
            process.communicate()


def test_a_function_needs_no_folder_that_hosts_share(two_hosts: Hosts, tmp_path: Path) -> None:
    script = tmp_path / "call.py"
    places = ",".join(f"{two_hosts.address(host)}:1" for host in (0, 1))
    script.write_text(FUNCTION.format(places=places, agent=str(two_hosts.agent)))
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(
        [*two_hosts.inside(0), sys.executable, str(script)], env=environ, capture_output=True, text=True, timeout=100
    )
    assert found.stdout == f"{[(0, two_hosts.name(0)), (1, two_hosts.name(1))]}\n", found.stderr


def test_an_elastic_job_goes_on_without_an_agent_and_with_a_new_one(two_hosts: Hosts, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ELASTIC)
    command = [sys.executable, str(script), str(tmp_path / "done")]
    job = started(two_hosts, 0, "run", "--agents", "2", "--min-np", "1", "--max-np", "2", *command)
    assert job.stdout is not None and job.stderr is not None
    address = re.search("--join (.*)", job.stderr.readline())
    assert address
    joins = ("agent", "--join", address[1], "--slots", "1")
    agents = [started(two_hosts, host, *joins) for host in (0, 1)]
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.extend(job.stderr or ()))
    thread.start()
    try:
        lines = iter(job.stdout.readline, "")
        assert next(line for line in lines if line.startswith("2 ranks on 2"))
        agents[1].terminate()
        assert next((line for line in lines if line.startswith("1 ranks on 1")), ""), said
        agents.append(started(two_hosts, 1, *joins))
        assert next((line for line in lines if line.startswith("2 ranks on 2")), ""), said
        (tmp_path / "done").touch()
        assert [*lines][-1] == "2 ranks on 2 hosts\n"
        assert job.wait(60) == 0, said
        assert [agent.wait(20) for agent in agents] == [0, 1, 0]
    finally:
        for process in (job, *agents):
            process.send_signal(signal.SIGTERM)
            process.wait()
        thread.join()
    text = "".join(said)
    assert f"rank 1 on {two_hosts.name(1)} was lost with its agent: it got SIGTERM; 1 left" in text, text
    assert "continuing with 1 rank after" in text and "ended after" in text, text


def test_an_agent_is_killed_before_its_ranks_have_begun(two_hosts: Hosts, tmp_path: Path) -> None:
    slow = "import time\nprint('imports', flush=True)\ntime.sleep(3)\n"
    command = [sys.executable, "-c", slow + ELASTIC, str(tmp_path)]  # which exists, so training is over in a step
    job = started(two_hosts, 0, "run", "--agents", "2", "--min-np", "1", *command)
    assert job.stdout is not None and job.stderr is not None
    address = re.search("--join (.*)", job.stderr.readline())
    assert address
    agents = [started(two_hosts, host, "agent", "--join", address[1], "--slots", "1") for host in (0, 1)]
    try:
        assert job.stdout.readline() == "imports\n"
        agents[1].kill()
        out, err = job.communicate(timeout=60)
        assert job.returncode == 0 and out.splitlines()[-1] == "1 ranks on 1 hosts", err
        assert "continuing with 1 rank after" in err, err
    finally:
        for process in (job, *agents):
            process.send_signal(signal.SIGTERM)
            process.communicate()


def test_two_hosts_on_one_machine_as_the_guide_makes_them(two_hosts: Hosts, tmp_path: Path) -> None:
    (commands,) = re.findall(r"```sh\n(.*?)```", Path(ROOT, "docs/agents.md").read_text(), re.DOTALL)
    Path(tmp_path, "train.py").write_text(CODE)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    try:
        run = subprocess.run(
            ["sh", "-c", commands], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
    finally:
        left = [f"ip netns del host{n} 2>/dev/null && echo host{n}" for n in (1, 2)]
        left.append("ip link del hosts 2>/dev/null && echo hosts")
        found = subprocess.run(["sh", "-c", "; ".join(left)], capture_output=True, text=True)
    assert sorted(run.stdout.splitlines()) == ["0 1 host1 [2.]", "1 1 host2 [2.]"], run.stderr
    assert found.stdout == "", "the commands leave nothing behind"
