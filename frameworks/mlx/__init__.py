# ruff: noqa: F403
"""horovodish for MLX: collectives on arrays, and an optimizer of MLX that makes a training script data-parallel."""

import typing as _typing

if __name__ != "horovodish.mlx":
    raise ImportError("import this package as horovodish.mlx")

from horovodish import supported as _frameworks

_frameworks.warn_if_too_old("mlx")  # before the imports that a release may break
# isort: split

from horovodish import package_names as _package_names
from horovodish.collectives.objects import *
from horovodish.mlx.broadcast_state import *
from horovodish.mlx.collectives import *
from horovodish.mlx.compression import *
from horovodish.mlx.optimizer import *
from horovodish.process_api import *

if not _typing.TYPE_CHECKING:  # for a type checker, any name would exist
    __all__ = _package_names.exported(__name__)

    def __getattr__(name: str) -> object:
        return _package_names.look_up(__name__, name)
