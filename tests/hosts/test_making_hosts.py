"""The tests' own tool: hosts that are gone afterwards, and what it says where it can make none."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support import hosts as tool
from support.hosts import REQUIRED_VARIABLE, Hosts, hosts, run_on_hosts
from support.ranks import RanksFailedError

TWO_HOSTS = Path(__file__).parents[2] / "benchmarks" / "two_hosts.py"


def where_am_i(argument: str) -> tuple[int, str, str, str]:
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank, socket.gethostname(), argument, os.environ["OF_THIS_TEST"]


def the_last_rank_raises() -> None:
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
        raise ValueError("a reason on another host")
    MPI.COMM_WORLD.Barrier()


def left_of(prefix: str) -> list[str]:
    """The namespaces and devices of a run that are still there."""
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    devices = [path.name for path in Path("/sys/class/net").iterdir()]
    return [name for name in [*namespaces, *devices] if name.startswith(prefix)]


def test_results_come_from_ranks_on_their_hosts() -> None:
    with hosts(2) as made:
        assert len(left_of(made.prefix)) == 5  # two namespaces, two links and the bridge
        seen = run_on_hosts(where_am_i, made, [1, 2], args=("an argument",), env={"OF_THIS_TEST": "a value"})
        first, second = made.name(0), made.name(1)
        assert seen == [(rank, host, "an argument", "a value") for rank, host in enumerate([first, second, second])]
    assert left_of(made.prefix) == []


def fail_on_new_hosts(made: list[Hosts]) -> None:
    with hosts(2) as these:
        made.append(these)
        with pytest.raises(RanksFailedError, match=r"rank 1 raised(.|\n)*ValueError: a reason on another host"):
            run_on_hosts(the_last_rank_raises, these, [1, 1])
        raise KeyError("the test fails")


def test_nothing_stays_behind_after_a_failure() -> None:
    made: list[Hosts] = []
    with pytest.raises(KeyError, match="the test fails"):
        fail_on_new_hosts(made)
    assert left_of(made[0].prefix) == []


def test_nothing_stays_behind_when_they_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Hosts] = []
    original = Hosts.address

    def address(self: Hosts, host: int) -> str:
        made.append(self)
        return original(self, host) if host == 0 else "no address"

    monkeypatch.setattr(Hosts, "address", address)
    with pytest.raises(RuntimeError, match=r"ip -n \S+ address add no address"), hosts(2):
        pass
    assert left_of(made[0].prefix) == []


def run_by(script: Path) -> list[str]:
    """The processes that have the script in their command line."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_text(errors="replace"))
        except OSError:  # ended meanwhile
            continue
    return [line for line in lines if str(script) in line]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_nothing_stays_behind_when_a_signal_ends_the_process(number: signal.Signals, tmp_path: Path) -> None:
    reason = tool.why_there_are_no_hosts()
    if reason:
        pytest.skip(f"{reason}; as root, with iproute2 installed: make test")
    script = tmp_path / "waits.py"
    script.write_text("import socket, time\nprint('host', socket.gethostname(), flush=True)\ntime.sleep(600)\n")
    # What was started in the background may ignore signals, and so would its children.
    program = ["env", "--default-signal", sys.executable, str(TWO_HOSTS), "1", str(script)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        greetings = (line.split()[1] for line in process.stdout if line.startswith("host "))
        prefix, _ = (next(greetings).rpartition("-")[0] for _ in range(2))
        assert len(left_of(prefix)) == 5
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == -number
    assert left_of(prefix) == []
    ends_at = time.monotonic() + 30
    while run_by(script) and time.monotonic() < ends_at:  # the daemon on the other host ends its rank by itself
        time.sleep(0.01)
    assert run_by(script) == []


def enter_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool.os, "geteuid", lambda: 1000)
    with hosts(1):
        pass


def test_it_says_why_it_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REQUIRED_VARIABLE, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no hosts can be made here: only root can make network namespaces"):
        enter_without_root(monkeypatch)


def test_a_skip_is_a_failure_where_hosts_are_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUIRED_VARIABLE, "1")
    with pytest.raises(pytest.fail.Exception, match=f"{REQUIRED_VARIABLE}=1, but no hosts can be made here: only root"):
        enter_without_root(monkeypatch)


def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool.os, "geteuid", lambda: 0)
    monkeypatch.setattr(tool.shutil, "which", lambda program: None if program == "ip" else f"/bin/{program}")
    assert tool.why_there_are_no_hosts() == "there is no ip; install iproute2, util-linux and hostname"
