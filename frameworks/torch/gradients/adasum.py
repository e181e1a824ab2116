"""`op=Adasum`: every rank takes its own step, and what the steps have changed is reduced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from horovodish import _native
from horovodish.collectives.consistency import Checksums, details, is_due, warn_of_difference
from horovodish.collectives.devices import HOST
from horovodish.collectives.process_sets import checked_id
from horovodish.collectives.submission import WAIT_SLICE_SECONDS, Handle, counted
from horovodish.errors import from_native
from horovodish.gradients import windows
from horovodish.gradients.layouts import Comparison, compare_layouts
from horovodish.gradients.options import GradientOptions
from horovodish.gradients.plan import plan_buckets
from horovodish.runtime import basics
from horovodish.torch.gradients.reducer import release
from horovodish.torch.gradients.slot import Slot, members_of
from horovodish.torch.names import Names, PlanNames
from horovodish.torch.tensors import BROADCAST_REMEDY, parameter_checksums


class DeltaReducer:
    """Reduces the changes that a step has made to an optimizer's parameters.

    With p0 a parameter before the step and p1 after it, the parameter ends as p0 + op of the ranks' (p1 - p0). An error
    leaves the parameters as they were before the step. If Ctrl-C interrupts the wait, the next
    `synchronize()` finishes the reduction.
    """

    def __init__(self, parameters: Names, options: GradientOptions):
        self._parameters = parameters
        self._options = options
        self._named: list[tuple[str, Tensor]] = []
        self._names = PlanNames(options.process_set, "updates")
        self._engine: _native.Engine | None = None
        self._compared_on: _native.Engine | None = None  # parameters with the other ranks, after the first step
        self._comparison: Handle[Comparison] | None = None
        self._checksums: Checksums = {}
        self._slots: list[Slot] = []
        self._before: list[Tensor] = []
        self._travelling: list[tuple[Tensor, Any]] = []  # the engine reads and writes this memory
        self._submitted = 0  # of these
        self._accumulated = _Accumulated()
        self.renew()
        windows.follow(self)

    def renew(self) -> None:
        """Makes a plan for the parameters that the optimizer has now. Every rank must do so at the same point.

        An error leaves everything as it was.
        """
        self.synchronize()
        before = self._named
        self._named = self._parameters.current(before)
        try:
            self._build()
        except BaseException:
            self._named = before
            raise
        self._parameters.note()
        had = {id(parameter) for _, parameter in before}
        for _, parameter in self._named:
            if id(parameter) in had:
                continue
            release(parameter)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._accumulated.take)

    def is_open(self) -> bool:
        """Whether there are gradients that no step has used."""
        return any(parameter.grad is not None for parameter in self._accumulated.parameters)

    def restart(self) -> None:
        """Forgets the gradients, and what was under way among other ranks: the parameters are as before that step."""
        self.synchronize()
        self._accumulated.parameters.clear()
        for _, parameter in self._named:
            parameter.grad = None

    def __del__(self) -> None:
        self._keep_what_travels()

    def _keep_what_travels(self) -> None:
        if self._travelling:
            self._plan.keep(self._travelling)

    def _build(self) -> None:
        self._engine = basics.engine()
        trained = [] if self._options.alone else [(name, p) for name, p in self._named if p.requires_grad]
        self._slots = [Slot(name, parameter, self._options) for name, parameter in trained]
        if not trained:
            return
        groups = self._options.groups_of([slot.parameter for slot in self._slots])
        payloads = [slot.payload_in(group) for slot, group in zip(self._slots, groups, strict=True)]
        buckets = plan_buckets(payloads, int(basics.running().settings.fusion_threshold_mb * 2**20))
        members = members_of(self._slots, buckets)
        identity = checked_id(self._options.process_set)
        self._name = self._names.next()
        self._plan = self._engine.plan(self._name, self._options.op, 1.0, 1.0, members, [HOST], identity)

    def zeroed(self) -> None:
        """Nothing, because gradients are not reduced."""

    @property
    def interrupted(self) -> bool:
        """True if a reduction has begun and not ended."""
        return bool(self._travelling) or self._comparison is not None

    @torch.no_grad()
    def before_step(self) -> None:
        """Notes where the parameters are, after an interrupted reduction has ended."""
        self.synchronize()
        if self._parameters.changed():
            self.renew()
        trained = [] if self._options.alone else [parameter for _, parameter in self._named if parameter.requires_grad]
        planned = [slot.parameter for slot in self._slots]
        if self._engine is not basics.engine() or [*map(id, trained)] != [*map(id, planned)]:
            self._build()
        self._before = [slot.parameter.detach().clone() for slot in self._slots]

    @torch.no_grad()
    def after_step(self) -> None:
        """Reduces what has changed since. Collective; blocks."""
        self._accumulated.parameters.clear()
        try:
            # Prepare every payload before submitting any: if one fails, nothing has been sent.
            travelling = [
                slot.payload(slot.parameter.detach() - start)
                for slot, start in zip(self._slots, self._before, strict=True)
            ]
        except BaseException:
            self._put_back()
            self._before = []
            raise
        self._travelling = travelling
        if travelling:
            basics.engine().begin_step()
        self.synchronize()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Submits what has not been submitted, waits and applies the result. Collective; blocks."""
        if not self.interrupted:
            return
        if self._engine is not basics.engine():
            if self._travelling:
                self._keep_what_travels()
                self._put_back()
                self._forget()
            self._comparison = None
            return
        if self._travelling:
            self._reduce()
            self._step = counted(f"reductions of {self._name}", checked_id(self._options.process_set))
            if self._compared_on is not self._engine or is_due(self._step, 1):
                self._checksums = parameter_checksums(self._named)
                self._comparison = compare_layouts(
                    [], self._name, self._options.process_set, self._checksums, shown=self._named[0][0]
                )
        if self._comparison is not None:
            found, self._comparison = self._comparison.wait(), None
            if found.ranks == self._options.process_set.size():  # one that has joined would not know, and may come back
                self._compared_on = self._engine
            if found.differs:
                of_ranks = details(self._checksums, self._name, self._options.process_set)
                warn_of_difference(
                    of_ranks.wait(), self._name, self._options.process_set, BROADCAST_REMEDY, step=self._step
                )

    def _reduce(self) -> None:
        plan = self._plan
        for payload, _ in self._travelling[self._submitted :]:
            plan.submit(self._submitted, payload.data_ptr(), payload.data_ptr())
            self._submitted += 1
        while not plan.wait(WAIT_SLICE_SECONDS):
            pass
        error = plan.error()
        if error is None:
            for slot, start, (payload, context) in zip(self._slots, self._before, self._travelling, strict=True):
                slot.parameter.copy_(start + slot.gradient(payload, context))
        else:
            self._keep_what_travels()
            self._put_back()
        plan.reset()
        self._forget()
        if error is not None:
            raise from_native(*error)

    def _put_back(self) -> None:
        for slot, start in zip(self._slots, self._before, strict=True):
            slot.parameter.copy_(start)

    def _forget(self) -> None:
        self._travelling, self._before, self._submitted = [], [], 0


class _Accumulated:
    """The parameters whose gradients no step has used. The hooks refer to this, and not to the reducer."""

    def __init__(self) -> None:
        self.parameters: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def take(self, parameter: Tensor) -> None:
        """A backward has added to the gradient of a parameter."""
        self.parameters[parameter] = True
