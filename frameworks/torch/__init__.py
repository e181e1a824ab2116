"""horovodish for PyTorch: collectives on tensors, and an optimizer that makes a training script data-parallel.

Example:
    import horovodish.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    $ horovodish run -np 4 python train.py
"""

if __name__ != "horovodish.torch":
    raise ImportError("import this package as horovodish.torch")

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
from horovodish.collectives import Adasum, Average, Max, Min, Product, ReduceOp, Sum, barrier, poll, synchronize
from horovodish.errors import HorovodInternalError, HostsUpdatedInterrupt
from horovodish.stragglers import straggler_report
from horovodish.timeline import start_timeline, stop_timeline
from horovodish.torch.asynchronous import (
    allgather_async,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    broadcast_,
    broadcast_async,
    broadcast_async_,
)
from horovodish.torch.compression import Compression
from horovodish.torch.differentiable import allgather, allreduce, broadcast
from horovodish.torch.objects import allgather_object, broadcast_object
from horovodish.torch.optimizer import DistributedOptimizer
from horovodish.torch.state import broadcast_optimizer_state, broadcast_parameters

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "straggler_report",
    "synchronize",
]
