"""The example of a long training run: it learns, and a run that was stopped goes on with the same numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from support.scripts import output_of
from support.sources import ROOT

SCRIPT = ROOT / "examples/torch_transformer.py"
pytestmark = pytest.mark.soak


def test_it_learns() -> None:
    output = output_of(SCRIPT, "--steps", 40, np=2)
    loss = re.search(r"^loss on other text (\S+) nats per character$", output, re.MULTILINE)
    assert loss is not None, output
    assert float(loss[1]) < 2.9, output
    assert len(output[loss.end() :]) > 400, "it writes some text"


def test_a_stop_changes_nothing(tmp_path: Path) -> None:
    """An epoch of this text has 2 steps, and the stop is in the middle of the second one."""
    text, through, stopped = tmp_path / "text", tmp_path / "through.pt", tmp_path / "stopped.pt"
    text.write_text("Some steps of two passes of 16 blocks on two ranks.\n" * 179)
    for checkpoint, steps in ((through, 5), (stopped, 3), (stopped, 5)):
        output = output_of(SCRIPT, "--text", text, "--checkpoint", checkpoint, "--steps", steps, np=2)
    assert output.startswith("2 ranks, 131 blocks of 64 characters, 3 steps done\n")
    one, other = (torch.load(file, weights_only=True) for file in (through, stopped))
    assert one["sampler"]["epoch"] == 2
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert sorted(tmp_path.iterdir()) == [stopped, text, through]
