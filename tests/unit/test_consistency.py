"""Sums over ranks tell whether all of them have the same checksums."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovodish.collectives import consistency
from horovodish.collectives.consistency import (
    FIRST_APART,
    Checksums,
    are_equal,
    checksum_of,
    difference,
    summands,
    warn_of_difference,
)
from horovodish.collectives.process_sets import ProcessSet


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


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings of rank 0."""
    texts: list[str] = []
    monkeypatch.setattr(consistency.basics, "rank", lambda: 0)
    monkeypatch.setattr(consistency.failures, "warn", lambda text, _: texts.append(text))
    consistency.part(consistency._Warned).sets.clear()
    return texts


def warn(step: int, *of_ranks: Checksums) -> None:
    ranks = cast(ProcessSet, SimpleNamespace(ranks=[*range(len(of_ranks))], process_set_id=0))
    warn_of_difference(dict(enumerate(of_ranks)), f"gradients {step}", ranks, "broadcast", step=step)


def layers(first: int, *values: float) -> Checksums:
    """Checksums of layers that each process numbers. The last layer has a name of its own."""
    *numbered, last = map(checksum_of, (np.full(3, float(value)) for value in values))
    return {**{f"dense_{number}": each for number, each in enumerate(numbered, first)}, "head": last}


@pytest.mark.parametrize("step", [1, FIRST_APART])
def test_names_that_differ_by_rank(step: int, warned: list[str]) -> None:
    warn(step, layers(0, 1, 2, 3), layers(1, 1, 5, 3), layers(0, 1, 2, 3))
    (text,) = warned
    assert ": dense_1 differs: ranks 0, 2 have float64 of shape (3,) with" in text
    assert "; rank 1 has float64 of shape (3,) with checksum" in text
    assert "more differ" not in text
    warned.clear()
    consistency.part(consistency._Warned).sets.clear()
    warn(step, of(1.0, name="kernel"), of(2.0, name="another kernel"))
    assert ": kernel 0 differs: rank 0 has" in warned[0]


def test_models_that_differ_are_named_also_if_no_name_is_the_same(warned: list[str]) -> None:
    warn(FIRST_APART, of(1.0, name="kernel"), of(1.0, 2.0, name="another kernel"))
    assert warned[0].startswith("the ranks' models differ: ")


def test_what_one_rank_alone_has_does_not_count_later(warned: list[str]) -> None:
    warn(FIRST_APART, of(1.0), of(1.0, 2.0))
    warn(FIRST_APART, of(1.0), {**of(1.0), **of(2.0, name="unwrapped")})
    assert not warned
    warn(FIRST_APART, of(1.0), {**of(3.0), **of(2.0, name="unwrapped")})
    assert ": weight 0 differs: rank 0 has" in warned[0]
