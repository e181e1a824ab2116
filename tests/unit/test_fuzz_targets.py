"""What Python reads from outside: seeds, and what a few changed bytes make of them. `make fuzz` does it thoroughly."""

from __future__ import annotations

import pytest

from fuzz.targets import SEEDS, TARGETS
from support.mutations import mutations

CHANGED = 100


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_unforeseen_happens(name: str) -> None:
    for data in (*SEEDS[name], *mutations(SEEDS[name], CHANGED)):
        TARGETS[name](data)
