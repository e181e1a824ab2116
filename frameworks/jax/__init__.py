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

from horovodish import missing_names as _missing_names
from horovodish.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
)
from horovodish.collectives import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    ReduceOp,
    Sum,
    allgather_object,
    broadcast_object,
)
from horovodish.errors import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
    MismatchError,
    RankLostError,
    StallError,
    UnsupportedTensorError,
)
from horovodish.jax import eager, lowering, transformations  # noqa: F401, they tell JAX what to do
from horovodish.jax.collectives import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    grouped_allreduce,
    reducescatter,
)
from horovodish.jax.compression import Compression
from horovodish.jax.gradients import grad, value_and_grad
from horovodish.jax.optimizer import DistributedOptimizer
from horovodish.jax.state import broadcast_optimizer_state, broadcast_parameters
from horovodish.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from horovodish.recovery import surviving_communicator
from horovodish.stragglers import straggler_report
from horovodish.timeline import start_timeline, stop_timeline

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "MismatchError",
    "ProcessSet",
    "Product",
    "RankLostError",
    "ReduceOp",
    "StallError",
    "Sum",
    "UnsupportedTensorError",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grad",
    "grouped_allreduce",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "straggler_report",
    "surviving_communicator",
    "value_and_grad",
]

if not _typing.TYPE_CHECKING:  # for a type checker, any name would exist

    def __getattr__(name: str) -> object:
        raise _missing_names.error(__name__, name)
