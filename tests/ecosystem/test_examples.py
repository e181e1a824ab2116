"""Lightning, Accelerate and Transformers train on our process groups, to the same losses as on gloo's."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.scripts import output_of
from support.sources import ROOT

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="`make test-ecosystem` installs what this needs")


@pytest.mark.parametrize("flags", [[], ["--fully-shard"]], ids=["DDP", "FSDP2"])
def test_lightning(tmp_path: Path, flags: list[str]) -> None:
    output = output_as_on_gloo("lightning_digits.py", tmp_path, *flags)
    assert number_in(output, "test accuracy") > 0.9
    assert "reduced no gradients" not in output


def test_accelerate(tmp_path: Path) -> None:
    assert number_in(output_as_on_gloo("accelerate_digits.py", tmp_path), "test accuracy") > 0.9


def test_transformers(tmp_path: Path) -> None:
    assert number_in(output_as_on_gloo("transformers_trainer.py", tmp_path), "loss") < 0.3


def output_as_on_gloo(example: str, folder: Path, *flags: str) -> str:
    """What an example prints, whose losses and accuracies must be the same on gloo."""
    script = ROOT / "examples" / example
    on_gloo = folder / example
    on_gloo.write_text(script.read_text().replace('"horovodish"', '"gloo"'))
    ours, theirs = (output_of(each, *flags, np=2, with_errors=True) for each in (script, on_gloo))
    found, expected = results_in(ours, "horovodish"), results_in(theirs, "gloo")
    assert found == expected, "two numbers have one sum, in any order"
    return ours


def results_in(output: str, backend: str) -> str:
    found = re.search(rf"^2 ranks on {backend}, (.*)$", output, re.MULTILINE)
    assert found, output
    return found[1]


def number_in(output: str, name: str) -> float:
    found = re.search(rf"\b{name} (\d\.\d+)$", output, re.MULTILINE)
    assert found, output
    return float(found[1])
