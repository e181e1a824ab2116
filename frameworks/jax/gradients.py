"""`grad` and `value_and_grad` that give the gradients of all ranks, for training loops without an optax optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from horovodish.compression import Compressor
from horovodish.jax.compression import Compression
from horovodish.jax.reduction import Reduction
from horovodish.process_sets import ProcessSet, global_process_set
from horovodish.reduce_ops import Average, ReduceOp


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    op: ReduceOp = Average,
    compression: Compressor = Compression.none,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> Callable[..., tuple[Any, Any]]:
    """As `jax.value_and_grad`, with gradients that are reduced over the ranks. What it gives is collective.

    The value, and what comes with it, are this rank's own.

    Args:
        fun: as for `jax.value_and_grad`; decorated before `init()` or after it.
        argnums: as there.
        has_aux: as there.
        op, compression, gradient_predivide_factor, process_set, name: as for `DistributedOptimizer`.

    Returns:
        A function that gives the value and the gradients.

    Raises:
        ValueError, TypeError: as `DistributedOptimizer`.

    Example:
        >>> loss, gradients = hvd.value_and_grad(loss_of)(parameters, batch)
        >>> parameters = jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients)
    """
    reduce = Reduction.named("gradients", name, op, compression, gradient_predivide_factor, process_set)
    local = jax.value_and_grad(fun, argnums, has_aux)

    @functools.wraps(fun)
    def reduced(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        value, gradients = local(*args, **kwargs)
        return value, reduce(gradients)

    return reduced


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    op: ReduceOp = Average,
    compression: Compressor = Compression.none,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> Callable[..., Any]:
    """As `jax.grad`, with gradients that are reduced over the ranks. What it gives is collective.

    Args:
        fun: as for `jax.grad`.
        argnums: as there.
        has_aux: as there.
        op, compression, gradient_predivide_factor, process_set, name: as for `DistributedOptimizer`.

    Returns:
        A function that gives the gradients; with `has_aux` a pair of them and of this rank's auxiliary value.

    Raises:
        ValueError, TypeError: as `DistributedOptimizer`.

    Example:
        >>> gradients = jax.jit(hvd.grad(loss_of))(parameters, batch)
    """
    both = value_and_grad(
        fun,
        argnums,
        has_aux,
        op=op,
        compression=compression,
        gradient_predivide_factor=gradient_predivide_factor,
        process_set=process_set,
        name=name,
    )

    @functools.wraps(fun)
    def reduced(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return reduced
