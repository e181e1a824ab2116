"""The secret of a run on several hosts, beside a second user who can list all processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from horovodish.launcher.supervisor.supervisor import LAUNCHER_VARIABLE
from support.hosts import hosts
from support.other_user import as_other_user, skip_without_another_user

CODE = "import signal; print('ready', flush=True); signal.pause()"


def variables(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    return dict(each.split("=", 1) for each in text.split("\0") if "=" in each)


def all_that_can_be_seen(pids: list[int]) -> tuple[str, list[str]]:
    """Return the command lines of processes, and the environments that can be read."""
    lines = "".join(Path(f"/proc/{pid}/cmdline").read_text(errors="replace") for pid in pids)
    readable = []
    for pid in pids:
        try:
            readable.append(Path(f"/proc/{pid}/environ").read_text(errors="replace"))
        except PermissionError:
            continue
    return lines, readable


def test_others_do_not_see_it_and_ranks_do_not_have_it(start: Callable[..., Any]) -> None:
    skip_without_another_user()
    with hosts(2, for_mpirun=False) as made:
        places = f"{made.address(0)}:1,{made.address(1)}:1"
        launcher = [*made.inside(0), sys.executable, "-m", "horovodish.launcher", "run", "-np", "2", "-H", places]
        agent = ["--launch-agent", str(made.agent), "--network-interfaces", "e0"]
        job = start(*launcher, *agent, sys.executable, "-c", CODE)
        job.stdout.wait_for("ready", 2)
        pids = job.processes()
        (secret,) = {text.split()[0] for pid in pids if (text := variables(pid).get(LAUNCHER_VARIABLE))}
        lines, readable = as_other_user(lambda: all_that_can_be_seen(pids))
        assert "supervisor" in lines
        assert secret not in lines
        assert readable == []
        ranks = [pid for pid in pids if "HOROVODISH_RUN_DIR" in variables(pid)]
        assert len(ranks) == 2
        assert all(LAUNCHER_VARIABLE not in variables(pid) for pid in ranks)
        job.process.terminate()
        assert job.finish() != 0
