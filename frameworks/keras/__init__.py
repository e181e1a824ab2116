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

from horovodish import tested_versions as _tested_versions

_tested_versions.warn_unless_tested("keras")  # before the imports that a release may break
# isort: split

from horovodish import missing_names as _missing_names
from horovodish import process_api as _process_api
from horovodish.collectives import barrier
from horovodish.keras import callbacks
from horovodish.keras.broadcast_state import broadcast_global_variables, broadcast_variables, load_model
from horovodish.keras.collectives import allgather, allreduce, broadcast, join, reducescatter
from horovodish.keras.compression import Compression
from horovodish.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from horovodish.objects import allgather_object, broadcast_object
from horovodish.process_api import *  # noqa: F403

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "join",
    "load_model",
    "reducescatter",
]
__all__ += _process_api.__all__

if not _typing.TYPE_CHECKING:  # for a type checker, any name would exist

    def __getattr__(name: str) -> object:
        return _missing_names.look_up(__name__, name)
