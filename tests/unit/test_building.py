"""An installation from source on a machine without a compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.sources import ROOT


@pytest.mark.parametrize("command", [["build_ext"], ["dist_info"]])
def test_a_missing_compiler_is_one_line_at_the_start(command: list[str], tmp_path: Path) -> None:
    """pip makes the metadata first, by `dist_info`, and downloads the frameworks after that."""
    pytest.importorskip("nanobind", reason="nanobind is not installed: make dev")
    build = [sys.executable, "setup.py", "--quiet", *command]
    done = subprocess.run(
        build, cwd=ROOT, env={"PATH": str(tmp_path), "CXX": "g++ -O1"}, capture_output=True, text=True
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: horovodish is compiled when it is installed, and there is no g++: install g++ 12")
