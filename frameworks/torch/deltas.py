"""`op=Adasum`: every rank takes its own step, and what the steps have changed is reduced."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from horovodish import _native, basics, settings
from horovodish.devices import HOST
from horovodish.errors import from_native
from horovodish.fusion import plan_buckets
from horovodish.process_sets import checked_id
from horovodish.submission import WAIT_SLICE_SECONDS
from horovodish.torch.names import PlanNames
from horovodish.torch.reducer import release
from horovodish.torch.reduction import Reduction
from horovodish.torch.slots import Slot


class DeltaReducer:
    """Reduces the changes that a step has made to named parameters.

    With p0 a parameter before the step and p1 after it, the parameter ends as p0 + op of the ranks' (p1 - p0). An error
    leaves the parameters as they were before the step.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]], reduction: Reduction):
        self._reduction = reduction
        self._named: list[tuple[str, Tensor]] = []
        self._names = PlanNames(reduction.process_set)
        self._engine: _native.Engine | None = None
        self._slots: list[Slot] = []
        self._before: list[Tensor] = []
        self.add(named)

    def add(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Takes parameters in. Every rank must do so at the same point."""
        for _, parameter in named:
            release(parameter)
        self._named = [*self._named, *named]
        self._build()

    def _build(self) -> None:
        self._engine = basics.engine()
        trained = [] if self._reduction.alone else [(name, p) for name, p in self._named if p.requires_grad]
        self._slots = [Slot(name, parameter, self._reduction) for name, parameter in trained]
        if not trained:
            return
        numbers = plan_buckets(
            [slot.size_bytes for slot in self._slots],
            [(slot.dtype, slot.device) for slot in self._slots],
            threshold_bytes=int(settings.load().fusion_threshold_mb * 2**20),
            groups=[self._reduction.groups.get(id(slot.parameter)) for slot in self._slots],
        )
        members = [
            (slot.name, slot.code, slot.shape, number) for slot, number in zip(self._slots, numbers, strict=True)
        ]
        identity = checked_id(self._reduction.process_set)
        self._plan = self._engine.plan(self._names.next(), self._reduction.op, 1.0, 1.0, members, [HOST], identity)

    @torch.no_grad()
    def before_step(self) -> None:
        """Notes where the parameters are."""
        trained = (
            [] if self._reduction.alone else [parameter for _, parameter in self._named if parameter.requires_grad]
        )
        planned = [slot.parameter for slot in self._slots]
        if self._engine is not basics.engine() or [*map(id, trained)] != [*map(id, planned)]:
            self._build()
        self._before = [slot.parameter.detach().clone() for slot in self._slots]

    @torch.no_grad()
    def after_step(self) -> None:
        """Reduces what has changed since. Collective; blocks."""
        before, self._before = self._before, []
        if not before:
            return
        travelling = []
        for index, (slot, start) in enumerate(zip(self._slots, before, strict=True)):
            payload, context = slot.payload(slot.parameter.detach() - start)
            self._plan.submit(index, payload.data_ptr(), payload.data_ptr())
            travelling.append((payload, context))
        while not self._plan.wait(WAIT_SLICE_SECONDS):
            pass
        error = self._plan.error()
        self._plan.reset()
        for slot, start, (payload, context) in zip(self._slots, before, travelling, strict=True):
            slot.parameter.copy_(start if error is not None else start + slot.gradient(payload, context))
        if error is not None:
            raise from_native(*error)
