"""The examples for TensorFlow do what they say, on two ranks."""

from __future__ import annotations

import re

from support.scripts import output_of
from support.sources import ROOT


def test_a_loop_of_ones_own() -> None:
    output = output_of(ROOT / "examples/tensorflow_custom_loop.py", np=2)
    accuracy = re.search(r"test accuracy (\d\.\d+), weights equal on 2 ranks\n", output)
    assert accuracy is not None and float(accuracy[1]) >= 0.93, output
    assert output.count("epoch  1/") == 1, "only rank 0 may print"


def test_an_embedding() -> None:
    output = output_of(ROOT / "examples/tensorflow_embedding.py", np=2)
    loss = re.search(r"final loss (\d+\.\d+), tables equal on 2 ranks\n", output)
    assert loss is not None and float(loss[1]) < 0.01, output
    rows = [int(number) for number in re.findall(r"(\d+) of 20000 rows", output)]
    assert len(rows) == 4
    assert all(400 < number <= 800 for number in rows), "400 words on each rank, and no more rows than that travel"
