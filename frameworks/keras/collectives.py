"""Collectives on whatever Keras's backend uses, and on numbers and NumPy arrays."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import keras
import numpy as np

from horovodish import collectives as on_arrays
from horovodish.collectives.functions import barrier
from horovodish.collectives.process_sets import ProcessSet, global_process_set
from horovodish.collectives.reduce_ops import Average, ReduceOp
from horovodish.gradients.compression import Compressor
from horovodish.keras.backends import collectives
from horovodish.keras.compression import Compression

__all__ = ["allgather", "allreduce", "barrier", "broadcast", "join", "reducescatter"]


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: Compressor = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a value over the ranks. Collective; blocks, except in a compiled step.

    Args:
        value: a tensor or variable of Keras's backend, a NumPy array or a number; of one shape and dtype on every rank.
        name: the operation's name, the same on every rank; counted when not given.
        average: Horovod's older way to say `op`: Average or Sum.
        prescale_factor, postscale_factor: multiply before and after the reduction.
        op: `Average` when not given, `Sum`, `Adasum`, `Min`, `Max` or `Product`.
        compression: what travels instead of the value.
        process_set: the ranks that take part.

    Returns:
        A tensor for a tensor or variable, otherwise a NumPy array or number. That of a tensor is as differentiable as
        the backend's own collective.

    Raises:
        What the collectives of the backend's module raise; for other values see `horovodish.collectives`.

    Example:
        >>> accuracy = hvd.allreduce(accuracy)
    """
    payload, context = compression.compress(_plain(value))
    module: ModuleType = collectives() if keras.ops.is_tensor(payload) else on_arrays
    reduced = module.allreduce(
        payload,
        average=average,
        name=name,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )
    return _as_given(compression.decompress(reduced, context), value)


def allgather(value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Put the values of all ranks one after another, in the order of the ranks. Collective; blocks as `allreduce`.

    Args:
        value: as for `allreduce`; the first dimension may differ between ranks.
        name, process_set: as for `allreduce`.

    Returns:
        As `allreduce`, with the sum of the ranks' first dimensions.
    """
    value = _plain(value)
    return _module_for(value).allgather(value, name=name, process_set=process_set)


def broadcast(value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Give every rank the value of one. Collective; blocks as `allreduce`.

    Args:
        value: as for `allreduce`.
        root_rank: whose value to give, the same on every rank; a rank of the world.
        name, process_set: as for `allreduce`.

    Returns:
        As `allreduce`.
    """
    plain = _plain(value)
    return _as_given(_module_for(plain).broadcast(plain, root_rank, name=name, process_set=process_set), value)


def reducescatter(
    value: Any, name: str | None = None, op: ReduceOp = Average, process_set: ProcessSet = global_process_set
) -> Any:
    """Reduce a value over the ranks and give each rank its rows of the result. Collective; blocks as `allreduce`.

    Args:
        value: as for `allreduce`, of at least one dimension.
        name, op, process_set: as for `allreduce`.

    Returns:
        As `allreduce`; the first ranks have a row more where rows cannot be split evenly.
    """
    value = _plain(value)
    return _module_for(value).reducescatter(value, name=name, op=op, process_set=process_set)


def _module_for(value: Any) -> ModuleType:
    return collectives() if keras.ops.is_tensor(value) else on_arrays


def _plain(value: Any) -> Any:
    if isinstance(value, keras.Variable):
        return keras.ops.convert_to_tensor(value)
    return value if keras.ops.is_tensor(value) else np.asarray(value)


def _as_given(result: Any, value: Any) -> Any:
    """The result as the kind of thing that the caller gave: a number for a number."""
    if keras.ops.is_tensor(result) and not isinstance(value, keras.Variable) and not keras.ops.is_tensor(value):
        result = keras.ops.convert_to_numpy(result)
    return result[()] if isinstance(result, np.ndarray) else result


def join(device: int = -1) -> int:
    """Say that this rank is out of data, by the `join` of the backend's module. Collective; blocks.

    Until all ranks have joined, an Average divides by the ranks that have not. `horovodish.collectives.join` says when
    it divides by all ranks, as Horovod does.

    Args:
        device: the CUDA device with which this rank takes part in collectives of CUDA tensors, if it has used none
            before; on PyTorch the current one when not given.

    Returns:
        The rank that joined last: the one that has seen all data.

    Raises:
        As `horovodish.collectives.join`.

    Example:
        >>> for batch in batches_of_this_rank:  # as many as there are, not equally many on every rank
        ...     train(batch)
        >>> last = hvd.join()
        >>> hvd.broadcast_global_variables(last, model)
    """
    last: int = collectives().join(device)
    return last
