"""The guide "Running jobs": its commands parse, its file is read, its code runs."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horovodish.launcher.config_file import read
from horovodish.launcher.flags import run_parser, status_parser
from support.documents import python_blocks
from support.sources import ROOT

GUIDE = "docs/running-jobs.md"
TEXT = (ROOT / GUIDE).read_text()


@pytest.mark.parametrize("line", re.findall(r"^    .*?horovodish run (.*)$", TEXT, re.MULTILINE))
def test_the_commands_parse(line: str) -> None:
    assert run_parser().parse(shlex.split(line)).command == ["python", "train.py"]


def test_the_flags_exist() -> None:
    mentioned = set(re.findall(r"`(--[a-z-]+)", TEXT)) - {"--shm-size", "--init", "--network"}
    assert len(mentioned) > 10
    assert mentioned <= {*run_parser().flags, *status_parser().flags}


def test_the_config_file(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    path = tmp_path / "run.yaml"
    path.write_text(block)
    assert read(str(path), run_parser()) == {
        "np": 8,
        "fusion_threshold_mb": "32",
        "autotune": True,
        "autotune_log": "autotune.csv",
    }


def test_the_function(start: Callable[..., Any], tmp_path: Path) -> None:
    (block,) = python_blocks(GUIDE)
    script = tmp_path / "script.py"
    script.write_text(f"{block}\nprint(results)\n")
    job = start(sys.executable, str(script))
    assert job.finish() == 0, job.stderr.lines
    assert job.stdout.lines == ["[0.5, 0.5]"]
