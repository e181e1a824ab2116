"""Ranks that take steps of their own and meet: `op=Adasum` after every step, `sync=` after rounds of many."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from horovodish import _native
from horovodish.collectives.consistency import details, is_due, warn_of_difference
from horovodish.collectives.devices import HOST
from horovodish.collectives.operation import text_of
from horovodish.collectives.process_sets import checked_id
from horovodish.collectives.submission import counted
from horovodish.gradients import windows
from horovodish.gradients.layouts import compare_layouts
from horovodish.gradients.options import GradientOptions
from horovodish.gradients.plan import plan_buckets
from horovodish.gradients.sync import Sync, fragments_of, ranks_within
from horovodish.runtime import basics
from horovodish.torch import cuda
from horovodish.torch.compression import Compression
from horovodish.torch.gradients.fragments import Fragment, Place
from horovodish.torch.gradients.planned import release
from horovodish.torch.gradients.reducer import Reducer
from horovodish.torch.gradients.slot import Slot, members_of
from horovodish.torch.names import Names, PlanNames
from horovodish.torch.tensors import BROADCAST_REMEDY, parameter_checksums


class StepReducer(windows.Round):
    """Reduces the changes that steps have made to an optimizer's parameters.

    With p0 a parameter when a round begins and p1 at its end, the parameter becomes what the policy makes of p0 and of
    the reduced p1 - p0. An error puts the parameters back to where the round began. If Ctrl-C interrupts the wait, the
    next call ends the meeting.

    Attributes:
        policy: says when the ranks meet.
        steps: how many steps the optimizer has taken.
        gradients: reduces gradients in every step, where the policy wants that; None: each rank uses its own.
    """

    steps = 0

    def __init__(self, parameters: Names, options: GradientOptions):
        self._parameters = parameters
        self._names_of_gradients = copy(parameters)
        self._options = options
        self._fragments: list[Fragment] = []
        self._shown: Fragment | None = None  # all parameters, without compression
        self._is_showing = False
        self.policy = options.sync or Sync(every=1)
        self._of_changes = options.of_changes(self.policy)
        within = ranks_within(self.policy, options.process_set)
        self._of_gradients = replace(options, process_set=within or options.process_set)
        self.gradients: Reducer | None = None
        self._named: list[tuple[str, Tensor]] = []
        self._removed: list[tuple[str, Tensor]] = []  # from the optimizer within a round, until the round ends
        self._names = PlanNames(options.process_set, "updates")
        self._engine: _native.Engine | None = None
        self._places: Any = WeakIdKeyDictionary()
        self._accumulated = _Accumulated()
        self.renew()
        windows.follow(self)

    def renew(self) -> None:
        """Makes a plan for the parameters that the optimizer has now. Every rank must do so at the same point.

        An error leaves everything as it was.
        """
        self._land_all()
        before = self._named, self._removed
        self._named = self._parameters.current(self._named)
        has = {id(parameter) for _, parameter in self._named}
        self._removed = [pair for pair in self._removed if id(pair[1]) not in has]
        self._removed += [(f"{name}, removed", each) for name, each in before[0] if id(each) not in has]
        try:
            self._build()
        except BaseException:
            self._named, self._removed = before
            raise
        self._parameters.note()
        had = {id(parameter) for _, parameter in before[0]}
        for _, parameter in self._named:
            if id(parameter) not in had:
                release(parameter)
        self._accumulated.follow(self._named)
        if self.gradients is not None:
            self.gradients.renew()
        self._choose_gradients()

    def _choose_gradients(self) -> None:
        """Begin or end to reduce gradients, as the policy wants it for the next step."""
        wanted = self.policy.within is not None or self.steps < self.policy.after
        if wanted and self.gradients is None:
            self.gradients = Reducer(copy(self._names_of_gradients), self._of_gradients)
        elif not wanted and self.gradients is not None:
            self.gradients.let_go()
            self.gradients = None

    def set_passes(self, passes: int) -> None:
        """Change how many backwards accumulate before gradients are reduced."""
        self._of_gradients = replace(self._of_gradients, passes=passes)
        if self.gradients is not None:
            self.gradients.passes_per_step = passes

    def is_open(self) -> bool:
        """Whether there are gradients that no step has used, or steps of this rank that no other rank knows of."""
        has_begun = any(place.start is not None for fragment in self._fragments for place in fragment.places)
        return has_begun or self._accumulated.has_any(self._named)

    def restart(self) -> None:
        """Goes back to where the round began, among other ranks. The next use makes another plan."""
        for fragment in self._fragments:
            fragment.keep()
            self._put_back(fragment)
        self._fragments, self._engine, self._shown = [], None, None
        self._places.clear()
        self._removed = []
        self._accumulated.parameters.clear()
        for _, parameter in self._named:
            parameter.grad = None

    def __del__(self) -> None:
        windows.note_dropped(self)
        for fragment in [*self._fragments, *filter(None, [self._shown])]:
            fragment.keep()

    # -- the plan

    def _trained(self) -> list[tuple[str, Tensor]]:
        meets = self._options.process_set.included() if self._options.sync else not self._options.alone
        # A parameter that is frozen or removed within a round still has a change that the other ranks don't have.
        self._removed = [(name, each) for name, each in self._removed if self._place_of(each).start is not None]
        return [
            (name, each)
            for name, each in (*self._named, *self._removed)
            if meets and (each.requires_grad or self._place_of(each).start is not None)
        ]

    def _goes_on(self, parameter: Tensor) -> bool:
        """Whether steps go on with a parameter."""
        return parameter.requires_grad and all(parameter is not each for _, each in self._removed)

    def _build(self) -> None:
        self._engine = basics.engine()
        trained = self._trained()
        slots = [Slot(name, parameter, self._of_changes) for name, parameter in trained]
        numbers = fragments_of([slot.size_bytes for slot in slots], self.policy.fragments)
        self._fragments, self._shown = [], None
        for number in sorted({*numbers}):
            members = [slot for slot, its in zip(slots, numbers, strict=True) if its == number]
            self._fragments.append(self._fragment(number, members, self._of_changes))

    def _fragment(self, number: int, slots: list[Slot], options: GradientOptions) -> Fragment:
        groups = options.groups_of([slot.parameter for slot in slots])
        payloads = [slot.payload_in(group) for slot, group in zip(slots, groups, strict=True)]
        on_gpu = any(slot.device != HOST for slot in slots)
        buckets = plan_buckets(payloads, int(basics.running().settings.bucket_mb(on_gpu=on_gpu) * 2**20))
        places = [self._place_of(slot.parameter) for slot in slots]
        if options.alone:
            return Fragment(number, "", slots, places, None, None)
        name = self._names.next()
        codecs = [slots[bucket[0]].codec for bucket in buckets]
        devices = [slots[bucket[0]].device for bucket in buckets]
        # Ranks whose policies differ get a MismatchError.
        label = f" ({self.policy!r})" if self._options.sync else ""
        members = [(member + label, code, shape, bucket) for member, code, shape, bucket in members_of(slots, buckets)]
        plan = basics.engine().plan(
            name,
            options.op,
            1.0,
            1.0,
            members,
            devices,
            checked_id(options.process_set),
            codecs=[text_of(codec and codec._replace(owner=self._names.first)) for codec in codecs],
        )
        return Fragment(number, name, slots, places, plan, cuda.stream_getter(max(devices)))

    # -- at a step

    def zeroed(self) -> None:
        """The gradients were set to None or to zero."""
        if self.gradients is not None:
            self.gradients.zeroed()

    @property
    def interrupted(self) -> bool:
        """Whether a meeting has begun and not ended, though its result is due."""
        of_gradients = self.gradients is not None and self.gradients.interrupted
        return of_gradients or any(map(self._is_due, self._fragments))

    def _is_due(self, fragment: Fragment) -> bool:
        has_arrived = fragment.lands_after is not None and fragment.lands_after <= self.steps
        return has_arrived or fragment.comparison is not None

    @torch.no_grad()
    def before_step(self) -> None:
        """Notes where rounds begin, after meetings that were interrupted have ended."""
        self.check_not_showing("step()")
        self.settle()
        self._follow()
        self._accumulated.follow(self._named)
        if self.steps >= self.policy.after:
            for fragment in self._fragments:
                for slot, place in fragment.members():
                    if place.start is None:
                        place.start = slot.parameter.detach().clone()

    def check_not_showing(self, what: str) -> None:
        """Raise RuntimeError within `synchronized()`, which undoes what `what` would do."""
        if self._is_showing:
            raise RuntimeError(
                f"{what} within synchronized(): its parameters are merged from all ranks, and are dropped at its end. "
                "Remedy: call it outside of the block"
            )

    def _follow(self) -> None:
        """Make another plan if the parameters or the engine have changed."""
        if self._parameters.changed():
            self.renew()
        planned = [slot.parameter for fragment in self._fragments for slot in fragment.slots]
        trained = {id(parameter) for _, parameter in self._trained()}
        if self._engine is not basics.engine() or {*map(id, planned)} != trained:
            self._land_all()
            self._build()

    @torch.no_grad()
    def after_step(self) -> None:
        """Counts the step, and has fragments meet that are due. Collective where there are any; blocks."""
        self._accumulated.parameters.clear()
        self.steps += 1
        if self.gradients is None and self._fragments and not self._options.alone:
            basics.engine().begin_step()
        number = self.steps - self.policy.after
        for fragment in self._fragments if number > 0 else ():
            if self.policy.is_due(number, fragment.number):
                self._send(fragment, self.policy.overlap)
        self._choose_gradients()
        self.settle()

    def _send(self, fragment: Fragment, overlap: int) -> None:
        try:
            self._options.comparison.begin()
            fragment.take([_change(slot.parameter, place) for slot, place in fragment.members()])
        except BaseException:
            self._put_back(fragment)
            raise
        fragment.under_way(self.steps + overlap)
        if overlap:
            for slot, place in fragment.members():
                if self._goes_on(slot.parameter):
                    place.sent = slot.parameter.detach().clone()
        fragment.submit()

    @torch.no_grad()
    def settle(self) -> None:
        """Ends the meetings that are due. Collective where there are any; blocks."""
        for fragment in filter(self._is_due, self._fragments):
            self._land(fragment)

    def _land_all(self) -> None:
        for fragment in self._fragments:
            self._land(fragment)

    def _land(self, fragment: Fragment) -> None:
        if fragment.lands_after is not None:
            if self._engine is not basics.engine():
                fragment.keep()
                self._put_back(fragment)
                return
            self._receive(fragment)
            for slot, place in fragment.members():
                self._take_effect(slot.parameter, place)
            fragment.under_way(None)
            self._begin_to_compare(fragment)
        self._compare(fragment)

    def _receive(self, fragment: Fragment) -> None:
        """Wait for the changes that travel."""
        if not fragment.travelling:
            return
        try:
            self._options.comparison.check()
            changes = fragment.arrived()
        except Exception:
            fragment.keep()
            self._put_back(fragment)
            raise
        for place, change in zip(fragment.places, changes, strict=True):
            place.change = change

    def _merged(self, place: Place, change: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        assert place.start is not None
        memory = self.policy.begin(place.start) if place.memory is None else place.memory
        return self.policy.merge(place.start, change, memory)

    @torch.no_grad()
    def _take_effect(self, parameter: Tensor, place: Place) -> None:
        if place.change is None:
            return
        merged, place.memory = self._merged(place, place.change)
        if place.sent is None:
            parameter.copy_(merged)
            place.start = None
        else:
            parameter.add_(merged - place.sent)
            place.start = merged
        place.change = place.sent = None

    @torch.no_grad()
    def _put_back(self, fragment: Fragment) -> None:
        for slot, place in fragment.members():
            if place.start is not None:
                slot.parameter.copy_(place.start)
            place.start = place.sent = place.change = None
        fragment.under_way(None)

    def _begin_to_compare(self, fragment: Fragment) -> None:
        process_set = self._options.process_set
        if fragment.plan is None:
            return
        fragment.step = counted(f"reductions of {fragment.name}", checked_id(process_set))
        if fragment.is_compared and not is_due(fragment.step, 1):
            return
        elsewhere = {id(slot.parameter) for each in self._fragments if each is not fragment for slot in each.slots}
        starts = {id(slot.parameter): place.start for slot, place in fragment.members() if place.start is not None}
        fragment.checksums = parameter_checksums(
            [(name, starts.get(id(each), each)) for name, each in self._named if id(each) not in elsewhere]
        )
        shown = self._named[0][0]
        fragment.comparison = compare_layouts([], fragment.name, process_set, fragment.checksums, shown=shown)

    def _compare(self, fragment: Fragment) -> None:
        if fragment.comparison is None:
            return
        process_set, name = self._options.process_set, fragment.name
        found, fragment.comparison = fragment.comparison.wait(), None
        if found.ranks == process_set.size():  # one that has joined would not know, and may come back
            fragment.is_compared = True
        if found.differs:
            of_ranks = details(fragment.checksums, name, process_set).wait()
            warn_of_difference(of_ranks, name, process_set, BROADCAST_REMEDY, step=fragment.step)

    # -- outside of a step

    @torch.no_grad()
    def end_round(self) -> None:
        """Make all fragments meet now. Collective; blocks."""
        self._land_all()
        self._follow()
        for fragment in self._fragments:
            if fragment.has_begun():
                self._send(fragment, 0)
        self._land_all()

    @contextmanager
    def synchronized(self) -> Iterator[None]:
        """A context with the parameters that a meeting would give now. Training is not affected. Collective."""
        if self._is_showing:
            raise RuntimeError("synchronized() within synchronized()")
        self.settle()
        self._follow()
        self.note_shown()
        for fragment in self._fragments:
            self._receive(fragment)
        own = [
            (slot.parameter, slot.parameter.detach().clone(), place, copy(place))
            for each in self._fragments
            for slot, place in each.members()
        ]
        self._is_showing = True
        try:
            self._show()
            yield
        finally:
            self._is_showing = False
            with torch.no_grad():
                for parameter, value, place, kept in own:
                    parameter.copy_(value)
                    vars(place).update(vars(kept))

    @torch.no_grad()
    def _show(self) -> None:
        if not any(place.start is not None for fragment in self._fragments for place in fragment.places):
            return
        shown = self._shown
        if shown is None:  # codes would leave out what the next meeting is to send
            options = replace(self._of_changes, compression=Compression.none, codec=None)
            slots = [Slot(slot.name, slot.parameter, options) for each in self._fragments for slot in each.slots]
            shown = self._shown = self._fragment(0, slots, options)
        comparison = self._options.comparison
        comparison.begin()
        if shown.travelling:  # Ctrl-C has interrupted the last look
            comparison.check()
            shown.arrived()
        shown.take([_change(slot.parameter, place) for slot, place in shown.members()])
        shown.submit()
        comparison.check()
        for (slot, place), change in zip(shown.members(), shown.arrived(), strict=True):
            if place.start is not None:
                merged, memory = self._merged(place, change if place.change is None else place.change)
                slot.parameter.copy_(merged)
                vars(place).update(vars(Place(memory=memory)))

    # -- in checkpoints

    def state(self) -> dict[str, Any]:
        """The progress of the rounds: the number of steps, and for each parameter the values of its place except None.

        It waits for what is under way.
        """
        for fragment in self._fragments:
            self._receive(fragment)
        self.note_shown()
        places = {}
        for number, parameter in enumerate(self._parameters.flat()):
            kept = {name: value for name, value in vars(self._place_of(parameter)).items() if value is not None}
            if kept:
                places[number] = kept
        return {"steps": self.steps, "parameters": places}

    def load(self, state: dict[str, Any] | None) -> None:
        """Goes on from what `state()` has given, or from the state of an optimizer that was not wrapped (None)."""
        for fragment in self._fragments:
            self._receive(fragment)
        self.steps = state["steps"] if state else 0
        places = state["parameters"] if state else {}
        for number, parameter in enumerate(self._parameters.flat()):
            copied = tree_map_only(Tensor, functools.partial(_copy_on, parameter.device), places.get(number, {}))
            vars(self._place_of(parameter)).update(vars(Place(**copied)))
        self._choose_gradients()

    def _place_of(self, parameter: Tensor) -> Place:
        place: Place = self._places.setdefault(parameter, Place())
        return place


def _copy_on(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.to(device, copy=True)


def _change(parameter: Tensor, place: Place) -> Tensor:
    """The change of a parameter in its round, as far as it is not reduced."""
    if place.start is None or place.change is not None:
        return torch.zeros_like(parameter)
    return parameter.detach() - place.start


class _Accumulated:
    """The parameters whose gradients no step has used. The hooks refer to this, and not to the reducer."""

    def __init__(self) -> None:
        self.parameters: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._followed: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def follow(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Notice backwards from now on. PyTorch takes no hook for a frozen parameter."""
        for _, parameter in named:
            if parameter.requires_grad and parameter not in self._followed:
                self._followed[parameter] = True
                parameter.register_post_accumulate_grad_hook(self.take)

    def has_any(self, named: Sequence[tuple[str, Tensor]]) -> bool:
        """Whether there are any. One that was unfrozen since the last step has no hook yet."""
        unfrozen = [each for _, each in named if each.requires_grad and each not in self._followed]
        return any(parameter.grad is not None for parameter in [*self.parameters, *unfrozen])

    def take(self, parameter: Tensor) -> None:
        """A backward has added to the gradient of a parameter."""
        self.parameters[parameter] = True
