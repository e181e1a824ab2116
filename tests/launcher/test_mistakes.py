"""The commonest mistakes, and what their last lines say: who, where, why and what helps."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent / "mistakes"
LAST_LINES = 12
"""How many lines at the end must say it: a traceback, the exception, its remedy and the launcher's verdict."""
WITHIN_SECONDS = 280
FLAGS = {
    "hanging_data_loader": ("--stall-check-warning-time-seconds", "1", "--stall-check-shutdown-time-seconds", "2"),
}
ENDS_WELL = (
    "not_wrapped",
    "jax_not_wrapped",
    "keras_not_wrapped",
    "tensorflow_not_wrapped",
    "no_batch_before_a_join",
    "caught_error_of_a_lost_rank",
)
LONG = (
    "keras_metric_of_rank_0",
    "metric_of_rank_0_at_the_end",
    "jax_metric_of_rank_0",
    "keras_not_wrapped",
    "tensorflow_not_wrapped",
)
"""Others go the same way."""
ALONE = ("alone.py", "alone_torch.py", "alone_jax_keras_tensorflow.py")
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
    "run -np 2 --elastic python {script}": "there is no flag --elastic; did you mean --min-np, the fewest ranks",
    "run -np 2 -x A python {script}": "there is no flag -x; ranks get all of your environment without it",
    "run -np 2 --fusion-treshold-mb 3 a": "there is no flag --fusion-treshold-mb; did you mean --fusion-threshold-mb?",
    "run -np 2 --timeline-filename /no/t.json a": "--timeline-filename /no/t.json: there is no folder /no",
}


def mistakes(script: str) -> dict[str, list[str]]:
    """The patterns that a script's docstrings expect, by the name of the mistake."""
    functions = [node for node in ast.parse((FOLDER / script).read_text()).body if isinstance(node, ast.FunctionDef)]
    docstrings = {function.name: ast.get_docstring(function) for function in functions}
    return {name: text.splitlines() for name, text in docstrings.items() if text}


def missing(patterns: Iterable[str], lines: Iterable[str]) -> list[str]:
    """The patterns that no line has."""
    return [pattern for pattern in patterns if not re.search(pattern, "\n".join(lines), re.MULTILINE)]


def skip_without(*packages: str) -> None:
    """Skips a test where a package is missing. Importing it here would take as long as the job."""
    for package in packages:
        if not importlib.util.find_spec(package):
            pytest.skip(f"{package} is not installed")


@pytest.mark.parametrize("command", COMMANDS)
def test_of_commands(launch: Callable[..., Any], command: str) -> None:
    script = str(FOLDER / "each.py")
    job = launch(*command.format(script=script).split())
    assert job.finish(within=WITHIN_SECONDS) != 0
    assert any(COMMANDS[command].format(script=script) in line for line in job.stderr.lines[-2:]), job.stderr.lines


@pytest.mark.parametrize(
    ("script", "mistake"),
    [
        pytest.param(script, name, marks=pytest.mark.soak if name in LONG else ())
        for script in ALONE
        for name in mistakes(script)
    ],
)
def test_that_end_a_job(launch: Callable[..., Any], script: str, mistake: str) -> None:
    skip_without(*script.removesuffix(".py").split("_")[1:])
    flags = FLAGS.get(mistake, ())
    job = launch(
        "run", "-np", "2", *flags, sys.executable, str(FOLDER / script), mistake, env={"CUDA_VISIBLE_DEVICES": ""}
    )
    status = job.finish(within=WITHIN_SECONDS)
    assert (status == 0) == (mistake in ENDS_WELL), job.stderr.lines
    assert not missing(mistakes(script)[mistake], job.stderr.lines[-LAST_LINES:]), job.stderr.lines


@pytest.mark.parametrize("script", ["together_numpy.py", "together_torch.py", "together_jax_keras_tensorflow.py"])
def test_after_which_ranks_go_on(launch: Callable[..., Any], script: str, tmp_path: Path) -> None:
    skip_without(*script.removesuffix(".py").split("_")[1:])
    environment = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    job = launch(
        "run", "-np", "2", "--output-filename", str(tmp_path), sys.executable, str(FOLDER / script), env=environment
    )
    assert job.finish(within=WITHIN_SECONDS) == 0, job.stderr.lines
    said = (tmp_path / "rank.0" / "stderr").read_text()
    expected = mistakes(script)
    assert re.findall(r"^=== (\w+)$", said, re.MULTILINE) == list(expected)
    # A thread may warn of a mistake when the next one has begun.
    since = {name: said[said.index(f"=== {name}\n") :].splitlines() for name in expected}
    lacking = {name: missing(patterns, since[name]) for name, patterns in expected.items()}
    assert not any(lacking.values()), (lacking, said)
