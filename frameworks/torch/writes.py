"""Writes that PyTorch's version counters do not show.

These are steps of optimizers with kernels of their own, and collectives in place, whose tensor may be an alias with a
version of its own, such as `p.data`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from horovodish.runtime.process import part

__all__ = ["mark", "note", "since"]

MOST_NOTED = 10_000


@dataclass
class _Writes:
    """Numbers of writes, counted by the rank.

    Attributes:
        last: of the last write.
        stepped: of the last step of an optimizer, or of the writes that are no longer noted one by one.
        collectives: of the last collective into each storage, by its address.
    """

    last: int = 0
    stepped: int = 0
    collectives: dict[int, int] = field(default_factory=dict)

    def step(self) -> None:
        self.last = self.stepped = self.last + 1


def mark() -> int:
    """Now, for `since()`."""
    return part(_Writes).last


def note(tensor: Tensor) -> None:
    """A collective begins to write into a tensor."""
    writes = part(_Writes)
    if len(writes.collectives) >= MOST_NOTED:
        writes.collectives.clear()
        writes.step()
    writes.last += 1
    writes.collectives[tensor.untyped_storage().data_ptr()] = writes.last


def since(mark: int, tensors: Iterable[Tensor]) -> bool:
    """Whether some of these tensors may have been written to since a mark."""
    writes = part(_Writes)
    if writes.stepped > mark:
        return True
    return any(writes.collectives.get(tensor.untyped_storage().data_ptr(), 0) > mark for tensor in tensors)


register_optimizer_step_pre_hook(lambda *_: part(_Writes).step())
