"""`on_ranks`: a test whose body runs on every rank."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from support.ranks import framework_of, run_ranks

World = int | tuple[int, str]
"""A number of ranks, or that and a setting: `name=value`, or a plane."""


def on_ranks(
    *worlds: World, planes: Sequence[str] = (), env: Mapping[str, str] | None = None, timeout: float = 300
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function of module level that every rank calls after `init()`.

    An item for each world. A framework's test that has a world of three leaves that of two to `make soak`. What the
    function's parameters are named for, fixtures and `pytest.mark.parametrize` give, as for any test; the values are
    pickled.

    Args:
        worlds: where to run it. Without worlds, a parameter `world` gives them, as pairs of a number of ranks and a
            setting, or "" for none.
        planes: each number of ranks is a world on each of these.
        env, timeout: as for `run_ranks`.

    Example:
        >>> @on_ranks(2, (3, "mpi_ring"))
        ... def test_a_sum() -> None:
        ...     assert hvd.allreduce(1, op=hvd.Sum) == hvd.size()
    """

    def made(check: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(check)
        def test(**given: Any) -> None:
            np, setting = given.pop("world")
            variables = {**(env or {}), **_variable_of(setting)}
            args = tuple(given[name] for name in own)
            run_ranks(check, np, args=args, env=variables, timeout=timeout, begin=True)

        own = inspect.signature(check).parameters
        names = [*own, "world"]
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        pairs = [world if isinstance(world, tuple) else (world, plane) for plane in planes or [""] for world in worlds]
        goes_without_two = (3, "") in pairs and bool(framework_of(check))
        cases = [
            pytest.param(
                (np, setting),
                id=f"{np}-{setting}" if setting else str(np),
                marks=pytest.mark.soak if (np, setting) == (2, "") and goes_without_two else (),
            )
            for np, setting in pairs
        ]
        return pytest.mark.parametrize("world", cases)(test) if worlds else test

    return made


def _variable_of(setting: str) -> dict[str, str]:
    name, _, value = setting.rpartition("=")
    return {f"HOROVODISH_{(name or 'plane').upper()}": value} if setting else {}
