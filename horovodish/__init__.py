"""horovodish: data-parallel training by wrapping an optimizer, on MPI and NCCL.

This package holds the process API and the collectives on NumPy arrays. `horovodish.torch` and its siblings hold the
same for a framework's tensors, and `DistributedOptimizer`.

    import horovodish as hvd

    hvd.init()
    total = hvd.allreduce(numpy.ones(3), op=hvd.Sum)
"""

import typing

from horovodish import missing_names
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
    Sum,
    allgather,
    allgather_async,
    allgather_object,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    broadcast_object,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    synchronize,
)
from horovodish.errors import (
    DuplicateNameError,
    EngineStoppedError,
    ForkedProcessError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    LaunchError,
    MismatchError,
    NotInitializedError,
    RankLostError,
    SettingError,
    StallError,
    UnsupportedTensorError,
)
from horovodish.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from horovodish.recovery import surviving_communicator
from horovodish.stragglers import RankLateness, StragglerReport, straggler_report
from horovodish.timeline import start_timeline, stop_timeline
from horovodish.version import __version__

if typing.TYPE_CHECKING:
    from horovodish.launcher.run_function import run

__all__ = [
    "Adasum",
    "Average",
    "DuplicateNameError",
    "EngineStoppedError",
    "ForkedProcessError",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "LaunchError",
    "Max",
    "Min",
    "MismatchError",
    "NotInitializedError",
    "ProcessSet",
    "Product",
    "RankLateness",
    "RankLostError",
    "SettingError",
    "StallError",
    "StragglerReport",
    "Sum",
    "UnsupportedTensorError",
    "__version__",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "run",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "straggler_report",
    "surviving_communicator",
    "synchronize",
]

if not typing.TYPE_CHECKING:  # for a type checker, any name would exist

    def __getattr__(name: str) -> object:
        if name == "run":
            from horovodish.launcher.run_function import run  # ranks need no launcher

            return run
        raise missing_names.error(__name__, name)
