"""horovodish for PyTorch: collectives on tensors, and an optimizer that makes a training script data-parallel.

Example:
    import horovodish.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    $ horovodish run -np 4 python train.py
"""

import typing as _typing

if __name__ != "horovodish.torch":
    raise ImportError("import this package as horovodish.torch")

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
    barrier,
    broadcast_object,
    poll,
    synchronize,
)
from horovodish.errors import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
    MismatchError,
    RankLostError,
    StallError,
    UnsupportedTensorError,
)
from horovodish.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from horovodish.recovery import surviving_communicator
from horovodish.stragglers import straggler_report
from horovodish.timeline import start_timeline, stop_timeline
from horovodish.torch.asynchronous import (
    allgather_async,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall_async,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    reducescatter_async,
)
from horovodish.torch.compression import Compression
from horovodish.torch.consistency import check_consistency
from horovodish.torch.differentiable import allgather, allreduce, alltoall, broadcast, reducescatter
from horovodish.torch.grouped import (
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
)
from horovodish.torch.joining import join
from horovodish.torch.optimizer import DistributedOptimizer
from horovodish.torch.sampler import ResumableSampler
from horovodish.torch.schedule import LinearScalingWarmup
from horovodish.torch.sparse import sparse_allreduce_async
from horovodish.torch.state import broadcast_optimizer_state, broadcast_parameters
from horovodish.torch.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "LinearScalingWarmup",
    "Max",
    "Min",
    "MismatchError",
    "ProcessSet",
    "Product",
    "RankLostError",
    "ReduceOp",
    "ResumableSampler",
    "StallError",
    "Sum",
    "SyncBatchNorm",
    "UnsupportedTensorError",
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
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "check_consistency",
    "convert_sync_batchnorm",
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
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "straggler_report",
    "surviving_communicator",
    "synchronize",
]

if not _typing.TYPE_CHECKING:  # for a type checker, any name would exist

    def __getattr__(name: str) -> object:
        raise _missing_names.error(__name__, name)
