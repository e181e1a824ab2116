"""horovodish for TensorFlow: collectives as operations, and gradients that are those of all ranks.

Example:
    import horovodish.tensorflow as hvd

    hvd.init()
    hvd.broadcast_variables(model.variables, root_rank=0)

    @tf.function
    def step(inputs, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(inputs))
        tape = hvd.DistributedGradientTape(tape)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

    $ horovodish run -np 4 python train.py
"""

if __name__ != "horovodish.tensorflow":
    raise ImportError("import this package as horovodish.tensorflow")

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
from horovodish.tensorflow import gradients  # noqa: F401, importing it registers them
from horovodish.tensorflow.compression import Compression
from horovodish.tensorflow.movements import allgather, alltoall, broadcast, broadcast_, grouped_allgather
from horovodish.tensorflow.optimizer import DistributedOptimizer
from horovodish.tensorflow.places import (
    barrier,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from horovodish.tensorflow.reductions import allreduce, grouped_allreduce, grouped_reducescatter, reducescatter
from horovodish.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from horovodish.tensorflow.variables import allgather_object, broadcast_object, broadcast_object_fn, broadcast_variables
from horovodish.timeline import start_timeline, stop_timeline

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "MismatchError",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "RankLostError",
    "ReduceOp",
    "StallError",
    "Sum",
    "SyncBatchNormalization",
    "UnsupportedTensorError",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
    "straggler_report",
    "surviving_communicator",
]

_FOR_SESSIONS = "it is for sessions; use broadcast_variables(variables, root_rank)"
_OF_TENSORFLOW_1 = dict.fromkeys(("BroadcastGlobalVariablesHook", "broadcast_global_variables"), _FOR_SESSIONS)


def __getattr__(name: str) -> object:
    if name == "SyncBatchNormalization":
        from horovodish.tensorflow.sync_batch_norm import SyncBatchNormalization  # Keras takes a second to import

        return SyncBatchNormalization
    raise _missing_names.error(__name__, name, _OF_TENSORFLOW_1)
