"""The example in README.md runs as it stands, and trains."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_example_trains_on_two_ranks(tmp_path: Path) -> None:
    example = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert example is not None
    script = tmp_path / "train.py"
    script.write_text(example[1])
    launcher = [sys.executable, "-m", "horovodish.launcher", "run", "-np", "2"]
    finished = subprocess.run([*launcher, sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    losses = dict(re.findall(r"rank (\d) of 2: loss (\S+)", finished.stdout))
    assert sorted(losses) == ["0", "1"], finished.stdout
    assert all(float(loss) < 1e-3 for loss in losses.values()), finished.stdout
