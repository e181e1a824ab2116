"""What the tests of Ray and Spark let ranks do."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.orphans import VARIABLE, mark_of_this_process, processes_with

LEFT_WITHIN_SECONDS = 10.0


def world(factor: float) -> tuple[int, int, float]:
    import numpy as np

    import horovodish as hvd

    hvd.init()
    print(f"rank {hvd.rank()} prints", flush=True)
    print("and complains", file=sys.stderr, flush=True)
    return hvd.rank(), hvd.local_size(), factor * float(hvd.allreduce(np.ones(1), op=hvd.Sum)[0])


def raises_on_rank_1() -> None:
    import horovodish as hvd

    hvd.init()
    if hvd.rank() == 1:
        raise KeyError("no such key")
    hvd.barrier()


def waits(folder: str) -> None:
    import horovodish as hvd

    hvd.init()
    Path(folder, f"{hvd.rank()}.ready").write_text(str(os.getpid()))
    signal.pause()


def wait_for_files(folder: Path, count: int) -> None:
    ends_at = time.monotonic() + 60
    while len(list(folder.glob("*.ready"))) < count:
        assert time.monotonic() < ends_at, f"only {list(folder.iterdir())} came"
        time.sleep(0.01)


def ours() -> dict[int, str]:
    """What this process has started, and those have, that belongs to horovodish: launchers, agents, ranks, daemons."""
    found: dict[int, str] = {}
    for pid in processes_with(VARIABLE, mark_of_this_process()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        words = ("horovodish.launcher", "prted", "prterun", "HOROVODISH_SUPERVISOR")
        if pid != os.getpid() and any(word in command for word in words):
            found[pid] = command
    return found


def left_behind() -> Any:
    """What is left of our processes after some seconds at most."""
    ends_at = time.monotonic() + LEFT_WITHIN_SECONDS
    while (found := ours()) and time.monotonic() < ends_at:
        time.sleep(0.05)
    return found


def runs_twenty_times(run: Callable[[float], Any], folder: Path) -> None:
    """Runs `world` on two ranks, 20 times. No process, no temporary file and no open file is left."""

    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    first = 0
    for factor in range(20):
        assert run(factor) == [(0, 2, 2.0 * factor), (1, 2, 2.0 * factor)]
        first = first or open_files()
    assert left_behind() == {}
    assert list(folder.iterdir()) == []
    assert open_files() < first + 19, "one more of each job"


def trains_until(folder: str, done: str) -> tuple[int, int]:
    """Writes down how many ranks there are, step by step."""
    import numpy as np

    import horovodish as hvd

    hvd.init()

    @hvd.elastic.run
    def train(state: Any) -> None:
        while True:
            ends = float(hvd.allreduce(np.array([float(os.path.exists(done))]), op=hvd.Max, name="ends")[0])
            Path(folder, f"{hvd.size()}.size").touch()
            if ends:
                return
            state.step += 1
            state.commit()
            time.sleep(0.05)

    train(hvd.elastic.ObjectState(step=0))
    return hvd.rank(), hvd.size()


def wait_until(true: Any) -> None:
    ends_at = time.monotonic() + 90
    while not true():
        assert time.monotonic() < ends_at
        time.sleep(0.02)
