"""Sums over ranks tell whether all of them have the same checksums."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovodish.collectives.consistency import Checksums, are_equal, checksum_of, difference, summands


def equal(of_ranks: list[Checksums]) -> bool:
    sums = np.sum([np.array(summands(each), np.int64) for each in of_ranks], axis=0)
    return are_equal(sums.tolist(), len(of_ranks))


def of(*values: float, name: str = "weight") -> Checksums:
    return {f"{name} {index}": checksum_of(np.full(3, value)) for index, value in enumerate(values)}


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=1, max_size=300))
def test_ranks_are_equal_only_if_all_are(values: list[float]) -> None:
    assert equal([of(value, 5.0) for value in values]) == (len(set(values)) == 1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 1000, 32768])
def test_sums_fit(ranks: int) -> None:
    greatest = (1 << 24) - 1
    assert ranks * greatest * greatest < 1 << 63
    one = summands(of(1.0))
    assert are_equal([ranks * number for number in one], ranks)
    assert ranks == 1 or not are_equal(
        [(ranks - 1) * a + b for a, b in zip(one, summands(of(2.0)), strict=True)], ranks
    )


def test_names_may_differ_and_the_order_may_not() -> None:
    assert equal([of(1.0, 2.0), of(1.0, 2.0, name="weight of another model")])
    assert not equal([of(1.0, 2.0), of(2.0, 1.0)])


def test_a_difference_names_the_first_value_and_the_ranks() -> None:
    found = difference({0: of(1.0, 2.0, 3.0), 2: of(1.0, 5.0, 6.0), 5: of(1.0, 2.0, 3.0)})
    assert found.startswith("weight 1 differs: ranks 0, 5 have float64 of shape (3,) with checksum ")
    assert "; rank 2 has float64 of shape (3,) with checksum " in found
    assert found.endswith(". 1 more differ.")
