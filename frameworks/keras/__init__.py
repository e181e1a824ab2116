# ruff: noqa: F403
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

from horovodish import supported as _frameworks

_frameworks.warn_if_too_old("keras")  # before the imports that a release may break
# isort: split

from horovodish import package_names as _package_names
from horovodish.collectives.objects import *
from horovodish.gradients.sync import *
from horovodish.keras import callbacks as callbacks
from horovodish.keras.broadcast_state import *
from horovodish.keras.collectives import *
from horovodish.keras.compression import *
from horovodish.keras.optimizer import *
from horovodish.keras.sync_batch_norm import *
from horovodish.process_api import *

if not _typing.TYPE_CHECKING:  # for a type checker, any name would exist
    __all__ = ["callbacks", *_package_names.exported(__name__)]

    def __getattr__(name: str) -> object:
        return _package_names.look_up(__name__, name)
