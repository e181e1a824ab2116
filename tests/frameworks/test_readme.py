"""README.md: its examples run as they stand and train, and it stays short; the table of what works is true."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from horovodish import process_api
from horovodish.gradients import options
from support.documents import python_blocks, sides
from support.scripts import output_of
from support.sources import ROOT

TEXT = (ROOT / "README.md").read_text()
TABLE = (ROOT / "docs/install.md").read_text().partition("## What works with which framework")[2]
PACKAGES = {
    "PyTorch": "frameworks/torch",
    "TensorFlow": "frameworks/tensorflow",
    "Keras 3": "frameworks/keras",
    "JAX": "frameworks/jax",
    "MLX": "frameworks/mlx",
    "NumPy": "horovodish",
}


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


def test_the_table_says_what_each_package_has() -> None:
    """By the names and the options in a row; else by the tests that `pytest.mark.shows` this row."""
    title, _, *rows = re.findall(r"^\|(.*)\|$", TABLE, re.MULTILINE)
    columns = [column.strip() for column in title.split("|")[1:]]
    assert columns == list(PACKAGES)
    shown = {column: features_shown_by_tests(folder) for column, folder in PACKAGES.items()}
    for row in rows:
        feature, *cells = row.split("|")
        said = [bool(cell.strip()) for cell in cells]
        names, options = re.findall(r"`(\w+)`", feature), re.findall(r"`(\w+)=`", feature)
        for name in names:
            public = {column: public_names(folder) for column, folder in PACKAGES.items()}
            assert said == [any(each.startswith(name) for each in public[column]) for column in columns], name
        for name in options:
            assert said == [name in taken_by(PACKAGES[column]) for column in columns], name
        if not names and not options:
            assert said == [feature.strip() in shown[column] for column in columns], feature
    assert set().union(*shown.values()) <= {row.split("|")[0].strip() for row in rows}


def features_shown_by_tests(folder: str) -> set[str]:
    """The rows of the table that tests of this package are marked with."""
    sources = [path.read_text() for path in (ROOT / "tests" / folder).glob("test_*.py")]
    return {
        row for source in sources for row in re.findall(r"^@pytest\.mark\.shows\(\"(.+)\"\)$", source, re.MULTILINE)
    }


def taken_by(folder: str) -> set[str]:
    """The options that this package's wrapped optimizers take."""
    file = ROOT / folder / "optimizer.py"
    kinds = re.findall(r"@takes\(\s*(\w+)", file.read_text()) if file.exists() else []
    return {name for kind in kinds for name in get_type_hints(getattr(options, kind))}


def public_names(folder: str) -> set[str]:
    """What the modules of this package list in `__all__`, by their sources; of the core, collectives and objects."""
    files = [ROOT / "horovodish/collectives/objects.py"]
    files += [ROOT / folder / "collectives/functions.py"] if folder == "horovodish" else (ROOT / folder).glob("*.py")
    lists = [
        node.value
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    elements = [element for found in lists if isinstance(found, ast.List) for element in found.elts]
    return {element.value for element in elements if isinstance(element, ast.Constant)} | set(process_api.__all__)


def test_it_is_short() -> None:
    prose = re.sub(r"```.*?```|^    .*?$", "", TEXT, flags=re.DOTALL | re.MULTILINE)
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
