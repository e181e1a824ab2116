"""The example of `fit`: on every backend the digits are learned, and all ranks end with the same bits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.scripts import output_of
from support.sources import ROOT


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"])
def test_digits(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", backend)
    saves = ["--save", tmp_path / "best.keras"] if backend == "tensorflow" else []
    output = output_of(ROOT / "examples/keras_digits.py", "--epochs", 4, *saves, np=2)
    accuracy = re.search(rf"{backend}: \d+ epochs in .* test accuracy (\d\.\d+)", output)
    assert accuracy is not None, output
    assert float(accuracy[1]) >= 0.93
    assert re.search(r"all 2 ranks hold bit-identical weights, sha256 [0-9a-f]{64}\n", output), output
    assert output.count("Epoch 1/4") == 1, "only rank 0 may print"
    assert (tmp_path / "best.keras").exists() == bool(saves)
