"""Elastic training with MLX: `horovodish.elastic` with a state that holds modules, optimizers and arrays."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.optimizers import Optimizer

from horovodish.elastic import HorovodInternalError, HostsUpdatedInterrupt, ObjectState, State, attempt, run
from horovodish.elastic.snapshots import Reference
from horovodish.mlx.collectives import bytes_of, name_of, with_bytes

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "MlxState", "ObjectState", "State", "attempt", "run"]


class MlxState(State):
    """A state whose attributes may hold modules, optimizers and arrays of MLX, also within lists and dicts.

    Modules and optimizers stay the same objects: their parameters and states go back. Other arrays are replaced.

    Args:
        attributes: the first attributes; numbers and everything else that can be pickled may be among them.

    Example:
        >>> state = hvd.elastic.MlxState(model=model, optimizer=optimizer, epoch=0)
    """

    _bytes_of = staticmethod(bytes_of)

    def _keeps(self, value: object) -> bool:
        return isinstance(value, Module | Optimizer) or super()._keeps(value)

    def _kept_of(self, value: Any) -> Any:
        if isinstance(value, Optimizer):
            return value.state
        return value.parameters() if isinstance(value, Module) else super()._kept_of(value)

    def _give_back(self, value: Any, kept: Any) -> None:
        if isinstance(value, Optimizer):
            value.state = kept
        elif isinstance(value, Module):
            value.update(kept)
        else:
            super()._give_back(value, kept)

    def _reference_to(self, value: object) -> Reference | None:
        # A second array of this memory, which nothing writes to: after `x += 1` the object `x` has other memory.
        return Reference(mx.contiguous(value), None) if isinstance(value, mx.array) else None

    def _reduced(self, value: object) -> Any:
        if not isinstance(value, mx.array):
            return NotImplemented
        return _array, (bytes_of(value), name_of(value.dtype), value.shape)


def _array(data: np.ndarray, dtype: str, shape: tuple[int, ...]) -> mx.array:
    return with_bytes(data, mx.bool_ if dtype == "bool" else getattr(mx, dtype), shape)
