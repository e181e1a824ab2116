"""The example of MLX: two ranks learn, and have the loss of one process with all of the data."""

from __future__ import annotations

import re

import pytest

from support.scripts import output_of
from support.sources import ROOT

pytest.importorskip("mlx.core", reason="MLX's build for CPUs has no wheel for this Python or machine")


@pytest.mark.soak
def test_digits() -> None:
    losses = []
    for ranks in (2, 1):
        output = output_of(ROOT / "examples/mlx_digits.py", np=ranks)
        found = re.search(rf"^{ranks} ranks: (\S+)% of the test images are recognized$", output, re.MULTILINE)
        assert found is not None and float(found[1]) > 94, output
        losses.append([float(loss) for loss in re.findall(r"loss (\S+)", output)])
    assert losses[0] == pytest.approx(losses[1], abs=2e-3), "the losses of two ranks, and those of one"
    assert losses[0][-1] < losses[0][0] / 3
