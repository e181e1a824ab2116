"""README.md: its examples run as they stand and train, and it stays short; the table of what works is true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import feature_table
from support.documents import python_blocks, sides
from support.scripts import output_of
from support.sources import ROOT

TEXT = (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    "number", [0, 1, pytest.param(2, marks=pytest.mark.soak), 3], ids=["torch", "tensorflow", "keras", "jax"]
)
def test_the_examples_train_on_two_ranks(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "jax")  # the fastest to import
    script = tmp_path / "train.py"
    script.write_text(python_blocks("README.md")[number])
    output = output_of(script, np=2)
    losses = dict(re.findall(r"rank (\d) of 2: loss (\S+)", output))
    assert sorted(losses) == ["0", "1"], output
    assert all(float(loss) < 1e-3 for loss in losses.values()), output


def test_the_diff_leads_from_one_process_to_the_example(tmp_path: Path) -> None:
    one_process, ours = sides("README.md")
    assert ours == python_blocks("README.md")[0].rstrip("\n")
    script = tmp_path / "train.py"
    script.write_text(one_process)
    done = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True)
    shown = re.findall(r"^    (step \d+): rank (\d) of 2: loss \d+\.\d{4}$", TEXT, re.MULTILINE)
    assert sorted(shown) == [(step, rank) for step in ("step 0", "step 40", "step 80") for rank in "01"]
    assert re.sub(r"\d+\.\d{4}", "LOSS", done.stdout) == "".join(f"step {step}: loss LOSS\n" for step in (0, 40, 80))


def test_the_table_says_what_works() -> None:
    page = feature_table.PAGE.read_text()
    assert feature_table.generated(page) == page, "python tests/support/feature_table.py writes it"
    assert feature_table.with_table(TEXT, page) == TEXT, "python tests/support/feature_table.py writes it"


def test_it_is_short() -> None:
    prose = re.sub(r"```.*?```|^(?:    |\|).*?$", "", TEXT, flags=re.DOTALL | re.MULTILINE)
    assert len(prose.split()) <= 450


def test_the_quickstart_trains_as_it_says(tmp_path: Path) -> None:
    (code,) = python_blocks("docs/quickstart.md")
    shown = (ROOT / "docs/quickstart.md").read_text()
    script = tmp_path / "train.py"
    script.write_text(code)
    for np in (1, 2):
        line = rf"rank (\d) of {np} recognizes (\d+\.\d)% of the digits that it has not seen"
        found, printed = re.findall(line, output_of(script, np=np)), re.findall(f"^    {line}$", shown, re.MULTILINE)
        assert sorted(rank for rank, _ in found) == sorted(rank for rank, _ in printed) == ["0", "1"][:np]
        assert len({share for _, share in found}) == 1 and float(found[0][1]) > 85
