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

from horovodish import tested_versions as _tested_versions

_tested_versions.warn_unless_tested("jax")  # before the imports that a release may break
# isort: split

from horovodish import missing_names as _missing_names
from horovodish import process_api as _process_api
from horovodish.jax import autograd, eager, lowering  # noqa: F401, they tell JAX what to do
from horovodish.jax.broadcast_state import broadcast_optimizer_state, broadcast_parameters
from horovodish.jax.collectives import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    grouped_allreduce,
    join,
    reducescatter,
)
from horovodish.jax.compression import Compression
from horovodish.jax.gradients import grad, value_and_grad
from horovodish.jax.optimizer import DistributedOptimizer
from horovodish.objects import allgather_object, broadcast_object
from horovodish.process_api import *  # noqa: F403

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "grad",
    "grouped_allreduce",
    "join",
    "reducescatter",
    "value_and_grad",
]
__all__ += _process_api.__all__

if not _typing.TYPE_CHECKING:  # for a type checker, any name would exist

    def __getattr__(name: str) -> object:
        return _missing_names.look_up(__name__, name)
