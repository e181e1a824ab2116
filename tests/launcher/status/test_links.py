"""How many bytes ranks have sent, against what the operations must send."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horovodish.launcher.status.answers import RankStatus
from horovodish.launcher.status.jobs import JobStatus
from horovodish.launcher.status.links import link_rates, sent_by
from horovodish.launcher.status.watch import links
from support.processes import wait_until
from support.status import asked

BYTES = 12_000_000
# What 3 ranks send in all, in parts of a tensor: to other hosts if each rank is one, and within one host.
OPERATIONS = {
    "hvd.allreduce(x, name='x')": (4, 3),
    "hvd.allreduce(x, name='int8', compression=hvd.Compression.int8)": (1, 3),
    "hvd.allreduce(x, name='adasum', op=hvd.Adasum)": (4, 7),
    "hvd.reducescatter(x, name='x')": (2, 2),
    "hvd.broadcast(x, 1, name='x')": (2, 1),
    "hvd.allgather(x, name='x')": (6, 3),
    "hvd.alltoall(x, name='x')": (2, 3),
    "hvd.allreduce(x, name='pair', process_set=pair) if rank else None": (2, 2),
    "move(ARRAYS, x, 3 - rank, 5, name='x').wait() if rank else None": (1, 1),
}
SCRIPT = f"""
from horovodish.collectives import transfers
from horovodish.collectives.array_adapter import ARRAYS
pair = hvd.ProcessSet([1, 2])
hvd.init(process_sets=[pair])
x = np.ones({BYTES // 4}, np.float32)
move = transfers.send if rank == 1 else transfers.receive
for operation in {list(OPERATIONS)}:
    hvd.barrier()
    basics.engine().begin_step()
    while not os.path.exists(f"{{sys.argv[0]}}.{{basics.engine().steps()}}"): time.sleep(0.01)
    exec(operation)
hvd.barrier()
basics.engine().begin_step()
time.sleep(1000)
"""


@pytest.mark.parametrize("plane", ["mpi_ring", "auto"])
def test_what_operations_send(hang: Callable[..., Any], tmp_path: Path, plane: str) -> None:
    job = hang(SCRIPT, plane=plane)

    def sent(step: int) -> int:
        found: list[JobStatus] = []

        def is_there() -> bool:
            its = asked(job.process.pid)
            found[:] = [its] if its and its.ranks else []
            return bool(found) and all(rank.answers and rank.steps == step for rank in found[0].ranks)

        wait_until(is_there)
        ranks = found[0].ranks
        other = [sum(each.sent_bytes.values()) for each in ranks]
        within = [each.within_bytes or 0 for each in ranks]
        assert sum(other if plane == "auto" else within) == 0
        return sum(within if plane == "auto" else other)

    shares = {}
    before = sent(1)
    for step, operation in enumerate(OPERATIONS, start=1):
        (tmp_path / f"hang_{os.getpid()}.py.{step}").touch()
        now = sent(step + 1)
        shares[operation] = (now - before) / BYTES
        before = now
    place = 0 if plane == "mpi_ring" else 1
    assert shares == {name: pytest.approx(each[place], rel=0.03) for name, each in OPERATIONS.items()}


def test_the_live_table_shows_the_rates_of_links(hang: Callable[..., Any]) -> None:
    pytest.importorskip("rich")
    code = f"begin()\nx = np.ones({BYTES // 4}, np.float32)\nwhile True:\n    hvd.allreduce(x, name='x')\n"
    job = hang(code, plane="mpi_ring")
    wait_until(lambda: (found := asked(job.process.pid)) is not None and any(each.under_way for each in found.ranks))
    command = [sys.executable, "-m", "horovodish.launcher", "status", str(job.process.pid), "--watch"]
    environ = {**os.environ, "TERM": "xterm", "FORCE_COLOR": "1", "COLUMNS": "160"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as watching:
        assert watching.stdout is not None
        while not re.search(r"sent: \S+ -> \S+ [\d.,]+ MB/s", watching.stdout.readline()):
            pass
        watching.kill()


def rank(number: int, host: str, process: int, *lines: str) -> RankStatus:
    its = {
        "rank": number,
        "host": host,
        "process": process,
        "supervisor": 9,
        "phase": "running",
        "phase_seconds": 5.0,
        "state": "S",
    }
    return RankStatus.of({**its, "answer": "\n".join(("engine", *("\t".join(line.split()) for line in lines)))})


def test_rates_are_of_ranks_that_have_answered_twice() -> None:
    before = JobStatus(7, ("a",), at_seconds=10.0, ranks=(
        rank(0, "alpha", 1, "within 5000000", "sent 2 1000000"),
        rank(1, "alpha", 2),
        rank(2, "beta", 3, "within 9000000"),
        rank(3, "beta", 4, "within 9000000", "sent 0 1000000"),
    ))  # fmt: skip
    now = JobStatus(7, ("a",), at_seconds=12.0, ranks=(
        rank(0, "alpha", 1, "within 9000000", "sent 2 21000000"),
        rank(1, "alpha", 2, "within 9000000", "sent 2 21000000"),
        rank(2, "beta", 33, "within 90000000"),
        rank(3, "beta", 4, "within 9000000", "sent 0 3000000"),
    ))  # fmt: skip
    assert link_rates(now, before) == {"alpha -> beta": 10e6, "within alpha": 2e6, "beta -> alpha": 1e6}
    assert links(now, before) == "\nsent: alpha -> beta 10.0 MB/s, within alpha 2.0 MB/s, beta -> alpha 1.0 MB/s"
    assert links(now, now) == ""
    assert sent_by(now.ranks[0], {0: "alpha", 2: "beta"}) == {"within alpha": 9_000_000, "alpha -> beta": 21_000_000}
