"""Which collectives of a program on a CUDA device take the way over NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovodish import _native
from horovodish.collectives import devices
from horovodish.jax.primitive import Collective, by_collective


def problem(collectives: Sequence[Collective], arrays: Sequence[Any]) -> str:
    """Why one of them has to go through host memory, the same on all ranks that ask alike; empty when NCCL does all."""
    for collective, members in by_collective(collectives, arrays):
        if collective.kind == "barrier":
            return "a barrier is one of the hosts"
        names = [str(array.dtype) for array in members]
        unknown = [name for name in names if name not in _native.DTYPES]
        factors = collective.prescale_factor, collective.postscale_factor
        why = (
            f"no arrays of {unknown[0]}"
            if unknown
            else _native.problem_for_nccl(
                _native.KINDS[collective.kind], collective.op, [_native.DTYPES[name] for name in names], *factors
            )
        )
        if why:
            return f"{collective.name}: {why}"
    return devices.problem()
