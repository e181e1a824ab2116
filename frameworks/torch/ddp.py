"""DistributedDataParallel beside our optimizer."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

__all__ = ["check_no_ddp"]


def check_no_ddp(parameters: Iterable[Tensor]) -> None:
    """Raise if DistributedDataParallel reduces gradients of these parameters, too. Not collective.

    Tools that find RANK in the environment wrap a model by themselves.

    Raises:
        ValueError: that is so.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    own = {id(parameter) for parameter in parameters}
    for each in gc.get_objects():
        if issubclass(type(each), DistributedDataParallel) and own.intersection(map(id, each.parameters())):
            raise ValueError(
                "the gradients of this optimizer would be averaged twice: by DistributedDataParallel, which wraps the "
                "model, and by hvd.DistributedOptimizer. Remedy: leave one of them out. A tool that wraps the model by "
                "itself, because `horovodish run` sets RANK, needs no horovodish.torch"
            )
