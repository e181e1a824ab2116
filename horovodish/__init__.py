# ruff: noqa: F403
"""horovodish: data-parallel training by wrapping an optimizer, on MPI and NCCL.

This package holds the process API and the collectives on NumPy arrays. `horovodish.torch` and its siblings hold the
same for a framework's tensors, and `DistributedOptimizer`.

    import horovodish as hvd

    hvd.init()
    total = hvd.allreduce(numpy.ones(3), op=hvd.Sum)
"""

import typing as _typing

from horovodish.launch import interrupts as _interrupts

_interrupts.end_commands_quietly()
# isort: split

from horovodish import source_tree as _source_tree

_source_tree.require_engine(__path__)  # before the imports that need it
# isort: split

from horovodish import package_names as _package_names
from horovodish.collectives.codecs import *
from horovodish.collectives.functions import *
from horovodish.collectives.objects import *
from horovodish.process_api import *
from horovodish.version import __version__ as __version__

if not _typing.TYPE_CHECKING:  # for a type checker, any name would exist
    __all__ = ["__version__", *_package_names.exported(__name__)]

    def __getattr__(name: str) -> object:
        return _package_names.look_up(__name__, name)
