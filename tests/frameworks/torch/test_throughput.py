"""The throughput example: every model, alone and on two ranks; what it prints adds up."""

from __future__ import annotations

import re

import pytest

from support.scripts import output_of
from support.sources import ROOT

RATE = r"(\d+\.\d) \+- \d+\.\d samples/s"


@pytest.mark.parametrize(
    ("np", "model", "options"),
    [
        pytest.param(0, "mlp", [], marks=pytest.mark.soak),
        pytest.param(2, "convnet", ["--op", "adasum"], marks=pytest.mark.soak),
        pytest.param(2, "transformer", ["--compression", "int8"], marks=pytest.mark.soak),
    ],
)
def test_rates_of_the_ranks_and_in_all(np: int, model: str, options: list[str]) -> None:
    tiny = ["--batch-size", 2, "--steps", 2, "--iterations", 3, "--warmup-steps", 1]
    output = output_of(ROOT / "examples/torch_throughput.py", "--model", model, *tiny, *options, np=np)
    ranks = np or 1
    assert re.search(rf"^{model}, \S+ MB of gradients, {ranks} ranks, 1 threads each$", output, re.MULTILINE), output
    assert len(re.findall(r"^iteration \d: \d+\.\d samples/s on rank 0$", output, re.MULTILINE)) == 3, output
    of_ranks = [float(re.search(rf"^rank {rank}: {RATE}$", output, re.MULTILINE)[1]) for rank in range(ranks)]
    in_all = float(re.search(rf"^in all: {RATE}$", output, re.MULTILINE)[1])
    assert ("all ranks are on one host" in output) == ("int8" in options), output
    assert in_all == pytest.approx(sum(of_ranks), abs=0.2)
