# ruff: noqa: F403
"""horovodish for TensorFlow: collectives as operations, and gradients reduced over all ranks.

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

from horovodish import supported as _frameworks

_frameworks.warn_if_too_old("tensorflow")  # before the imports that a release may break
# isort: split
from tensorflow import executing_eagerly as _executing_eagerly  # noqa: F401, some scripts call it as Horovod's

from horovodish import package_names as _package_names
from horovodish.gradients.sync import *
from horovodish.process_api import *
from horovodish.tensorflow import autograd as _autograd  # noqa: F401, importing it registers the gradients
from horovodish.tensorflow import programs_under_way as _programs_under_way  # noqa: F401
from horovodish.tensorflow.broadcast_state import *
from horovodish.tensorflow.collectives import *
from horovodish.tensorflow.compression import *
from horovodish.tensorflow.optimizer import *
from horovodish.tensorflow.process_ops import *
from horovodish.tensorflow.sessions import *
from horovodish.tensorflow.tape import *

if _typing.TYPE_CHECKING:
    from horovodish.tensorflow.sync_batch_norm import SyncBatchNormalization as SyncBatchNormalization
else:  # for a type checker, any name would exist
    __all__ = ["SyncBatchNormalization", *_package_names.exported(__name__)]

    def __getattr__(name: str) -> object:
        if name == "SyncBatchNormalization":
            from horovodish.tensorflow.sync_batch_norm import SyncBatchNormalization  # Keras takes a second to import

            return SyncBatchNormalization
        return _package_names.look_up(__name__, name)
