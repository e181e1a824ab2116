"""`horovodish status` of a job on two hosts, which are network namespaces."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.hosts import Hosts, hosts
from support.processes import wait_until

TESTS = Path(__file__).parents[1]
SCRIPT = """
import os, signal, sys, time
import numpy as np
import horovodish as hvd
hvd.init()
hvd.allreduce(np.zeros(3), name="before")
if hvd.rank() == 2:
    {how}
hvd.allreduce(np.zeros(3), name="layer.weight")
"""


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Hosts]:
    with hosts(2, for_mpirun=False) as made:
        yield made


@contextlib.contextmanager
def running(on: Hosts, how: str, folder: Path) -> Iterator[Callable[..., str]]:
    """Meanwhile a job of two ranks on each host runs, whose rank 2 hangs. Gives what `status` prints."""
    script = folder / "hang.py"
    script.write_text(SCRIPT.format(how=how))
    launcher = [*on.inside(0), sys.executable, "-m", "horovodish.launcher"]
    where = [
        "-H",
        f"{on.address(0)}:2,{on.address(1)}:2",
        "--launch-agent",
        str(on.agent),
        "--network-interfaces",
        "e0",
    ]
    environ = {**os.environ, "OMPI_MCA_mpi_yield_when_idle": "1", "HOROVODISH_STALL_CHECK": "0"}
    command = [*launcher, "run", "-np", "4", *where, sys.executable, str(script)]
    job = subprocess.Popen(command, env=environ)

    def status(*arguments: str) -> str:
        asks = [*launcher, "status", *arguments]
        return subprocess.run(asks, capture_output=True, text=True, timeout=60, check=False).stdout

    try:
        yield status
    finally:
        job.terminate()
        job.wait(60)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (
            "time.sleep(1000)",
            r"rank 2 on {beta} has not called allreduce 'layer.weight': ranks 0-1, 3 have waited for it for \d+ s\. "
            r"Rank 2 has nothing under way; it last submitted 'before', and nothing for \d+ s",
        ),
        (
            "os.kill(os.getpid(), signal.SIGSTOP)",
            r"rank 2 on {beta} is stopped; ranks 0-1, 3 have waited in allreduce 'layer.weight' for \d+ s\. "
            r"kill -CONT \d+ there lets it go on",
        ),
        (
            "os.kill(os.getppid(), signal.SIGSTOP); os.kill(os.getpid(), signal.SIGSTOP)",
            r"rank 2 on {beta} does not answer: the supervisor or the host is stopped; ranks 0-1, 3 have waited in "
            r"allreduce 'layer.weight' for \d+ s\. If it is the supervisor, kill -CONT \d+ there lets it go on",
        ),
    ],
    ids=["sleeps", "is stopped", "with its supervisor"],
)
def test_the_rank_on_the_other_host_is_named(two_hosts: Hosts, how: str, expected: str, tmp_path: Path) -> None:
    """Rank 2 speaks for its host: what rank 3 has called does not reach rank 0 while rank 2 is stopped."""
    pattern = expected.format(beta=re.escape(two_hosts.name(1)))
    with running(two_hosts, how, tmp_path) as status:
        wait_until(lambda: re.match(pattern + "\n", status()) is not None)
        shown = status("--stacks")
        assert re.search(rf"\n3 +{two_hosts.name(1)} +\d+ +\w+ .*waits in allreduce 'layer.weight' for \d+ s\n", shown)
        of_rank_3 = shown.partition("stacks of rank 3 ")[2]
        assert "in <module>" in of_rank_3
        for process in re.findall(r"kill -CONT (\d+) there", shown):
            os.kill(int(process), signal.SIGCONT)
