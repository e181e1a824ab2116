"""The guide "Clusters": its flags exist, and its batch script ends in a checkpoint and a requeued job."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from horovodish.launcher.flags import run_parser
from support.documents import python_blocks
from support.sources import ROOT

GUIDE = "docs/clusters.md"
TEXT = (ROOT / GUIDE).read_text()
TRAINING = """
import time
from pathlib import Path
steps = 10**6
def load_checkpoint():
    return 0
def train(step):
    if step == 0:
        print("training", flush=True)
    time.sleep(0.01)
def save_checkpoint(step):
    Path("checkpoint").write_text(str(step))
"""
SCONTROL = '#!/bin/sh\necho "$@" > requeued\n'


def test_the_flags_exist() -> None:
    ours = re.findall(r"horovodish run (.*?)python train\.py", TEXT)
    mentioned = set(re.findall(r"(--[a-z-]+)", " ".join(re.sub(r'".*?"', "", line) for line in ours)))
    assert {"--mpi-args", "--tcp"} <= mentioned <= set(run_parser().flags)


def test_a_signal_that_reaches_a_rank_at_its_end_does_not_change_its_exit_status(
    launch_ranks: Callable[..., Any],
) -> None:
    code = """
import atexit
signal.signal(signal.SIGUSR1, lambda *_: None)
atexit.register(lambda: print(signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN, flush=True))
import horovodish as hvd
hvd.init()
sys.exit(75)
"""
    job = launch_ranks(2, code, mpi=False)
    assert job.finish() == 75
    assert job.stdout.lines == ["True", "True"]


def test_a_signal_ends_in_a_checkpoint_and_a_requeued_job(start: Callable[..., Any], tmp_path: Path) -> None:
    (batch,) = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
    (code,) = python_blocks(GUIDE)
    programs = {"batch": batch, "scontrol": SCONTROL, "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n'}
    programs["horovodish"] = f'#!/bin/sh\nshift\nexec {sys.executable} -m horovodish.launcher run -np 2 "$@"\n'
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train.py").write_text(TRAINING + code)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    job = start("sh", "-c", f"cd {tmp_path} && exec ./batch", env={"PATH": path, "SLURM_JOB_ID": "7"})
    job.stdout.wait_for("training", 2)
    job.process.send_signal(signal.SIGUSR1)
    assert job.finish() == 0, job.stderr.lines
    assert int((tmp_path / "checkpoint").read_text()) > 0
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
