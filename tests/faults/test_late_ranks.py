"""Ranks that do not come to `init()`: the others say which one is missing."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import horovodish as hvd
from horovodish.launch.environment import launcher_environment
from horovodish.mpi import late_ranks
from support.processes import resume, wait_for_output, wait_until, wait_until_state
from support.ranks import run_ranks

ENV = {"HOROVODISH_STALL_CHECK_WARNING_TIME_SECONDS": "0.5"}


def stop_here() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_before(function: Callable[[Any], None]) -> Callable[[Any], None]:
    def stopping(argument: Any) -> None:
        stop_here()
        function(argument)

    return stopping


def resume_when_reported(pid_file: Path, reporter: int, text: str) -> None:
    wait_until(pid_file.exists)
    pid = int(pid_file.read_text())
    wait_until_state(pid, "T")
    wait_for_output(reporter, text)
    resume(pid)


def start_late(victim: int, folder: Path) -> None:
    launched = launcher_environment()
    assert launched is not None
    own = launched.rank
    pid_file = folder / "pid"
    if own == victim:
        pid_file.with_suffix(".new").write_text(str(os.getpid()))
        pid_file.with_suffix(".new").rename(pid_file)
        late_ranks.roll_call = stop_before(late_ranks.roll_call)
        hvd.init()
    else:
        missing = "rank(s) 1" if victim == 1 else "rank 0"
        text = f"no answer comes from {missing}"
        rescuer = threading.Thread(target=resume_when_reported, args=(pid_file, own, text))
        rescuer.start()
        hvd.init()
        rescuer.join()
    hvd.barrier()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_missing_is_reported(victim: int, tmp_path: Path) -> None:
    run_ranks(start_late, 2, args=(victim, tmp_path), env=ENV, fresh=True)
