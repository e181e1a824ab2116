"""What the gradient of a collective is multiplied by: one rule for all frameworks.

With exact gradients a backward pass computes the gradient of the sum of the losses of all ranks. Horovod's gradients
of three collectives are others, by a power of the number of ranks; see the setting `collective_gradients`.
"""

from __future__ import annotations

from typing import Any

from horovodish.collectives.reduce_ops import Average, ReduceOp
from horovodish.runtime import basics

_POWERS_OF_HOROVOD = {"allgather": -1, "broadcast": -1, "reducescatter": 1}


def are_horovods() -> bool:
    """True if this run has Horovod's gradients of collectives, False if it has exact ones.

    Raises:
        NotInitializedError: before `init()`.
    """
    return basics.engine().horovods_gradients


def factor(kind: str, op: ReduceOp, ranks: Any, horovods: bool) -> Any:
    """The factor of the gradient of a collective.

    It multiplies the sum over the ranks of the gradients of an allgather or a broadcast, and the gathered gradients of
    a reducescatter. The gradients of other collectives need no factor.

    Args:
        kind: of the collective in the forward pass, such as "allgather".
        op: of the collective in the forward pass.
        ranks: how many ranks took part; a number or a floating-point tensor of any framework.
        horovods: as `are_horovods()`.

    Returns:
        A power of `ranks`, of its type or a float.

    Example:
        >>> factor("reducescatter", Average, 4, horovods=False), factor("allgather", Average, 4, horovods=True)
        (0.25, 0.25)
    """
    exact = -1 if kind == "reducescatter" and op is Average else 0
    return ranks ** (exact + (_POWERS_OF_HOROVOD.get(kind, 0) if horovods else 0))
