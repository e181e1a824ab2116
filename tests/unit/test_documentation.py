"""A shim's docstring says what differs, and `documented_as` makes the whole text of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from horovodish.collectives.documentation import documented_as


def core(tensor: Any, average: bool | None, name: str | None, one: float, other: float) -> None:
    """Reduce.

    Args:
        tensor: the values.
        average: the older way.
        name: the name, which is
            counted.
        one, other: factors.

    Returns:
        A new tensor.

    Raises:
        ValueError: a bad op.

    Example:
        >>> core()
    """


def test_a_shim_says_what_differs() -> None:
    @documented_as(core)
    def shim(other: float, tree: Any, name: str | None, compression: Any, one: float) -> None:
        """Differentiable.

        Args:
            tree: the values: a tree.
            compression: what travels.
            one: a factor
                of mine.

        Raises:
            TypeError: no tree.

        Example:
            >>> shim()
        """

    assert (
        shim.__doc__
        == """\
Reduce.

Differentiable.

Args:
    other: factors.
    tree: the values: a tree.
    name: the name, which is
        counted.
    compression: what travels.
    one: a factor
        of mine.

Returns:
    A new tensor.

Raises:
    TypeError: no tree.
    ValueError: a bad op.

Example:
    >>> shim()
"""
    )


def test_parameters_that_share_an_entry_stay_together() -> None:
    @documented_as(core)
    def shim(one: float, other: float) -> None:
        pass

    assert "Args:\n    one, other: factors.\n" in (shim.__doc__ or "")


def without_text(mine: Any) -> None:
    pass


def of_nothing(tensor: Any) -> None:
    """Args:
    tree: is no parameter.
    """


@pytest.mark.parametrize(("function", "wrong"), [(without_text, "mine"), (of_nothing, "tree")])
def test_parameters_and_text_are_the_same(function: Callable[..., None], wrong: str) -> None:
    with pytest.raises(ValueError, match=f"the docstring of {function.__name__} and its parameters differ: {wrong}"):
        documented_as(core)(function)


def test_no_docstrings_are_needed() -> None:
    code = "from horovodish.collectives.documentation import documented_as as own; print(own(own)(lambda x: 0).__doc__)"
    command = [sys.executable, "-OO", "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert found.stdout == "None\n"
