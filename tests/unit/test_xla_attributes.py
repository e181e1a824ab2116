"""Attributes of XLA's calls, as the engine reads them."""

from __future__ import annotations

import pytest

from horovodish._native import testing


@pytest.mark.parametrize(
    ("text", "lines"), [("", []), ("a\n", ["a"]), ("a", ["a"]), ("a\n\nb", ["a", "", "b"]), ("\n", [""])]
)
def test_the_last_line_needs_no_newline(text: str, lines: list[str]) -> None:
    assert testing.lines(text) == lines
