"""The examples that go on where others have stopped: on as many ranks with the same bits, and on another number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.scripts import output_of
from support.sources import ROOT


def last_line(example: str, file: Path, *arguments: str, np: int) -> str:
    return output_of(ROOT / "examples" / example, str(file), *arguments, np=np).splitlines()[-1]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("example", "kind"),
    [
        ("resume_torch.py", "pt"),
        ("resume_jax.py", "pickle"),
        ("resume_keras.py", "keras"),
    ],
)
def test_an_example(example: str, kind: str, tmp_path: Path) -> None:
    stopped, whole = tmp_path / f"stopped.{kind}", tmp_path / f"whole.{kind}"
    output_of(ROOT / "examples" / example, str(stopped), "--stop-at", "40", np=2)
    resumed = last_line(example, stopped, np=2)
    assert "168 steps" in resumed
    assert resumed == last_line(example, whole, np=2)
    found = re.search(r"3 ranks, 168 steps: loss .*, (\d+.\d+)% of", last_line(example, stopped, np=3))
    assert found is not None
    assert float(found[1]) > 90
