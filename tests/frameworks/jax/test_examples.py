"""The examples of JAX on two ranks: they learn."""

from __future__ import annotations

import re

import pytest

from support.scripts import output_of
from support.sources import ROOT


@pytest.mark.soak
def test_digits() -> None:
    output = output_of(ROOT / "examples/jax_digits.py", np=2)
    found = re.search(r"^2 ranks: (\S+)% of the test images are recognized$", output, re.MULTILINE)
    assert found is not None, output
    assert float(found[1]) > 94, output


@pytest.mark.soak
def test_transformer() -> None:
    output = output_of(ROOT / "examples/jax_transformer.py", "--steps", 41, np=2)
    losses = [float(loss) for loss in re.findall(r"^step +\d+: (\S+) nats per character$", output, re.MULTILINE)]
    assert len(losses) == 3, output
    assert losses[-1] < losses[0] - 1.5, output
    assert output.endswith("the ranks have one model\n"), output
