"""Calls that differ from an earlier one only in their memory and their counted name: what the engine knows of them."""

from __future__ import annotations

from typing import Any

from horovodish import _native
from horovodish.collectives.operation import Operation
from horovodish.collectives.reduce_ops import ReduceOp
from horovodish.runtime import basics
from horovodish.runtime.process import part

__all__ = ["earlier_call", "keep_call"]

Key = tuple[_native.Engine, int, Operation, int, tuple[int, ...]]
"""The engine, the number of the process set, the operation as the caller gave it, and the tensor's dtype and shape.

The engine: another thread may call `shutdown()` and `init()` before a call is kept.
"""
_MOST = 1024
"""How many calls are kept. There is a limit because a script may give each call its own name."""
_NUMBERS = {int, float}
_OPS = {ReduceOp, type(None)}


class _Calls(dict[Any, _native.Handle]):
    """The handles of a rank's calls that were right, by all that such calls have in common."""


def earlier_call(key: Key) -> _native.Handle | None:
    """The handle of an earlier call of one tensor in host memory, whose result has the shape of the tensor."""
    try:
        return part(_Calls).get(key) if _can_be_kept(key[2]) else None
    except TypeError:  # something in the operation has no hash
        return None


def keep_call(key: Key, native: _native.Handle) -> None:
    """For `earlier_call`, once such a call has succeeded. Leaves out a factor that could change, such as a tensor."""
    calls = part(_Calls)
    if _can_be_kept(key[2]):
        if len(calls) >= _MOST:
            calls.clear()
        calls[key] = native


def _can_be_kept(operation: Operation) -> bool:
    """Whether an equal operation means the same. Python takes 1, 1.0 and an op's number for equal, and 0.0 and -0.0."""
    before, after = operation.prescale_factor, operation.postscale_factor
    return (
        type(before) in _NUMBERS
        and type(after) in _NUMBERS
        and type(operation.op) in _OPS
        and type(operation.root_rank) is int
        and bool(before and after)
    )


def _forget() -> None:
    part(_Calls).clear()


basics.follow(stopped=_forget)
