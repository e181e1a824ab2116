"""The text of a collective stands once, at the core's function. A shim's function says what differs."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

__all__ = ["documented_as"]

_TITLES = ("Args", "Returns", "Raises", "Example")

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def documented_as(core: Callable[..., Any]) -> Callable[[FunctionT], FunctionT]:
    """A decorator for a shim's function: its docstring becomes the core function's docstring plus its own.

    The shim's paragraphs follow the core's paragraphs. Its entries in `Args:`, its `Returns:` and its `Example:`
    replace the core's, and its errors come before the core's. Each parameter of the shim's function has an entry.

    Args:
        core: the function of `horovodish` whose text it is.

    Raises:
        ValueError: an entry in `Args:` is for no parameter, or a parameter has none.

    Example:
        >>> @documented_as(collectives.broadcast)
        ... def broadcast(tensor: Tensor, root_rank: int) -> Tensor:
        ...     '''Not for sparse tensors.'''
    """

    def documented(function: FunctionT) -> FunctionT:
        if core.__doc__:  # python -OO leaves out docstrings
            function.__doc__ = _joined(core.__doc__, function.__doc__ or "", function)
        return function

    return documented


def _joined(core: str, own: str, function: Callable[..., Any]) -> str:
    of_core, of_shim = _sections(core), _sections(own)
    sections = {**of_core, **of_shim}
    sections[""] = "\n\n".join(filter(None, (of_core[""], of_shim[""])))
    sections["Args"] = _arguments(of_core.get("Args", ""), of_shim.get("Args", ""), function)
    sections["Raises"] = "\n".join(filter(None, (of_shim.get("Raises"), of_core.get("Raises"))))
    titles = [title for title in _TITLES if sections.get(title)]
    return "\n\n".join([sections[""], *[f"{title}:\n{sections[title]}" for title in titles]]) + "\n"


def _sections(text: str) -> dict[str, str]:
    """The sections of a docstring by title; what comes before them has none."""
    first, *others = re.split(rf"^({'|'.join(_TITLES)}):\n", inspect.cleandoc(text), flags=re.MULTILINE)
    return {"": first.strip(), **{title: body.rstrip() for title, body in zip(others[::2], others[1::2], strict=True)}}


def _arguments(core: str, own: str, function: Callable[..., Any]) -> str:
    given, parameters = _entries(own), inspect.signature(function).parameters
    described = {**_entries(core), **given}
    if wrong := {*given} - {*parameters} | {*parameters} - {*described}:
        raise ValueError(f"the docstring of {function.__qualname__} and its parameters differ: {', '.join(wrong)}")
    names = defaultdict(list)  # by text: several parameters may share one
    for name in parameters:
        names[described[name]].append(name)
    return "\n".join(f"    {', '.join(those)}:{text}" for text, those in names.items())


def _entries(section: str) -> dict[str, str]:
    """The text of each parameter, which begins after the colon."""
    entries: Iterable[str] = re.split(r"^    (?=\w)", section, flags=re.MULTILINE)
    pairs = [entry.rstrip().split(":", 1) for entry in entries if entry]
    return {name: text for names, text in pairs for name in names.split(", ")}
