"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.ranks import let_idle_ranks_leave


@pytest.fixture(scope="session", autouse=True)
def ranks_leave() -> Iterator[None]:
    """The ranks that have served several tests end by themselves, and nothing stays behind."""
    yield
    let_idle_ranks_leave()
