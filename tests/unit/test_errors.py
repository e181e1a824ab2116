"""The tree of exceptions, and the way from the engine's errors into it."""

from __future__ import annotations

import doctest
import re

import pytest

from horovodish import errors


def drawn() -> dict[str, str]:
    """Parent by name, as the docstring of the module draws the tree."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in re.findall(r"^    ( *[A-Z]\w+)", errors.__doc__ or "", re.MULTILINE):
        name = line.strip()
        path = [*path[: (len(line) - len(name)) // 2], name]
        if len(path) > 1:
            parents[name] = path[-2]
    return parents


def test_the_tree_is_as_drawn() -> None:
    classes = [getattr(errors, name) for name in errors.__all__ if name != "from_native"]
    assert {error.__name__: error.__base__.__name__ for error in classes} == drawn()


@pytest.mark.parametrize(
    "name", ["MismatchError", "RankLostError", "EngineStoppedError", "NotInitializedError", "DuplicateNameError"]
)
def test_an_error_of_the_engine_becomes_the_class_of_that_name(name: str) -> None:
    error = errors.from_native(name, "tensor w: the ranks disagree")
    assert type(error) is getattr(errors, name)
    assert str(error) == "tensor w: the ranks disagree"


@pytest.mark.parametrize("name", ["SystemExit", "from_native", "NoSuchError", ""])
def test_an_unknown_error_of_the_engine_is_internal(name: str) -> None:
    error = errors.from_native(name, "why")
    assert type(error) is errors.HorovodInternalError
    assert str(error) == f"{name}: why"


def test_examples() -> None:
    assert doctest.testmod(errors).failed == 0
