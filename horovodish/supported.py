"""The frameworks, in one table; a warning for releases of them that were not tested."""

import importlib
import re
import warnings
from typing import NamedTuple

from horovodish.launch.environment import launcher_environment
from horovodish.version import __version__

__all__ = ["FRAMEWORKS", "Framework", "warn_unless_tested"]

Release = tuple[int, int]


class Framework(NamedTuple):
    """A row of the table.

    Attributes:
        oldest, newest: the releases that this release was tested with, as major and minor number; docs/versions.md
            shows what ran.
        distributions: any of them installs the framework.
        versioned: the module that knows the release, where that is not the framework's own.
    """

    oldest: Release
    newest: Release
    distributions: tuple[str, ...]
    versioned: str | None = None


FRAMEWORKS = {
    "torch": Framework((2, 1), (2, 13), ("torch",)),
    "tensorflow": Framework((2, 16), (2, 21), ("tensorflow", "tensorflow-cpu")),
    "keras": Framework((3, 15), (3, 15), ("keras",)),
    "jax": Framework((0, 8), (0, 10), ("jax",)),
    "mlx": Framework((0, 32), (0, 32), ("mlx",), versioned="mlx.core"),
}
"""The frameworks by the names of their modules. The folders of their shims have the same names."""


def warn_unless_tested(framework: str) -> None:
    """Import a framework, and warn on rank 0 if its release is older or newer than the tested ones.

    Args:
        framework: the name of its module, one of `FRAMEWORKS`.
    """
    oldest, newest, _, versioned = FRAMEWORKS[framework]
    version: str = importlib.import_module(versioned or framework).__version__
    found = re.match(r"(\d+)(?:\.(\d+))?", version)
    if found and oldest <= (int(found[1]), int(found[2] or 0)) <= newest:
        return
    launched = launcher_environment()
    if launched is None or launched.rank == 0:
        releases = " to ".join(dict.fromkeys(".".join(map(str, release)) for release in (oldest, newest)))
        message = f"horovodish {__version__} was tested with {framework} {releases}, and this is {version}"
        warnings.warn(message, stacklevel=3)  # 2 is our module, which calls this when it is imported
