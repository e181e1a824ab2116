"""Mistakes in the engine that simulated worlds must find."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from simulation import mutations, replays

from support.sources import CSRC, ROOT

LEFT_OUT = shutil.ignore_patterns(".*", "*.egg-info", "docs", "examples", "benchmarks", "*.whl")


@pytest.mark.soak
@pytest.mark.parametrize("mutation", mutations.OF_ENGINE, ids=lambda mutation: mutation.name)
def test_mistakes_of_the_engine_are_found(mutation: mutations.OfEngine, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=LEFT_OUT, symlinks=True)
    source = copy / CSRC.relative_to(ROOT) / mutation.file
    text = source.read_text()
    assert text.count(mutation.line) == 1, "mend the mutation"
    source.write_text(text.replace(mutation.line, mutation.instead))
    subprocess.run([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=copy, check=True)
    kept = replays.FOLDER / f"{mutation.name.replace(' ', '_')}.json"
    worlds = ["--replay", str(kept)] if kept.exists() else ["--seeds", f"0:{mutations.SEEDS}"]
    simulated = subprocess.run(
        [sys.executable, "tests/simulation/simulate.py", *worlds],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
    )
    assert simulated.returncode == 1 and "To keep it as a file" in simulated.stdout, simulated.stdout + simulated.stderr
