"""Jobs on two hosts, which are network namespaces: what ranks get and say, how jobs end, and that nothing is left."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from horovodish.as_horovod import VERSION
from horovodish.launcher.mpirun.reach import BLOCKED
from support.hosts import Hosts, hosts
from support.mpi_command import is_open_mpi
from support.processes import wait_until

ENDS_WITHIN_SECONDS = 30
OTHERS_END_WITHIN_SECONDS = 60
LINES = 5_000
DIGITS = Path(__file__).parents[3] / "examples" / "torch_digits.py"
FOLDERS = ("/tmp", "/dev/shm")

# Takes the place of ssh, as `shell [OPTIONS] ADDRESS COMMAND...`. As with ssh, nothing of the environment goes along,
# except for the mark by which the test finds all processes. `lost` names what the second host does not have.
SHELL = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host={prefix}-${{1##*.}}
[ -e /run/netns/$host ] || {{ echo "ssh: Could not resolve hostname $1: Name or service not known" >&2; exit 255; }}
lost=$(cat {folder}/lost 2>/dev/null)
shift
exec env -i HOME=$HOME PATH=/usr/sbin:/usr/bin:/bin LAUNCHER_TEST=$LAUNCHER_TEST \\
  ip netns exec $host unshare --uts --mount sh -c \\
  "hostname $host; [ -z '$lost' ] || mount --bind /dev/null '$lost'; exec sh -c \\"\\$0\\"" "$*"
"""

PRELUDE = "import os, signal, sys, time\n"
HVD = """import numpy as np
import horovodish as hvd
hvd.init()
rank = hvd.rank()
hvd.allreduce(np.zeros(3))
print("ready")
"""
GOES_ON = "while True:\n    hvd.allreduce(np.zeros(3), name='goes on')\n    time.sleep(0.01)\n"
WAITS = "print('ready')\nsys.stdout.flush()\nif os.fork():\n    signal.pause()\ntime.sleep(100)\n"
"""Two processes for each rank."""


class Place:
    """Two hosts, and the launcher on the first of them."""

    def __init__(self, made: Hosts, folder: Path) -> None:
        self.made = made
        self.folder = folder
        self.shell = folder / "shell"
        self.shell.write_text(SHELL.format(prefix=made.prefix, folder=folder))
        self.shell.chmod(0o755)

    def named(self, *slots: int) -> str:
        return ",".join(f"{self.made.address(host)}:{count}" for host, count in enumerate(slots))

    def processes(self, host: int) -> list[int]:
        pids = os.popen(f"ip netns pids {self.made.name(host)}").read()
        return [int(pid) for pid in pids.split()]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with hosts(2, for_mpirun=False) as made:
        yield Place(made, tmp_path_factory.mktemp("hosts"))


@pytest.fixture
def run(place: Place, start: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """A function that runs Python code, or a command, on 2 ranks of either host; afterwards nothing may be left."""

    def run(code: str | list[str], *flags: str, named: str = "", np: int = 4, **how: Any) -> Any:
        script = tmp_path / "rank.py"
        command = code if isinstance(code, list) else [sys.executable, str(script)]
        if isinstance(code, str):
            script.write_text(PRELUDE + code)
        # Two hosts that are one machine: ranks that spin would keep each other from running.
        env = {"OMPI_MCA_mpi_yield_when_idle": "1", **how.pop("env", {})}
        where = ["-H", named or place.named(2, 2), "--launch-agent", str(place.shell), "--network-interfaces", "e0"]
        launcher = [*place.made.inside(0), sys.executable, "-m", "horovodish.launcher"]
        return start(*launcher, "run", "-np", str(np), *where, *flags, *command, env=env, **how)

    return run


@pytest.fixture
def leaves_nothing(place: Place) -> Iterator[None]:
    before = files(place)
    yield
    wait_until(lambda: place.processes(0) == place.processes(1) == [])  # a shell tidies up
    left = files(place) - before
    ends_at = time.monotonic() + OTHERS_END_WITHIN_SECONDS
    while left and time.monotonic() < ends_at:  # what belongs to another job beside this one will go
        time.sleep(0.1)
        left &= files(place)
    assert left == set()


def files(place: Place) -> set[str]:
    """What jobs on hosts leave in files, as far as the daemon that has made them does not run any more."""
    ours = re.compile(rf"horovodish-[0-9a-f]{{12}}|hvd-[0-9a-f]{{12}}|prted\.(\d+)|sm_segment\.{place.made.prefix}-.*")
    found = [(folder, ours.fullmatch(name)) for folder in FOLDERS for name in os.listdir(folder)]
    return {f"{folder}/{name[0]}" for folder, name in found if name and not (name[1] and is_alive(int(name[1])))}


def is_alive(pid: int) -> bool:
    """Whether it runs. Of a process that was killed, a zombie may stay for a while."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# Opens 1,000 connections to a port, on which it says nothing, tells so and keeps them until its stdin ends.
FLOOD = """
import socket, sys
idle = []
for _ in range(1000):
    idle.append(socket.socket())
    idle[-1].setblocking(False)
    idle[-1].connect_ex((sys.argv[1], int(sys.argv[2])))
print("here", flush=True)
sys.stdin.read()
"""


def listening_port(place: Place, pid: int) -> int:
    """The TCP port of the launcher, once it listens."""
    ends_at = time.monotonic() + ENDS_WITHIN_SECONDS
    while True:
        assert time.monotonic() < ends_at, "the launcher does not listen"
        lines = subprocess.run([*place.made.inside(0), "ss", "-ltnpH"], capture_output=True, text=True).stdout
        found = re.search(rf":(\d+) .*\bpid={pid},", lines)
        if found:
            return int(found[1])


@pytest.mark.soak
def test_idle_connections_to_the_launcher_do_not_disturb_the_job(
    run: Callable[..., Any], place: Place, tmp_path: Path
) -> None:
    flooded, over = tmp_path / "flooded", tmp_path / "over"
    agent = tmp_path / "agent"
    agent.write_text(f'#!/bin/sh\nuntil [ -e {flooded} ]; do sleep 0.05; done\nexec {place.shell} "$@"\n')
    agent.chmod(0o755)
    rank = f"print('ready', flush=True)\nwhile not os.path.exists({str(over)!r}):\n    time.sleep(0.05)\n"
    job = run(rank, "--launch-agent", str(agent))
    resource.prlimit(job.process.pid, resource.RLIMIT_NOFILE, (400, 400))
    port = listening_port(place, job.process.pid)
    many = [*place.made.inside(1), sys.executable, "-c", FLOOD, place.made.address(0), str(port)]
    with subprocess.Popen(many, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as flood:
        assert flood.stdout and flood.stdout.readline() == "here\n"
        flooded.touch()
        job.stdout.wait_for("ready", times=4)
        launcher = psutil.Process(job.process.pid)
        before = sum(launcher.cpu_times()[:2])
        time.sleep(2)  # in which a launcher that spins uses up more than this
        assert sum(launcher.cpu_times()[:2]) - before < 0.5
        over.touch()
        assert job.finish() == 0, job.stderr.lines
        flood.communicate("")


def test_import_horovod_gives_horovodish_on_both_hosts(run: Callable[..., Any]) -> None:
    job = run("import horovod\nprint(horovod.__version__)\n", "--as-horovod")
    assert job.finish() == 0, job.stderr.lines
    assert job.stdout.lines == [VERSION] * 4


@pytest.mark.soak
def test_digits_are_learned(run: Callable[..., Any], leaves_nothing: None) -> None:
    pytest.importorskip("torch")
    job = run([sys.executable, str(DIGITS)], env={"OMP_NUM_THREADS": "1"})
    assert job.finish() == 0, job.stderr.lines
    said = "\n".join(job.stdout.lines)
    accuracy = re.search(r"trained in .* test accuracy (\d\.\d+)", said)
    assert accuracy is not None and float(accuracy[1]) >= 0.97
    assert "all 4 ranks hold bit-identical weights" in said


@pytest.mark.parametrize("first", [0, 1], ids=["rank 0 here", "rank 0 there"])
def test_ranks_find_rank_0_as_torchruns_do(
    run: Callable[..., Any], place: Place, leaves_nothing: None, first: int
) -> None:
    code = """
import socket
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
at = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
print(rank, *(os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")))
if rank == 0:
    with socket.create_server(("", at[1])) as server:
        print("heard of", sorted(int(server.accept()[0].recv(9)) for _ in range(size - 1)))
else:
    for _ in range(300):
        try:
            socket.create_connection(at, 1).send(b"%d" % rank)
            break
        except OSError:
            time.sleep(0.1)
"""
    named = f"{place.made.address(first)}:2,{place.made.address(1 - first)}:2"
    job = run(code, named=named)
    assert job.finish() == 0, job.stderr.lines
    assert sorted(job.stdout.lines) == ["0 0 2 0 2", "1 1 2 0 2", "2 0 2 1 2", "3 1 2 1 2", "heard of [1, 2, 3]"]


def test_nothing_of_what_ranks_write_and_read_is_lost(
    run: Callable[..., Any], place: Place, leaves_nothing: None, tmp_path: Path
) -> None:
    """Rank 0 is on the other host and reads; the last rank fails; each line is written in three pieces.

    Libraries below MPI may write there, too, lines of their own.
    """
    code = f"""
from mpi4py import MPI
rank = MPI.COMM_WORLD.Get_rank()
words = sys.stdin.read()
for number in range({LINES}):
    os.write(1, b"a line "), os.write(1, b"with a number "), os.write(1, b"%d\\n" % number)
place = [os.uname().nodename, len(words), os.environ["ODD"], os.environ["OMP_NUM_THREADS"], os.environ.get("SSH_X")]
os.write(2, repr(place).encode())
MPI.COMM_WORLD.Barrier()
if rank == 3:
    os._exit(7)
signal.pause()
"""
    first, second = place.made.name(0), place.made.name(1)
    named = f"{place.made.address(1)}:2,{place.made.address(0)}:2"
    odd = "a b;c,d=e\nf\"g'$h\\"
    words = "word\n" * 100_000
    flags = ["--prefix-output", "--output-filename", str(tmp_path / "kept")]
    job = run(code, *flags, named=named, stdin=words, env={"ODD": odd, "SSH_X": "of this host"})
    assert job.finish() == 7, job.stderr.lines
    assert job.stderr.lines[-1] == f"horovodish: rank 3 on {first} failed with exit status 7"
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    for rank, host in enumerate([second, second, first, first]):
        lines = [f"a line with a number {number}" for number in range(LINES)]
        shown = [line for line in job.stdout.lines if line.startswith(f"[{rank}] a line ")]
        assert shown == [f"[{rank}] {line}" for line in lines]
        kept = (tmp_path / "kept" / f"rank.{rank}" / "stdout").read_text().splitlines()
        assert [line for line in kept if line.startswith("a line ")] == lines
        here = "of this host" if host == first else None
        place_of_rank = repr([host, len(words) if rank == 0 else 0, odd, threads, here])
        assert f"[{rank}] {place_of_rank}" in job.stderr.lines
        assert (tmp_path / "kept" / f"rank.{rank}" / "stderr").read_text().count(place_of_rank) == 1
    assert "\n".join(job.stdout.lines).count("a line ") == 4 * LINES


def test_a_rank_that_raises_is_quoted_last_and_once(
    run: Callable[..., Any], place: Place, leaves_nothing: None
) -> None:
    job = run(HVD + "if rank == 3:\n    raise ValueError('no such thing')\n" + GOES_ON)
    assert job.finish() == 1
    said = "\n".join(job.stderr.lines)
    host = place.made.name(1)
    assert said.count("Traceback (most recent call last)") == 1
    assert re.search(rf"horovodish: rank 3 on {host} raised:\nTraceback (.|\n)*\nValueError: no such thing\n", said)
    assert job.stderr.lines[-1] == f"horovodish: rank 3 on {host} failed with exit status 1: ValueError: no such thing"


def test_a_host_that_dies(run: Callable[..., Any], place: Place) -> None:
    """What its supervisors had in files stays: a host that dies has no memory left, and its /tmp is not reached."""
    code = "print(os.environ['HOROVODISH_RUN_DIR'])\n" + HVD + GOES_ON
    job = run(code, env={"HOROVODISH_STALL_CHECK_WARNING_TIME_SECONDS": "0"})
    job.stdout.wait_for("ready", 4)
    killed = place.processes(1)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    try:
        assert job.finish(within=ENDS_WITHIN_SECONDS) != 0
    finally:
        runs = {line.rpartition("-")[2] for line in job.stdout.lines if line.startswith("/")}
        ours = {f"sm_segment.{place.made.prefix}-", *(f"prted.{pid}" for pid in killed), *runs}
        for path in files(place):
            if any(mark in path for mark in ours):
                os.system(f"rm -rf {path}")
    host = place.made.name(1)
    assert re.search(rf"ranks? [23](-3)? on {host} (vanished|was killed)", job.stderr.lines[-1]), job.stderr.lines


def test_a_supervisor_that_is_killed_leaves_nothing_on_its_host(
    run: Callable[..., Any], place: Place, leaves_nothing: None
) -> None:
    job = run(HVD + "print('supervisor', rank, os.getppid(), flush=True)\n" + GOES_ON)
    job.stdout.wait_for("ready", 4)
    while not any(line.startswith("supervisor 3 ") for line in job.stdout.lines):
        os.sched_yield()
    os.kill(int(next(line for line in job.stdout.lines if line.startswith("supervisor 3 ")).split()[2]), signal.SIGKILL)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 137
    gone = "rank 3" if is_open_mpi() else "(rank 3|ranks 2-3)"  # MPICH ends what else runs on the host
    vanished = rf"horovodish: {gone} on {place.made.name(1)} vanished: somebody killed (its|their) supervisors?"
    assert re.match(vanished, job.stderr.lines[-1])


def test_a_daemon_that_is_killed_ends_the_job(run: Callable[..., Any], place: Place, leaves_nothing: None) -> None:
    job = run(WAITS)
    job.stdout.wait_for("ready", 4)
    daemon = "prted" if is_open_mpi() else "hydra_pmi_proxy"
    daemons = [pid for pid in place.processes(1) if program(pid) == daemon]
    assert daemons
    for pid in daemons:
        os.kill(pid, signal.SIGKILL)
    assert job.finish(within=ENDS_WITHIN_SECONDS) != 0
    assert place.made.name(1) in job.stderr.lines[-1]


@pytest.mark.soak
def test_a_link_that_is_down_for_good_leaves_nothing_on_the_other_host(
    run: Callable[..., Any], place: Place, leaves_nothing: None
) -> None:
    job = run(WAITS)
    job.stdout.wait_for("ready", 4)
    link = [*place.made.inside(1), "ip", "link", "set", "e0"]
    subprocess.run([*link, "down"], check=True)
    try:
        assert job.finish(within=OTHERS_END_WITHIN_SECONDS) != 0
        ends_at = time.monotonic() + OTHERS_END_WITHIN_SECONDS
        while place.processes(1) and time.monotonic() < ends_at:
            time.sleep(0.1)
    finally:
        subprocess.run([*link, "up"], check=True)


def program(pid: int) -> str:
    return os.path.basename(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_what_ends_the_launcher_ends_every_rank(
    run: Callable[..., Any], place: Place, leaves_nothing: None, number: signal.Signals
) -> None:
    job = run(WAITS)
    job.stdout.wait_for("ready", 4)
    assert len(place.processes(1)) >= 1 + 3 * 2, "the daemon, and per rank supervisor, rank and worker"
    job.process.send_signal(number)
    status = job.finish(within=ENDS_WITHIN_SECONDS)
    assert status == (130 if number == signal.SIGINT else -signal.SIGKILL)
    ends_at = time.monotonic() + ENDS_WITHIN_SECONDS
    while place.processes(1) and time.monotonic() < ends_at:
        os.sched_yield()


def test_arguments_arrive_unchanged_on_each_host(run: Callable[..., Any], place: Place, leaves_nothing: None) -> None:
    words = [":", "-n", "--map-by", "year", "", "a b", "x\ny", os.fsdecode(b"\xff"), "y" * 100_000]
    job = run([sys.executable, "-c", "import sys; print(ascii(sys.argv[1:]))", *words])
    assert job.finish() == 0
    assert job.stdout.lines == [ascii(words)] * 4


def test_a_host_that_does_not_exist(run: Callable[..., Any], place: Place, leaves_nothing: None) -> None:
    job = run(["true"], named=f"{place.made.address(0)}:2,10.78.0.9:2")
    assert job.finish() == 1
    assert job.stderr.lines[-2].startswith("horovodish: only ")
    assert job.stderr.lines[-1] == "horovodish: 10.78.0.9 did not come up: ssh does not know this host name"


def test_a_host_where_the_agent_fails(run: Callable[..., Any], place: Place, tmp_path: Path) -> None:
    """The launcher's own host, which mpirun did not get as far as using, is not blamed."""
    agent = tmp_path / "agent"
    agent.write_text("#!/bin/sh\necho 'no such session' >&2\nexit 3\n")
    agent.chmod(0o755)
    job = run(["true"], "--launch-agent", str(agent))
    assert job.finish() == 1
    told = [line for line in job.stderr.lines if "did not come up" in line]
    reason = f"`agent {place.made.address(1)} true` fails with exit status 3: no such session"
    assert told == [f"horovodish: {place.made.address(1)} did not come up: {reason}"]


@pytest.mark.soak
def test_a_host_that_is_reached_but_cannot_connect_back(
    run: Callable[..., Any], place: Place, leaves_nothing: None
) -> None:
    first = place.made.address(0)
    neighbour = [*place.made.inside(1), "ip", "neighbour"]
    nobody = ["lladdr", "02:00:00:00:00:99", "dev", "e0", "nud", "permanent"]
    subprocess.run([*neighbour, "replace", first, *nobody], check=True)
    try:
        job = run(["true"], "--start-timeout", "4")
        assert job.finish() == 1
    finally:
        subprocess.run([*neighbour, "delete", first, "dev", "e0"], check=True)
    told = [line for line in job.stderr.lines if "did not come up" in line]
    reached = f"`shell {place.made.address(1)} true` works, but MPI's daemon there did not connect back: {BLOCKED}"
    assert told == [f"horovodish: {place.made.address(1)} did not come up: {reached}"]
    assert job.stderr.lines[-2] == "horovodish: only 0 of 4 ranks were started in time"


FUNCTION = """
import horovodish as hvd

def place():
    hvd.init()
    return hvd.rank(), hvd.local_rank(), hvd.cross_rank()

print(hvd.run(place, num_proc=4, hosts={hosts!r}, launch_agent={agent!r}, network_interfaces="e0"))
"""


def test_a_function_that_python_runs_on_both_hosts(
    place: Place, start: Callable[..., Any], leaves_nothing: None
) -> None:
    code = FUNCTION.format(hosts=place.named(2, 2), agent=str(place.shell))
    job = start(*place.made.inside(0), sys.executable, "-c", code, env={"OMPI_MCA_mpi_yield_when_idle": "1"})
    assert job.finish() == 0, job.stderr.lines
    assert "[(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]" in job.stdout.lines  # beside what libraries below MPI say


@pytest.fixture
def lost(place: Place) -> Iterator[Callable[[str], None]]:
    """A function that takes a file from the second host."""
    note = place.folder / "lost"
    yield note.write_text
    note.unlink(missing_ok=True)


def test_a_python_that_one_host_does_not_have(
    run: Callable[..., Any], place: Place, lost: Callable[[str], None], leaves_nothing: None
) -> None:
    lost(str(Path(sys.executable).resolve()))
    job = run(["true"])
    assert job.finish() == 1
    reason = f"horovodish: {place.made.address(1)} did not come up: {sys.executable} cannot be run "
    assert any(line.startswith(reason) for line in job.stderr.lines), "\n".join(job.stderr.lines)


def test_a_command_that_one_host_does_not_have(
    run: Callable[..., Any], place: Place, lost: Callable[[str], None], leaves_nothing: None, tmp_path: Path
) -> None:
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\necho started\n")
    tool.chmod(0o755)
    lost(str(tool))
    job = run([str(tool)])
    assert job.finish() == 127
    assert job.stderr.lines[-2:] == [
        f"horovodish: {tool}: command not found (on {place.made.name(1)})",
        "horovodish: programs and scripts must be at the same paths on every host",
    ]
    assert job.stdout.lines == [], "nothing is started anywhere"


def test_a_script_that_is_on_no_host(run: Callable[..., Any], place: Place, tmp_path: Path) -> None:
    first, second = place.made.name(0), place.made.name(1)
    job = run([sys.executable, "-u", str(tmp_path / "train.py")])
    assert job.finish() == 127
    assert job.stderr.lines[-1] == f"horovodish: there is no script {tmp_path / 'train.py'} (on {first}, {second})"


def test_a_module_that_one_host_does_not_have(run: Callable[..., Any], place: Place) -> None:
    first, second = place.made.name(0), place.made.name(1)
    job = run(f"if os.uname().nodename == {second!r}:\n    import no_such_module\nsignal.pause()\n")
    assert job.finish() == 1
    version = ".".join(map(str, sys.version_info[:3]))
    (line,) = [line for line in job.stderr.lines if "hint: " in line]
    assert line.startswith(f"horovodish: hint: no_such_module is not installed on {second}, or Python is another one")
    assert line.endswith(f"; Python is {version} on {first}, {second}")
