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

from horovodish import tested_versions as _tested_versions

_tested_versions.warn_unless_tested("torch")  # before the imports that a release may break
# isort: split

from horovodish import missing_names as _missing_names
from horovodish import process_api as _process_api
from horovodish.collectives import Handle, barrier, poll, synchronize
from horovodish.objects import allgather_object, broadcast_object
from horovodish.process_api import *  # noqa: F403
from horovodish.torch.broadcast_state import broadcast_optimizer_state, broadcast_parameters
from horovodish.torch.collectives import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    reducescatter,
    reducescatter_async,
)
from horovodish.torch.compression import Compression
from horovodish.torch.consistency import check_consistency
from horovodish.torch.optimizer import DistributedOptimizer
from horovodish.torch.sampler import ResumableSampler
from horovodish.torch.sparse import sparse_allreduce_async
from horovodish.torch.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "Handle",
    "ResumableSampler",
    "SyncBatchNorm",
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
    "check_consistency",
    "convert_sync_batchnorm",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]
__all__ += _process_api.__all__

if not _typing.TYPE_CHECKING:  # for a type checker, any name would exist

    def __getattr__(name: str) -> object:
        return _missing_names.look_up(__name__, name)
