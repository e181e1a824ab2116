"""How far the reduction of an optimizer's gradients has come on this rank, and what travels meanwhile."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

from torch import Tensor

from horovodish import _native

__all__ = ["IN_BACKWARD", "Phase", "Travelling"]


class Phase(Enum):
    """How far a reduction has come on this rank.

        IDLE --first hook--> ACCUMULATING --end of backward--> IDLE
          |                    a pass that does not reduce
          |
          +---first hook---> WATCHING ----+
          |                    a pass that reduces; hooks count, its end submits
          +---first hook---> SUBMITTING --+--end of backward, or of one within another--> ENDED
          |                    a pass that reduces; hooks submit                            |
          +---synchronize()------------------------------------------------------------> ENDED
                                                                                            |
        IDLE <--all results are there-- FLUSHED <--all is submitted, layouts are known------+

    After a backward within another one has ended, the next hook of the outer one goes from ENDED to WATCHING or
    SUBMITTING again. A reduction that fails ends in IDLE, and so does one whose plan is replaced. Any other exception,
    such as Ctrl-C, leaves the phase as it is: in all but the first two the reduction is then `interrupted`, and
    `synchronize()` ends it.
    """

    IDLE = auto()
    ACCUMULATING = auto()
    WATCHING = auto()
    SUBMITTING = auto()
    ENDED = auto()
    FLUSHED = auto()


IN_BACKWARD = frozenset({Phase.ACCUMULATING, Phase.WATCHING, Phase.SUBMITTING})


class Travelling:
    """The tensors that were submitted and not waited for, by slot number. The engine reads and writes this memory.

    Attributes:
        gradients: the parameters' gradients.
        payloads: the tensor that travels and its context, where it is not simply the gradient.
        absent: likewise, where there is no gradient.
        sent: numbers of the buckets whose part on this rank is reduced across sets of ranks.
        taken: numbers of the buckets whose results have been written to their places.
    """

    def __init__(self) -> None:
        self.gradients: dict[int, Tensor] = {}
        self.payloads: dict[int, tuple[Tensor, Any]] = {}
        self.absent: dict[int, tuple[Tensor, Any]] = {}
        self.sent: set[int] = set()
        self.taken: set[int] = set()

    def keep(self, plan: _native.BucketPlan) -> None:
        """Leave it to the plan that it was submitted to: the plan has failed, or nobody waits for it any more."""
        memory = [*self.gradients.values(), *self.payloads.values(), *self.absent.values()]
        if memory:
            plan.keep(memory)

    def clear(self) -> None:
        """It has arrived."""
        for each in (self.gradients, self.payloads, self.absent, self.sent, self.taken):
            each.clear()
