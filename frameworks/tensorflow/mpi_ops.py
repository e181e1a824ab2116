"""All of `horovodish.tensorflow`, under the name of one of Horovod's modules."""

from typing import Any

from horovodish.collectives.reduce_ops import Sum
from horovodish.tensorflow import *  # noqa: F403
from horovodish.tensorflow import allreduce


def _allreduce(tensor: Any, name: str | None = None, op: Any = Sum, **arguments: Any) -> Any:
    """Some scripts call this function of Horovod's, which sums."""
    return allreduce(tensor, name=name, op=op, **arguments)
