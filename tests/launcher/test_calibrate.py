"""`horovodish predict --calibrate CLUSTER.yaml`."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horovodish.launcher.cli import main
from horovodish.predictions.cluster import read_cluster

PREDICTED = Path(__file__).parents[2] / "benchmarks" / "predicted.py"


def test_ranks_measure_the_cluster(launch: Callable[..., Any], tmp_path: Path) -> None:
    output = tmp_path / "cluster.yaml"
    job = launch("predict", "--calibrate", str(output), "-np", "2")
    assert job.finish() == 0, job.stderr.lines
    assert job.stdout.lines == [
        *output.read_text().splitlines(),
        "One host has no link to measure: add `link:` to the file.",
    ]
    its = read_cluster(output)
    assert its.ranks_per_host == 2 and its.wake > 0 and its.operation > 0 and its.memory > 1e6


def test_a_part_of_the_table_of_predicted_and_measured_steps(start: Callable[..., Any]) -> None:
    model = "4 MB in 1 bucket, 20 ms"
    flags = ["--worlds", "2 ranks", "--models", model, "--strategies", "allreduce", "int8"]
    table = start(sys.executable, str(PREDICTED), *flags)
    assert table.finish() == 0, table.stderr.lines
    rows = [re.match(r"2 ranks +(.*\S) +([\d.]+) ms +([\d.]+) ms +[+-]", line) for line in table.stdout.lines]
    steps = {" ".join(row[1].split()): (float(row[2]), float(row[3])) for row in rows if row}
    assert steps.keys() == {f"{model} allreduce", f"{model} int8"}
    assert all(predicted > 20 and measured > 20 for predicted, measured in steps.values())
    assert table.stdout.lines[-1].startswith("median error ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "--calibrate",
            "--calibrate needs the name of a file first: horovodish predict --calibrate CLUSTER.yaml -np 8",
        ),
        ("--calibrate -np 2", "--calibrate needs the name of a file first"),
        ("--calibrate '' -np 2", "--calibrate needs the name of a file first"),
        ("--calibrate {folder} -np 2", "{folder}: that is a folder; name a file in it"),
        ("--calibrate {folder}/no/c.yaml -np 2", "--calibrate {folder}/no/c.yaml: there is no folder {folder}/no"),
        ("--calibrate=c.yaml -np 2 python x.py", "starts a program of its own: leave out python x.py"),
        ("--calibrate c.yaml -np 2 python x.py", "starts a program of its own: leave out python x.py"),
        ("--calibrate c.yaml --npp 2", "there is no flag --npp; did you mean -np?"),
        ("model.yaml --calibrate c.yaml", "--calibrate comes first: horovodish predict --calibrate CLUSTER.yaml"),
        ("", "the following arguments are required: FILE"),
    ],
)
def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, said: str) -> None:
    assert main(["predict", *shlex.split(arguments.format(folder=tmp_path))]) == 2
    error = capsys.readouterr().err
    assert said.format(folder=tmp_path) in error and error.count("\n") == 1
