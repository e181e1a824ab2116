"""How an optimizer's gradients are reduced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from horovodish import settings
from horovodish.compression import Compressor
from horovodish.process_sets import ProcessSet
from horovodish.reduce_ops import ReduceOp


@dataclass(frozen=True)
class Reduction:
    """The arguments of `DistributedOptimizer` that say how gradients are reduced.

    Attributes:
        groups: the number of its group, by the id of a parameter; those of one group share a bucket.
    """

    op: ReduceOp
    compression: Compressor
    prescale_factor: float
    postscale_factor: float
    groups: Mapping[int, int]
    sparse_as_dense: bool
    process_set: ProcessSet

    @property
    def alone(self) -> bool:
        """Whether this rank has nobody to reduce with: it is the only one, or outside the process set."""
        if not self.process_set.included():
            return True
        return self.process_set.size() == 1 and settings.load(warn=lambda _: None).plane != "nccl"
