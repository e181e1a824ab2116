"""What the ranks say of options that differ."""

from __future__ import annotations

from horovodish.gradients.same_options import difference_of_options


def test_equal_options() -> None:
    assert difference_of_options({0: {"op": "Sum", "shard": "''"}, 1: {"op": "Sum", "shard": "''"}}) == ""
    assert difference_of_options({}) == ""


def test_every_option_that_differs_and_the_ranks_of_each_value() -> None:
    of_ranks = {0: {"op": "Sum", "stale": "8"}, 2: {"op": "Average", "stale": "8"}, 3: {"op": "Sum", "stale": "9"}}
    assert difference_of_options(of_ranks) == (
        "op= is Sum on ranks 0 and 3, and Average on rank 2; stale= is 8 on ranks 0 and 2, and 9 on rank 3"
    )
