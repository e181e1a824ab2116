"""NumPy's arrays, and objects that share memory by DLPack, as the engine needs them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from horovodish import _native
from horovodish.collectives.adapter import Adapter
from horovodish.collectives.arrays import Array, SupportsDLPack, dtype_code, host_array, writable_array
from horovodish.collectives.devices import Placement
from horovodish.collectives.operation import Member
from horovodish.collectives.reduce_ops import ReduceOp

__all__ = ["ARRAYS", "Tensor"]

Tensor = Array | SupportsDLPack


class _ArrayAdapter(Adapter[Array]):
    noun = "array"

    def source(self, tensor: Tensor, name: str) -> Array:
        return host_array(tensor, name)

    def target(self, tensor: Tensor, name: str) -> Array:
        return writable_array(tensor, name)

    def empty(self, source: Array, shape: Sequence[int] | None) -> Array:
        return np.empty(source.shape if shape is None else shape, source.dtype)

    def member(self, source: Array, target: Array | None, name: str, op: ReduceOp | None) -> Member:
        start = _native.address(source)
        target_start = start if target is source else 0 if target is None else _native.address(target)
        return start, target_start, dtype_code(source, name, op=op), source.shape

    def received(self, native: _native.Handle, index: int, source: Array, rows: int, placement: Placement) -> Array:
        gathered = np.frombuffer(native.output(index), np.uint8).view(source.dtype)
        return gathered.reshape(rows, *source.shape[1:])

    def row_counts(self, counts: Sequence[int]) -> Array:
        return np.array(counts, np.int64)


ARRAYS = _ArrayAdapter()
