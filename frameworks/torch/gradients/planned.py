"""The plan of an optimizer's gradients: its parameters, their hooks, and the buckets.

`reducer.py` reduces them.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from horovodish import _native
from horovodish.collectives.consistency import Checksums
from horovodish.collectives.devices import HOST
from horovodish.collectives.operation import text_of
from horovodish.collectives.process_sets import checked_id
from horovodish.collectives.reduce_ops import Average
from horovodish.collectives.submission import Handle
from horovodish.gradients.autotune import Tuner, Tuning
from horovodish.gradients.layouts import Comparison
from horovodish.gradients.options import GradientOptions
from horovodish.gradients.plan import backward_buckets
from horovodish.runtime import basics
from horovodish.torch import cuda
from horovodish.torch.gradients import unwrapped
from horovodish.torch.gradients.low_rank import LowRankGradients
from horovodish.torch.gradients.phases import Phase, Travelling
from horovodish.torch.gradients.slot import Slot, members_of
from horovodish.torch.gradients.sparse import SparseGradients
from horovodish.torch.names import Names, PlanNames
from horovodish.torch.tensors import parameter_checksums

# Which reducer a parameter's gradient is reduced by: the one that was made last.
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()


class PlannedGradients(ABC):
    """The parameters of an optimizer, their hooks, and the plan of their gradients' buckets.

    Of the optimizer it knows only these, and their names.
    """

    _keeps_whole = True  # every rank gets all elements of a reduced gradient

    def __init__(self, parameters: Names, options: GradientOptions):
        self._parameters = parameters
        # A reduced gradient is set aside before a backward adds to it: Sum and others would change it in the next
        # reduction, and of a sharded one this rank has a part only.
        self._sets_aside = options.op is not Average or not self._keeps_whole
        self._op = options.op
        self._options = options
        self._engine: _native.Engine | None = None
        self._tuner: Tuner | None = None
        self._compared: dict[int, bool] = {}  # whether its gradient is sparse on any rank, by the parameter's id
        self._named: list[tuple[str, Tensor]] = []
        self._hooks: dict[int, list[RemovableHandle]] = {}  # by the parameter's id
        self._phase = Phase.IDLE
        self._plan: _native.BucketPlan | None = None
        self._travelling = Travelling()
        self._names = PlanNames(options.process_set)
        self.renew()

    def renew(self) -> None:
        """Makes a plan for the parameters that the optimizer has now. Every rank must do so at the same point.

        New ones are taken from another reducer if one has them. An error leaves everything as it was.
        """
        before = self._named
        self._named = self._parameters.current(before)
        try:
            self._build()
        except BaseException:
            self.remove_hooks()
            self._named = before
            if before and self._parameters.changed():
                self._build()
            raise
        self._parameters.note()
        now, had = {id(parameter) for _, parameter in self._named}, {id(parameter) for _, parameter in before}
        for _, parameter in before:
            if id(parameter) not in now:
                _owners.pop(parameter, None)
                self._compared.pop(id(parameter), None)
        for _, parameter in self._named:
            if id(parameter) not in had:
                release(parameter)
                _owners[parameter] = weakref.ref(self)

    def _release(self, parameter: Tensor) -> None:
        # The new plan is made when it is needed, if it ever is: this reducer may only wait for the garbage collector.
        self._outdated = True
        self._named = [(name, other) for name, other in self._named if other is not parameter]
        self._compared.pop(id(parameter), None)
        _remove(self._hooks.pop(id(parameter), []))

    def __del__(self) -> None:
        self._keep_what_travels()

    def _keep_what_travels(self) -> None:
        if self._plan is not None:
            self._travelling.keep(self._plan)

    def let_go(self) -> None:
        """Stop reducing the gradients of its parameters."""
        for _, parameter in list(self._named):
            if _owners.get(parameter, lambda: None)() is self:
                release(parameter)

    def remove_hooks(self) -> None:
        """Lets go of the parameters."""
        for handles in self._hooks.values():
            _remove(handles)
        self._hooks = {}

    def _build(self) -> None:
        self.remove_hooks()
        self._keep_what_travels()  # operations of the plan before may still be under way
        self._outdated = True  # until the end, so that after an error the next use tries again
        engine = basics.engine()
        if self._engine is not engine:
            self._tuner = None  # it has measured with other ranks
            self._low_rank = LowRankGradients(self._options)  # they may have begun, without errors
            self._compared = {}  # and some of these may not have compared yet
        self._engine = engine
        self._plan = None
        self._phase = Phase.IDLE
        self._travelling = Travelling()
        self._nodes: list[Any] = []  # autograd keeps no reference to the nodes whose hooks we need
        self._watched: Counter[int] | None = Counter()
        self._comparison: Handle[Comparison] | None = None
        self._checksums: Checksums = {}  # of the parameters, when the ranks compare
        self._met_sparse: set[int] = set()  # parameters that had a sparse gradient on this rank, made dense
        self._unseen: set[int] = set()  # parameters without a gradient on any rank when layouts were compared
        options, low_rank = self._options, self._low_rank
        named = [] if self._is_alone() else [(name, p) for name, p in self._named if self._has_place(p)]
        sparse = [] if options.sparse_as_dense else [(name, p) for name, p in named if self._compared.get(id(p))]
        low_rank.choose((name, p) for name, p in named if self._compared.get(id(p)) is False)
        apart = [*(parameter for _, parameter in sparse), *low_rank.chosen.values()]
        in_no_bucket = {*map(id, apart)}
        trained = [parameter for _, parameter in named]
        self._groups = dict(zip(map(id, trained), options.groups_of(trained), strict=True))
        self._slots = [Slot(low_rank.label(name, p), p, options) for name, p in named if id(p) not in in_no_bucket]
        self._all_compared = all(id(slot.parameter) in self._compared for slot in self._slots)
        self._frozen = [parameter for _, parameter in self._named if not parameter.requires_grad]
        if not named:
            self._outdated = False
            return
        self._name = self._names.next()
        self._sparse = SparseGradients(self._name, sparse, options)
        self._plan = self._make_plan()
        for index, slot in enumerate(self._slots):
            if slot.parameter.requires_grad:
                self._add_hooks(slot.parameter, self._hook(index, slot))
        for parameter in apart:
            self._add_hooks(parameter, self._late_hook)
        self._outdated = False

    def _is_alone(self) -> bool:
        """Whether nothing is reduced."""
        return self._options.alone

    def _has_place(self, parameter: Tensor) -> bool:
        """Whether a parameter is in the plan."""
        return parameter.requires_grad

    def _add_hooks(self, parameter: Tensor, hook: Callable[[Tensor], None]) -> None:
        handles = self._hooks[id(parameter)] = [parameter.register_post_accumulate_grad_hook(hook)]
        if self._sets_aside:
            node = _accumulating_node(parameter)
            self._nodes.append(node)
            handles.append(node.register_prehook(self._set_aside_hook(parameter)))

    def _make_plan(self) -> _native.BucketPlan:
        knobs = basics.running().settings
        on_gpu = any(slot.device != HOST for slot in self._slots)
        if knobs.autotune and self._tuner is None:
            self._tuner = Tuner(self._name, knobs, self._options.process_set, on_gpu=on_gpu)
        tuning = self._tuner.tuning if self._tuner else Tuning.of(knobs, on_gpu=on_gpu)
        groups = [self._groups[id(slot.parameter)] for slot in self._slots]
        buckets = self._buckets(groups, tuning.fusion_threshold_mb)
        devices = [self._slots[members[0]].device for members in buckets]
        self._current_stream = cuda.stream_getter(max(devices, default=HOST))
        assert self._engine is not None  # _build() has taken it
        return self._plan_of(buckets, devices, self._engine, tuning)

    def _buckets(self, groups: list[int | None], threshold_mb: float) -> list[list[int]]:
        """Return the buckets, by number of the slot."""
        payloads = {index: slot.payload_in(groups[index]) for index, slot in enumerate(self._slots)}
        return backward_buckets(payloads, threshold_mb)

    def _plan_of(
        self, buckets: list[list[int]], devices: list[int], engine: _native.Engine, tuning: Tuning
    ) -> _native.BucketPlan:
        codecs = [self._slots[bucket[0]].codec for bucket in buckets]
        owner = self._names.first  # the parameters of two optimizers may have one name
        return engine.plan(
            self._name,
            self._op,
            self._options.prescale_factor,
            self._options.postscale_factor,
            members_of(self._slots, buckets),
            devices,
            checked_id(self._options.process_set),
            chunk_bytes=int(tuning.chunk_kb * 1024),
            segment_bytes=int(tuning.ring_segment_kb * 1024),
            codecs=[text_of(codec and codec._replace(owner=owner)) for codec in codecs],
        )

    def _needs_another_plan(self) -> bool:
        return (
            self._outdated
            or basics.engine() is not self._engine
            or any(parameter.requires_grad for parameter in self._frozen)
            or self._parameters.changed()
        )

    def _all_checksums(self) -> Checksums:
        return parameter_checksums([*self._named, *unwrapped.named_parameters(_owners)])

    @abstractmethod
    def _hook(self, index: int, slot: Slot) -> Callable[[Tensor], None]:
        """Return what autograd calls when the gradient of a slot is finished."""

    @abstractmethod
    def _late_hook(self, parameter: Tensor) -> None:
        """Called when a gradient is finished that is submitted at the end of the backward."""

    @abstractmethod
    def _set_aside_hook(self, parameter: Tensor) -> Callable[[Any], None]:
        """Return what autograd calls before it adds to the gradient of a parameter."""


def release(parameter: Tensor) -> None:
    """Stop reducing the gradient of a parameter, in whichever reducer has it."""
    owner = _owners.pop(parameter, lambda: None)()
    if owner is not None:
        owner._release(parameter)


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _accumulating_node(parameter: Tensor) -> Any:
    """The node that adds to the parameter's gradient. PyTorch has get_gradient_edge for it since 2.2."""
    with torch.enable_grad():
        view = parameter.view_as(parameter)
    return view.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
