"""What must hold on every rank at once: an error with all parts of its text, and an engine that goes on after it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import horovodish as hvd


def ranks_text(ranks: list[int]) -> str:
    """How a message names ranks: "rank 2 has", "ranks 0, 1 have", "ranks 0-2 have"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    return f"ranks {ranks[0]}{', ' if len(ranks) == 2 else '-'}{ranks[-1]} have"


@contextmanager
def mismatch(*parts: str) -> Iterator[None]:
    """Expects a MismatchError whose message has all of these parts, in any order: no rank's request comes first."""
    with pytest.raises(hvd.MismatchError) as raised:
        yield
    for part in parts:
        # A number must not go on after it.
        assert re.search(rf"{re.escape(part)}(?![\d.]\d)", str(raised.value)), f"{part!r} is not in: {raised.value}"


def every_rank_raises(name: str, what: str, usual: str, of_last_rank: str, call: Callable[[], Any]) -> None:
    """The call, in which the last rank differs from all others, raises MismatchError with both values on every rank.

    Args:
        name: of the tensor that the message names.
        what: the ranks disagree about.
        usual: the value of the ranks but the last, as text.
        of_last_rank: the last rank's value, as text.
        call: what every rank calls.
    """
    last = hvd.size() - 1
    parts = [
        f"'{name}'",
        f"the ranks disagree about its {what}:",
        f"{ranks_text(list(range(last)))} {usual}",
        f"{ranks_text([last])} {of_last_rank}",
        "Remedy:",
    ]
    with mismatch(*parts):
        call()
    the_engine_goes_on(name)


def unless_last(usual: Any, of_last_rank: Any) -> Any:
    """The usual value, but on the last rank its own."""
    return of_last_rank if hvd.rank() == hvd.size() - 1 else usual


def one_rank_is_wrong(
    error: type[Exception], text: str, right: Callable[[], Any], wrong: Callable[[], Any], name: str | None = "x"
) -> None:
    """The last rank makes the wrong call, twice in a row; the others wait for it, twice."""
    last = hvd.size() - 1
    for _ in range(2):
        if hvd.rank() == last:
            with pytest.raises(error, match=re.escape(text)):
                wrong()
        else:
            with pytest.raises(hvd.MismatchError, match=rf"rank {last} cannot take part: .*{re.escape(text)}"):
                right()
    the_engine_goes_on(name)


def the_engine_goes_on(name: str | None = None) -> None:
    """A collective, of the name that has just failed for example, gives what it should."""
    total = hvd.allreduce(np.full(3, hvd.rank()), op=hvd.Sum, name=name)
    np.testing.assert_array_equal(total, np.full(3, sum(range(hvd.size()))))
