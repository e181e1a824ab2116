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
    "round_left_open",
    "keras_round_left_open",
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
