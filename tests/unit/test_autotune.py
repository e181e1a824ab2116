"""The search for the best fusion threshold and chunk sizes, on made-up speeds."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovodish.gradients.autotune import CHOICES, WORTH, Tuning, search

START = Tuning(16, 256, 512)


def found(speed: Callable[[Tuning], float], limit: int = 100) -> tuple[Tuning, list[Tuning]]:
    """What the search returns, and what it measured."""
    candidates = search(START, CHOICES)
    tuning, measured = next(candidates), []
    while len(measured) < limit:
        measured.append(tuning)
        try:
            tuning = candidates.send(speed(tuning))
        except StopIteration as end:
            return end.value, measured
    raise AssertionError(f"no end after {limit} samples")


@pytest.mark.parametrize("best", [Tuning(1, 64, 128), Tuning(128, 1024, 2048), Tuning(4, 512, 256), START])
def test_it_climbs_to_the_peak(best: Tuning) -> None:
    def speed(tuning: Tuning) -> float:
        ladders = [(list(values), name) for name, values in CHOICES.items()]
        steps = sum(
            abs(ladder.index(getattr(tuning, name)) - ladder.index(getattr(best, name))) for ladder, name in ladders
        )
        return 1e9 * 0.9**steps

    chosen, measured = found(speed)
    assert chosen == best
    assert len(measured) < 30


def test_the_start_stays_when_nothing_matters() -> None:
    chosen, measured = found(lambda _: 1e9)
    assert chosen == START
    assert len(measured) == 1 + 2 * len(CHOICES)


def test_a_lucky_sample_is_found_out() -> None:
    """One tuning looks fast once; measured again it is not."""
    seen: set[Tuning] = set()

    def speed(tuning: Tuning) -> float:
        lucky = tuning != START and tuning not in seen
        seen.add(tuning)
        return 2e9 if lucky else 1e9

    assert found(speed)[0] == START


def test_a_start_between_the_choices_is_one_of_them() -> None:
    candidates = search(Tuning(24, 256, 512), {"fusion_threshold_mb": (16, 32)})
    tried = [next(candidates)]
    for _ in range(2):
        tried.append(candidates.send(1.0))
    assert [tuning.fusion_threshold_mb for tuning in tried] == [24, 32, 16]


@given(st.integers(), st.floats(0, 0.5))
def test_under_any_noise_it_ends_and_is_not_worse(seed: int, noise: float) -> None:
    """What it returns was measured better than the start in the end, or is the start."""
    generator = random.Random(seed)
    samples: dict[Tuning, list[float]] = {}

    def speed(tuning: Tuning) -> float:
        value = 1e9 * (1 + generator.uniform(-noise, noise))
        samples.setdefault(tuning, []).append(value)
        return value

    chosen, _ = found(speed)
    if chosen != START:
        assert sorted(samples[chosen][-3:])[1] > sorted(samples[START][-3:])[1] * (1 + WORTH)
