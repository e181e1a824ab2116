# ruff: noqa: F403
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

from horovodish import supported as _frameworks

_frameworks.warn_if_too_old("torch")  # before the imports that a release may break
# isort: split

from horovodish import package_names as _package_names
from horovodish.collectives.objects import *
from horovodish.gradients.sync import *
from horovodish.process_api import *
from horovodish.torch.broadcast_state import *
from horovodish.torch.collectives import *
from horovodish.torch.compression import *
from horovodish.torch.consistency import *
from horovodish.torch.lone_steps import *
from horovodish.torch.optimizer import *
from horovodish.torch.sampler import *
from horovodish.torch.sparse import *
from horovodish.torch.sync_batch_norm import *

if not _typing.TYPE_CHECKING:  # for a type checker, any name would exist
    __all__ = _package_names.exported(__name__)

    def __getattr__(name: str) -> object:
        return _package_names.look_up(__name__, name)
