"""Which collectives of a program on a CUDA device take the way over NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovodish._native import DTYPES
from horovodish.collectives import devices
from horovodish.jax.primitive import Traced, by_operation


def problem(traced: Sequence[Traced], arrays: Sequence[Any]) -> str:
    """Why one of them has to go through host memory, the same on all ranks that ask alike; empty when NCCL does all."""
    for each, members in by_operation(traced, arrays):
        if each.operation.kind == "barrier":
            return "a barrier is one of the hosts"
        names = [str(array.dtype) for array in members]
        unknown = [name for name in names if name not in DTYPES]
        why = (
            f"no arrays of {unknown[0]}"
            if unknown
            else devices.problem_for_nccl(each.operation, [DTYPES[name] for name in names])
        )
        if why:
            return f"{each.name}: {why}"
    return devices.problem()
