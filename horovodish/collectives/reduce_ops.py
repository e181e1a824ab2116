"""How a reduction combines the ranks' values: the `ReduceOp` objects and Horovod's older `average` argument."""

from __future__ import annotations

import enum

from horovodish._native import REDUCE_OPS

__all__ = ["Adasum", "Average", "Max", "Min", "Product", "ReduceOp", "Sum"]


class ReduceOp(enum.IntEnum):
    """How the values of the ranks become one value.

    float16 and bfloat16 are accumulated in float32 and rounded once for each step of the algorithm. Between hosts the
    steps of an average are sums, which may be too large for float16 though their average is not: give
    `prescale_factor=1 / size()` and `op=Sum`, or `gradient_predivide_factor=size()` to an optimizer.

    Attributes:
        AVERAGE: the sum divided by the number of ranks. Integers round towards zero: -3 over 2 gives -1; their sum
            wraps around on overflow before that.
        SUM: the sum. Integers wrap around on overflow.
        MIN: the smallest value. NaN on any rank gives NaN.
        MAX: the largest value. NaN on any rank gives NaN.
        PRODUCT: the product. Integers wrap around on overflow.
        ADASUM: a sum that counts the common part of the ranks' values once, for gradients of large batches:
            (1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b for two ranks, and so on for neighbours up a binary tree, for
            each array by itself. Any number of ranks; floating-point numbers and allreduce only. Maleki et al.,
            "Scaling Distributed Training with Adaptive Summation", 2020, arXiv:2006.02924.
    """

    AVERAGE = REDUCE_OPS["average"]
    SUM = REDUCE_OPS["sum"]
    ADASUM = REDUCE_OPS["adasum"]
    MIN = REDUCE_OPS["min"]
    MAX = REDUCE_OPS["max"]
    PRODUCT = REDUCE_OPS["product"]


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


def chosen_op(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    """The reduce op that a call asks for, from `op` or from Horovod's older `average`.

    Args:
        average: True for `Average`, False for `Sum`, None when not given.
        op: a reduce op, None when not given.

    Returns:
        `op`, or what `average` stands for, or `Average` when neither is given.

    Raises:
        ValueError: both are given, or `op` is not a reduce op.

    Example:
        >>> chosen_op(average=False, op=None).name
        'SUM'
    """
    if average is not None:
        if op is not None:
            raise ValueError("average= and op= were both given; op= says the same and more, so leave out average=")
        return Average if average else Sum
    if op is None:
        return Average
    if not isinstance(op, ReduceOp):
        raise ValueError(f"op={op!r} is not a reduce op; use one of Average, Sum, Adasum, Min, Max, Product")
    return op
