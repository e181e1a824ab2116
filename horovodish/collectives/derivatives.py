"""The gradients of collectives: one rule for all frameworks.

With exact gradients a backward pass computes the gradient of the sum of the losses of all ranks that take part. So
where the forward pass sends values to other ranks, the backward pass brings their gradients back. Horovod's gradients
of three collectives are others, by a power of the number of ranks; see the setting `collective_gradients`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from horovodish.collectives.operation import Operation
from horovodish.collectives.reduce_ops import Average, Sum, chosen_op
from horovodish.runtime import basics

T = TypeVar("T")

_POWERS_OF_HOROVOD = {"allgather": -1, "broadcast": -1, "reducescatter": 1}


def are_horovods() -> bool:
    """True if this run has Horovod's gradients of collectives, False if it has exact ones.

    Raises:
        NotInitializedError: before `init()`.
    """
    return basics.engine().horovods_gradients


def factor(operation: Operation, ranks: Any, horovods: bool) -> Any:
    """The factor of the gradient of a collective.

    It multiplies the sum over the ranks of the gradients of an allgather or a broadcast, and the gathered gradients of
    a reducescatter, whose own two factors are in it. The gradients of other collectives need no factor.

    Args:
        operation: of the forward pass.
        ranks: how many ranks took part; a number or a floating-point tensor of any framework.
        horovods: as `are_horovods()`.

    Returns:
        A number, of the type of `ranks` or a float.

    Example:
        >>> factor(Operation("reducescatter", op=Average), 4, horovods=False)
        0.25
        >>> factor(Operation("allgather"), 4, horovods=True)
        0.25
    """
    exact = -1 if operation.kind == "reducescatter" and chosen_op(operation.average, operation.op) is Average else 0
    power = exact + (_POWERS_OF_HOROVOD.get(operation.kind, 0) if horovods else 0)
    return operation.prescale_factor * operation.postscale_factor * ranks**power


def opposite(operation: Operation, multiplied_by: float = 1.0) -> Operation:
    """The operation that brings the gradients of another one back, without a name.

    Ranks may have gathered different numbers of rows, so all get the sum, and each takes its own rows.

    Args:
        operation: of the forward pass.
        multiplied_by: the factor of a sum.
    """
    kind, process_set = operation.kind, operation.process_set
    if kind in ("allgather", "broadcast"):
        return Operation("allreduce", None, process_set, Sum, postscale_factor=multiplied_by)
    if kind == "reducescatter":
        return Operation("allgather", None, process_set)
    codec = operation.codec and operation.codec._replace(error_feedback=False, start=0)
    return operation._replace(name=None, codec=codec)


def check_linear(operation: Operation, remedy: str, what: str = "gradient") -> None:
    """Raise unless a collective has a gradient.

    Args:
        operation: of the forward pass.
        remedy: what to pass where no gradient is wanted.
        what: it has not.

    Raises:
        NotImplementedError: its op is not linear.
    """
    op = chosen_op(operation.average, operation.op)
    if op not in (Average, Sum):
        prefix = f"{operation.name}: " if operation.name else ""
        raise NotImplementedError(
            f"{prefix}{operation.kind} has a {what} for op=Average and op=Sum only, not for "
            f"op={op.name.capitalize()}; pass {remedy} where none is wanted"
        )


def chosen(values: Iterable[T], has: Sequence[bool]) -> list[T]:
    """The values of the members that have a gradient."""
    return [value for value, it in zip(values, has, strict=False) if it]


def spread(gradients: Iterable[T], has: Sequence[bool]) -> list[T | None]:
    """The opposite of `chosen`: None where there is no gradient."""
    following = iter(gradients)
    return [next(following) if it else None for it in has]
