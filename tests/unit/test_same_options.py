"""What the ranks say of options that differ."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovodish.collectives.codecs import Compression
from horovodish.gradients.options import GradientOptions
from horovodish.gradients.same_options import difference_of_options
from horovodish.gradients.sync import LocalSGD


def test_equal_options() -> None:
    assert difference_of_options({0: {"op": "Sum", "shard": "''"}, 1: {"op": "Sum", "shard": "''"}}) == ""
    assert difference_of_options({}) == ""


def test_every_option_that_differs_and_the_ranks_of_each_value() -> None:
    of_ranks = {0: {"op": "Sum", "stale": "8"}, 2: {"op": "Average", "stale": "8"}, 3: {"op": "Sum", "stale": "9"}}
    assert difference_of_options(of_ranks) == (
        "op= is Sum on ranks 0 and 3, and Average on rank 2; stale= is 8 on ranks 0 and 2, and 9 on rank 3"
    )


def test_equal_values_of_other_types_and_objects_are_equal() -> None:
    def text(**options: Any) -> dict[str, str]:
        return GradientOptions.checked(**options).comparison.texts()

    assert text(gradient_predivide_factor=2) == text(gradient_predivide_factor=np.float64(2.0))
    arrays = [np.zeros((2, 3)), np.zeros(4)]
    assert text(groups=[arrays]) == text(groups=[tuple(np.ones(each.shape) for each in arrays)])
    assert text(groups=[arrays]) != text(groups=[arrays[:1]])
    assert text(sync=LocalSGD(2)) == text(sync=LocalSGD(2)) != text(sync=LocalSGD(3))
    assert text(compression=Compression.int8(start=1)) != text(compression=Compression.int8)
    assert text(num_groups=0) == text()
