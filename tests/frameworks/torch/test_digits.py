"""The example that `make demo` runs: the digits are learned, and all ranks end with the same bits."""

from __future__ import annotations

import re

import pytest

from support.scripts import output_of
from support.sources import ROOT


@pytest.mark.soak
def test_digits() -> None:
    output = output_of(ROOT / "examples/torch_digits.py", np=2)
    accuracy = re.search(r"trained in .* test accuracy (\d\.\d+)", output)
    assert accuracy is not None, output
    assert float(accuracy[1]) >= 0.97
    assert re.search(r"all 2 ranks hold bit-identical weights, sha256 [0-9a-f]{64}\n", output), output
    assert output.count("epoch  1/") == 1, "only rank 0 may print"


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["--local-sgd 8", "--diloco 20", "--wait-for 1 --late"])
def test_slow_machines(policy: str) -> None:
    output = output_of(ROOT / "examples/torch_slow_machines.py", *policy.split(), np=2)
    accuracy = re.fullmatch(r"2 ranks, 400 steps in .* s, test accuracy (\d\.\d+)\n", output)
    assert accuracy is not None, output
    assert float(accuracy[1]) > 0.85
