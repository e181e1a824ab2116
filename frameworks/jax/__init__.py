# ruff: noqa: F403
"""horovodish for JAX: collectives inside and outside of jit, and an optax optimizer that makes a script data-parallel.

Example:
    import horovodish.jax as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optax.adam(1e-3))
    parameters = hvd.broadcast_parameters(parameters, root_rank=0)

    $ horovodish run -np 4 python train.py
"""

import typing as _typing

if __name__ != "horovodish.jax":
    raise ImportError("import this package as horovodish.jax")

from horovodish import supported as _frameworks

_frameworks.warn_if_too_old("jax")  # before the imports that a release may break
# isort: split

from horovodish import package_names as _package_names
from horovodish.collectives.objects import *
from horovodish.gradients.sync import *
from horovodish.jax import autograd as _autograd  # noqa: F401, they tell JAX what to do
from horovodish.jax import eager as _eager  # noqa: F401
from horovodish.jax import lowering as _lowering  # noqa: F401
from horovodish.jax import programs_under_way as _programs_under_way  # noqa: F401
from horovodish.jax.broadcast_state import *
from horovodish.jax.collectives import *
from horovodish.jax.compression import *
from horovodish.jax.gradients import *
from horovodish.jax.optimizer import *
from horovodish.jax.shards.clipping import *
from horovodish.jax.shards.state import *
from horovodish.process_api import *

if not _typing.TYPE_CHECKING:  # for a type checker, any name would exist
    __all__ = _package_names.exported(__name__)

    def __getattr__(name: str) -> object:
        return _package_names.look_up(__name__, name)
