"""horovodish for Keras 3: an optimizer that makes a training script data-parallel, on all of Keras's backends.

Example:
    import horovodish.keras as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size()))
    model.compile(optimizer, loss="sparse_categorical_crossentropy")
    model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

    $ KERAS_BACKEND=jax horovodish run -np 4 python train.py
"""

import typing as _typing

if __name__ != "horovodish.keras":
    raise ImportError("import this package as horovodish.keras")

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
from horovodish.collectives import allgather_object, barrier, broadcast_object
from horovodish.errors import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
    MismatchError,
    RankLostError,
    StallError,
    UnsupportedTensorError,
)
from horovodish.keras import callbacks
from horovodish.keras.collectives import allgather, allreduce, broadcast, reducescatter
from horovodish.keras.compression import Compression
from horovodish.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from horovodish.keras.state import broadcast_global_variables, broadcast_variables, load_model
from horovodish.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from horovodish.reduce_ops import Adasum, Average, Max, Min, Product, ReduceOp, Sum
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
    "PartialDistributedOptimizer",
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
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
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
]

if not _typing.TYPE_CHECKING:  # for a type checker, any name would exist

    def __getattr__(name: str) -> object:
        raise _missing_names.error(__name__, name)
