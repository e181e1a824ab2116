"""Writes that PyTorch's version counters do not show.

These are steps of optimizers with kernels of their own, and collectives in place, whose tensor may be an alias with a
version of its own, such as `p.data`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["mark", "note", "since"]

MOST_NOTED = 10_000

_numbers = itertools.count(1)
_last = 0
_stepped = 0  # the number of the last step of an optimizer, or of what is no longer noted one by one
_collectives: dict[int, int] = {}  # the number of the last collective into each storage, by its address


def mark() -> int:
    """Now, for `since()`."""
    return _last


def note(tensor: Tensor) -> None:
    """A collective begins to write into a tensor."""
    global _last
    if len(_collectives) >= MOST_NOTED:
        _collectives.clear()
        _step()
    _last = _collectives[tensor.untyped_storage().data_ptr()] = next(_numbers)


def since(mark: int, tensors: Iterable[Tensor]) -> bool:
    """Whether some of these tensors may have been written to since a mark."""
    return _stepped > mark or any(_collectives.get(tensor.untyped_storage().data_ptr(), 0) > mark for tensor in tensors)


def _step(*_: object) -> None:
    global _last, _stepped
    _last = _stepped = next(_numbers)


register_optimizer_step_pre_hook(_step)
