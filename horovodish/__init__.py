"""horovodish: data-parallel training by wrapping an optimizer, on MPI and NCCL.

This package holds the process API and the collectives on NumPy arrays. `horovodish.torch` and its siblings hold the
same for a framework's tensors, and `DistributedOptimizer`.

    import horovodish as hvd

    hvd.init()
    total = hvd.allreduce(numpy.ones(3), op=hvd.Sum)
"""

import typing as _typing

from horovodish import source_tree as _source_tree

_source_tree.require_engine(__path__)  # before the imports that need it
# isort: split

from horovodish import collectives as _collectives
from horovodish import missing_names as _missing_names
from horovodish import objects as _objects
from horovodish import process_api as _process_api
from horovodish.collectives import *  # noqa: F403
from horovodish.objects import *  # noqa: F403
from horovodish.process_api import *  # noqa: F403
from horovodish.version import __version__

__all__ = ["__version__"]
__all__ += _collectives.__all__
__all__ += _objects.__all__
__all__ += _process_api.__all__

if not _typing.TYPE_CHECKING:  # for a type checker, any name would exist

    def __getattr__(name: str) -> object:
        return _missing_names.look_up(__name__, name)
