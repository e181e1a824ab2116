"""Commands with mistakes, and what their last lines say. No ranks start, so `make test` runs every case."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = str(Path(__file__).parent / "mistakes" / "each.py")
WITHIN_SECONDS = 280
COMMANDS = {
    "run -np 2 python trian.py": "there is no script trian.py",
    "run -np 2 trian.py": "there is no script trian.py; a script is started with python trian.py",
    "run -np 2 {script}": "is not executable: start it with python {script}",
    "run -np 2 pyhton {script}": "pyhton: command not found",
    "run python {script}": "-np is missing, the number of ranks, such as: horovodish run -np 2 python train.py",
    "run -np 2": "COMMAND is missing, such as: horovodish run -np 2 python train.py",
    "-np 2 python {script}": "-np comes after a command: horovodish run -np ...",
    "run -np two python {script}": "argument -np/--num-proc: 'two' is not a number of ranks",
    "run -np 4 -H localhost:2 python {script}": "--hosts has 2 slots on 1 host. Name more hosts or slots",
    "run -np 2 -H localhost:1 b:1 python {script}": "hosts are separated by commas, without spaces: --hosts ",
    "run -np 2 --hostfile none.txt python {script}": "hostfile none.txt cannot be read: No such file or directory",
    "run --nproc_per_node 2 {script}": "there is no flag --nproc_per_node; did you mean -np, the number of all",
    "run -np 2 --gpus 2 python {script}": "there is no flag --gpus; did you mean -np? Each rank has one GPU",
    "run -np 2 --hosts python {script}": "--hosts has taken python for its value: give it one before python {script}",
    "merge-traces --bogus": "there is no flag --bogus",
    "run -np 2 --elastic python {script}": "there is no flag --elastic; did you mean --min-np, the smallest number",
    "run -np 2 -x A python {script}": "there is no flag -x; ranks get all of your environment without it",
    "run -np 2 --fusion-treshold-mb 3 a": "there is no flag --fusion-treshold-mb; did you mean --fusion-threshold-mb?",
    "run -np 2 --timeline-filename /no/t.json a": "--timeline-filename /no/t.json: there is no folder /no",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_of_commands(launch: Callable[..., Any], command: str) -> None:
    job = launch(*command.format(script=SCRIPT).split())
    assert job.finish(within=WITHIN_SECONDS) != 0
    assert any(COMMANDS[command].format(script=SCRIPT) in line for line in job.stderr.lines[-2:]), job.stderr.lines
