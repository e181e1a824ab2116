"""Every collective gives the bits that were recorded, on ranks of one host and on ranks that are a host each."""

from __future__ import annotations

import pytest

from support.bits import ENVIRONMENT, WORLDS, checksums, difference
from support.ranks import run_ranks


@pytest.mark.parametrize(("np", "plane"), WORLDS)
def test_bits_as_they_were_recorded(np: int, plane: str) -> None:
    env = {**ENVIRONMENT, "HOROVODISH_PLANE": plane}
    assert not difference(f"{np} {plane}", run_ranks(checksums, np, env=env))
