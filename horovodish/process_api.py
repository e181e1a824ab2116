# ruff: noqa: F403
"""The public names that `horovodish` and the shim of every framework share: all names of the modules below."""

import typing as _typing

from horovodish import package_names as _package_names
from horovodish.collectives.adding_sets import *
from horovodish.collectives.process_sets import *
from horovodish.collectives.reduce_ops import *
from horovodish.elastic.recovery import *
from horovodish.errors import *
from horovodish.launch.run_function import *
from horovodish.reports.codes import *
from horovodish.reports.stragglers import *
from horovodish.reports.timeline import *
from horovodish.runtime.basics import *
from horovodish.runtime.built import *

if not _typing.TYPE_CHECKING:  # a type checker takes every name
    __all__ = _package_names.exported(__name__)
