"""On a rank: an object that one call makes and later calls use. It stands apart, so that ranks do not import Ray."""

import os
from collections.abc import Callable
from typing import Any

from horovodish.launcher.function.rank import RANK_VARIABLES

_executable: Any = None


def make(cls: type | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Makes the object; None without a class."""
    global _executable
    _executable = cls(*args, **kwargs) if cls else None


def use(fn: Callable[[Any], Any], alone: int | None = None) -> Any:
    """Calls `fn(object)`.

    Args:
        fn: the function.
        alone: the rank that does so; None: all.
    """
    rank = next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), None)
    return fn(_executable) if alone in (None, rank) else None
