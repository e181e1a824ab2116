"""`on_ranks`: a test whose body runs on every rank."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from support.ranks import run_ranks

_NP, _PLANE = "ranks", "plane"


def on_ranks(
    *sizes: int, planes: Sequence[str] = (), env: Mapping[str, str] | None = None, timeout: float = 300
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function of module level that every rank calls after `init()`.

    An item for each number of ranks and for each plane. What the function's parameters are named for, fixtures and
    `pytest.mark.parametrize` give, as for any test; the values are pickled.

    Args:
        sizes: numbers of ranks.
        planes: values of HOROVODISH_PLANE; it is left as it is when not given.
        env, timeout: as for `run_ranks`.

    Example:
        >>> @on_ranks(2, 3)
        ... def test_a_sum() -> None:
        ...     assert hvd.allreduce(1, op=hvd.Sum) == hvd.size()
    """

    def made(check: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(check)
        def test(**given: Any) -> None:
            np, plane = given.pop(_NP), given.pop(_PLANE, None)
            variables = {**(env or {}), **({"HOROVODISH_PLANE": plane} if plane else {})}
            args = tuple(given[name] for name in own)
            run_ranks(check, np, args=args, env=variables, timeout=timeout, begin=True)

        own = inspect.signature(check).parameters
        ours = [_NP, _PLANE] if planes else [_NP]
        extra = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ours]
        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own.values()]
        test.__signature__ = inspect.Signature([*parameters, *extra])  # type: ignore[attr-defined]
        if planes:
            test = pytest.mark.parametrize(_PLANE, planes)(test)
        return pytest.mark.parametrize(_NP, sizes)(test)

    return made
