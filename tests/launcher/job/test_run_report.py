"""`horovodish run --report page.html`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TRAINS = """
import numpy as np, time
import horovodish as hvd
from horovodish.runtime import basics
hvd.init()
rank = hvd.rank()
for step in range(20):
    basics.engine().begin_step()
    if rank == 1: time.sleep(0.05)
    hvd.allreduce(np.ones(1000), name="gradient")
"""
SAYS = "horovodish: the report is {page}; its records lie beside it"


def findings(page: Path) -> list[str]:
    return re.findall("<li>(.*?)</li>", page.read_text())


def test_the_page_names_the_slow_rank(launch_ranks: Callable[..., Any], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    (tmp_path / "page.rank-7.records").write_text("of an earlier run")
    (tmp_path / "page.3.rank-0.records").write_text("of an earlier run")
    (tmp_path / "page.2.html").write_text("of another run")
    (tmp_path / "page.2.rank-0.records").write_text("of another run")
    job = launch_ranks(2, TRAINS, "--report", str(page), mpi=False)
    assert job.finish() == 0, job.stderr.lines
    assert job.stderr.lines[-1].startswith(SAYS.format(page=page))
    assert re.match(r"Rank 1 comes [\d.]+ ms late in \d+% of the steps", findings(page)[0])
    assert sorted(path.name for path in tmp_path.glob("page*")) == [
        "page.2.html",
        "page.2.rank-0.records",
        "page.html",
        "page.rank-0.records",
        "page.rank-1.records",
    ]


@pytest.mark.parametrize(("end", "status"), [("raise ValueError('a bug')", 1), ("os.kill(os.getpid(), 9)", 137)])
def test_a_job_that_fails_has_a_page_too(
    launch_ranks: Callable[..., Any], tmp_path: Path, end: str, status: int
) -> None:
    page = tmp_path / "page.html"
    end = f"time.sleep(0.3)\nif rank == 0: {end}\nhvd.allreduce(np.ones(3), name='last')"
    job = launch_ranks(2, TRAINS + end, "--report", str(page), mpi=False)
    assert job.finish() == status, job.stderr.lines
    assert job.stderr.lines[-1].startswith(SAYS.format(page=page))
    text = page.read_text()
    assert ("The records of rank 0 end early" in text) == (status == 137)
    assert bool(re.search("<td>error: allreduce &#x27;last&#x27; failed", text))


def test_without_records_there_is_no_page(launch_ranks: Callable[..., Any], tmp_path: Path) -> None:
    job = launch_ranks(1, "print(1)", "--report", str(tmp_path / "page.html"), mpi=False)
    assert job.finish() == 0
    assert job.stderr.lines[-1].startswith("horovodish: there is no report: no rank on this host has called hvd.init()")
    assert not list(tmp_path.glob("page*"))


@pytest.mark.parametrize(
    ("report", "more", "env", "said"),
    [
        ("none/page.html", [], {}, "there is no folder"),
        (".", [], {}, "the name of a page ends in .html"),
        ("page", [], {}, "the name of a page ends in .html"),
        ("page.html", ["--timeline-filename", "x.json"], {}, "--report and --timeline-filename both record the run"),
        ("page.html", [], {"HOROVOD_TIMELINE": "x.json"}, "--report and HOROVOD_TIMELINE both record the run"),
    ],
)
def test_what_cannot_be_is_said_before_ranks_start(
    launch: Callable[..., Any], tmp_path: Path, report: str, more: list[str], env: dict[str, str], said: str
) -> None:
    job = launch("run", "-np", "1", "--report", str(tmp_path / report), *more, "python", "-c", "print(1)", env=env)
    assert job.finish() == 2
    assert said in job.stderr.lines[-1] and not job.stdout.lines
