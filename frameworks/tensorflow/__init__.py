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

import typing as _typing

if __name__ != "horovodish.tensorflow":
    raise ImportError("import this package as horovodish.tensorflow")

from horovodish import tested_versions as _tested_versions

_tested_versions.warn_unless_tested("tensorflow")  # before the imports that a release may break
# isort: split
from tensorflow import executing_eagerly as _executing_eagerly  # noqa: F401, some scripts call it as Horovod's

from horovodish import missing_names as _missing_names
from horovodish import process_api as _process_api
from horovodish.process_api import *  # noqa: F403
from horovodish.tensorflow import autograd  # noqa: F401, importing it registers the gradients
from horovodish.tensorflow.broadcast_state import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from horovodish.tensorflow.collectives import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from horovodish.tensorflow.compression import Compression
from horovodish.tensorflow.optimizer import DistributedOptimizer
from horovodish.tensorflow.process_ops import (
    barrier,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from horovodish.tensorflow.sessions import BroadcastGlobalVariablesHook, broadcast_global_variables
from horovodish.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape

if _typing.TYPE_CHECKING:
    from horovodish.tensorflow.sync_batch_norm import SyncBatchNormalization

__all__ = [
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]
__all__ += _process_api.__all__

if not _typing.TYPE_CHECKING:  # for a type checker, any name would exist

    def __getattr__(name: str) -> object:
        if name == "SyncBatchNormalization":
            from horovodish.tensorflow.sync_batch_norm import SyncBatchNormalization  # Keras takes a second to import

            return SyncBatchNormalization
        return _missing_names.look_up(__name__, name)
