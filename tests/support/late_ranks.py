"""Ranks whose steps are late at moments that no one chose."""

from __future__ import annotations

import random
import time
from typing import Any

from torch import nn

import horovodish.torch as hvd

STEPS = 40


def late_at_random(seed: int) -> Any:
    """A function that sleeps in one of five calls, on each rank at other ones."""
    chance = random.Random(seed * 100 + hvd.rank())

    def perhaps_sleep() -> None:
        if chance.random() < 0.2:
            time.sleep(chance.uniform(0.0, 0.04))

    return perhaps_sleep


def steps_with(optimizer: Any, parameter: nn.Parameter, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        parameter.sum().backward()
        optimizer.step()
