"""The frameworks, in one table; a warning for releases of them that are too old."""

import importlib
import re
import warnings
from typing import NamedTuple

from horovodish.launch.environment import launcher_environment
from horovodish.version import __version__

__all__ = ["FRAMEWORKS", "Framework", "warn_if_too_old"]


class Framework(NamedTuple):
    """A row of the table.

    Attributes:
        oldest: the oldest release that can work, as in the framework's extra; docs/versions.md shows what was tested.
        distributions: any of them installs the framework.
        versioned: the module that knows the release, where that is not the framework's own.
    """

    oldest: tuple[int, ...]
    distributions: tuple[str, ...]
    versioned: str | None = None


FRAMEWORKS = {
    "torch": Framework((2, 1), ("torch",)),
    "tensorflow": Framework((2, 16), ("tensorflow", "tensorflow-cpu")),
    "keras": Framework((3, 0), ("keras",)),
    "jax": Framework((0, 8, 1), ("jax",)),
    "mlx": Framework((0, 29), ("mlx",), versioned="mlx.core"),
}
"""The frameworks by the names of their modules. The folders of their shims have the same names."""


def warn_if_too_old(framework: str) -> None:
    """Import a framework, and warn on rank 0 if its release is older than the oldest one that can work.

    Args:
        framework: the name of its module, one of `FRAMEWORKS`.
    """
    oldest, _, versioned = FRAMEWORKS[framework]
    version: str = importlib.import_module(versioned or framework).__version__
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if not numbers or numbers >= oldest:
        return
    launched = launcher_environment()
    if launched is None or launched.rank == 0:
        needed = ".".join(map(str, oldest))
        message = f"horovodish {__version__} needs {framework} {needed} or later, and this is {version}"
        warnings.warn(message, stacklevel=3)  # 2 is our module, which calls this when it is imported
