"""Collectives on whatever Keras's backend uses, and on numbers and NumPy arrays."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import keras
import numpy as np

from horovodish import collectives as on_arrays
from horovodish.collectives.codecs import CodecCompressor
from horovodish.collectives.documentation import documented_as
from horovodish.collectives.functions import barrier
from horovodish.collectives.process_sets import ProcessSet, global_process_set
from horovodish.collectives.reduce_ops import Average, ReduceOp
from horovodish.gradients.compression import Compressor, check_compression
from horovodish.keras.backends import collectives
from horovodish.keras.compression import Compression

__all__ = ["allgather", "allreduce", "barrier", "broadcast", "join", "reducescatter"]


@documented_as(on_arrays.allreduce)
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
    """In a compiled step it does not block. For tensors it is as differentiable as the backend's own collective.

    Args:
        value: a tensor or variable of Keras's backend, a NumPy array or a number; of one shape and dtype on every rank.
        compression: a cast or a codec for the value; see `Compression`.

    Returns:
        A tensor for a tensor or variable, otherwise a NumPy array or number.

    Raises:
        What the collectives of the backend's module raise.

    Example:
        >>> accuracy = hvd.allreduce(accuracy)
    """
    codec: dict[str, Any] = {}
    if isinstance(check_compression(compression), CodecCompressor):
        codec, compression = {"compression": compression}, Compression.none
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
        **codec,
    )
    return _as_given(compression.decompress(reduced, context), value)


@documented_as(on_arrays.allgather)
def allgather(value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Blocks as `allreduce`.

    Args:
        value: as for `allreduce`; the first dimension may differ between ranks.

    Returns:
        As `allreduce`, with the sum of the ranks' first dimensions.

    Example:
        >>> predictions = hvd.allgather(predictions)
    """
    value = _plain(value)
    return _module_for(value).allgather(value, name=name, process_set=process_set)


@documented_as(on_arrays.broadcast)
def broadcast(value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Blocks as `allreduce`.

    Args:
        value: as for `allreduce`.

    Returns:
        As `allreduce`, with the root's values.

    Example:
        >>> epoch = hvd.broadcast(epoch, root_rank=0)
    """
    plain = _plain(value)
    return _as_given(_module_for(plain).broadcast(plain, root_rank, name=name, process_set=process_set), value)


@documented_as(on_arrays.reducescatter)
def reducescatter(
    value: Any, name: str | None = None, op: ReduceOp = Average, process_set: ProcessSet = global_process_set
) -> Any:
    """Blocks as `allreduce`.

    Args:
        value: as for `allreduce`, of at least one dimension.

    Returns:
        As `allreduce`; the first ranks have a row more where rows cannot be split evenly.

    Example:
        >>> own_rows = hvd.reducescatter(values)
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


@documented_as(on_arrays.join)
def join(device: int = -1) -> int:
    """It is the `join` of the backend's module.

    Args:
        device: the CUDA device for this rank's part in collectives of CUDA tensors, if it has used none before; on
            PyTorch the current one when not given.

    Example:
        >>> for batch in batches_of_this_rank:  # as many as there are, not equally many on every rank
        ...     train(batch)
        >>> last = hvd.join()
        >>> hvd.broadcast_global_variables(last, model)
    """
    last: int = collectives().join(device)
    return last
