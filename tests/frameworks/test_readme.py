"""The example in README.md runs as it stands, and trains."""

from __future__ import annotations

import re
from pathlib import Path

from support.documents import python_blocks
from support.scripts import output_of


def test_the_example_trains_on_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(python_blocks("README.md")[0])
    output = output_of(script, np=2)
    losses = dict(re.findall(r"rank (\d) of 2: loss (\S+)", output))
    assert sorted(losses) == ["0", "1"], output
    assert all(float(loss) < 1e-3 for loss in losses.values()), output
