"""Which releases of the frameworks this release was tested with; docs/versions.md shows what ran."""

import importlib
import re
import warnings

from horovodish.launched import launcher_environment
from horovodish.version import __version__

__all__ = ["TESTED", "warn_unless_tested"]

TESTED = {
    "jax": ((0, 10), (0, 10)),
    "keras": ((3, 15), (3, 15)),
    "tensorflow": ((2, 21), (2, 21)),
    "torch": ((2, 13), (2, 13)),
}
"""The oldest and the newest release of each framework, as major and minor number."""


def warn_unless_tested(framework: str) -> None:
    """Import a framework, and warn on rank 0 if its release is older or newer than the tested ones.

    Args:
        framework: the name of its module, one of `TESTED`.
    """
    version: str = importlib.import_module(framework).__version__
    oldest, newest = TESTED[framework]
    found = re.match(r"(\d+)(?:\.(\d+))?", version)
    if found and oldest <= (int(found[1]), int(found[2] or 0)) <= newest:
        return
    launched = launcher_environment()
    if launched is None or launched.rank == 0:
        releases = " to ".join(dict.fromkeys(".".join(map(str, release)) for release in (oldest, newest)))
        message = f"horovodish {__version__} was tested with {framework} {releases}, and this is {version}"
        warnings.warn(message, stacklevel=3)  # 2 is our module, which calls this when it is imported
