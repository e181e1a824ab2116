# ruff: noqa: F403
"""What `horovodish` and the shim of every framework have in common: all public names of the modules below."""

import typing as _typing

from horovodish import package_names as _package_names
from horovodish.basics import *
from horovodish.errors import *
from horovodish.process_sets import *
from horovodish.recovery import *
from horovodish.reduce_ops import *
from horovodish.run_function import *
from horovodish.stragglers import *
from horovodish.timeline import *

if not _typing.TYPE_CHECKING:  # a type checker takes every name
    __all__ = _package_names.exported(__name__)
