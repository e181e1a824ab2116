"""This rank's pieces of an optimizer's parameters: what the wrapped optimizer steps in place of the parameters."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from horovodish import _native
from horovodish._native import KINDS
from horovodish.collectives.process_sets import ProcessSet, checked_id
from horovodish.collectives.reduce_ops import Sum
from horovodish.collectives.submission import WAIT_SLICE_SECONDS
from horovodish.errors import UnsupportedTensorError, from_native
from horovodish.gradients.options import GradientOptions
from horovodish.gradients.plan import Payload, backward_buckets
from horovodish.gradients.shards import own_parts, owned_ends, owners
from horovodish.torch.gradients.slot import Slot, members_of
from horovodish.torch.shards.gradient import ShardedGradient
from horovodish.torch.tensors import dtype_code

__all__ = ["Piece", "Shards", "by_element", "check", "cut", "flat"]

_WHOLE = ("adafactor", "lamb", "lars", "muon", "novograd", "sm3", "soap", "shampoo")
"""In the names of optimizers that look at a whole tensor to step one of its elements, or at rows of it."""
_ALL = ("dadapt", "prodigy", "sparseadam")
"""In the names of optimizers that look at all tensors to step one of them, or take sparse gradients only."""

_COUNTS = ("step", "mu_product", "eta", "mu")
"""State of shape () that does not belong to an element, also of a parameter of shape ()."""


class Piece(NamedTuple):
    """A rank's part of a parameter.

    Attributes:
        parameter: a parameter in the memory of the whole one: of shape (end - begin, 1, ...) with as many dimensions,
            or of the same shape if the optimizer needs whole parameters and this one is the rank's.
        begin, end: in elements, in the order of the memory.
        cuts: where the part of each rank ends.
        layout: of the parameter: dtype, shape and device.
        strides: of the parameter, which say where its elements lie.
        steps: whether this rank steps it: it has elements, or the parameter has none and is this rank's.
        is_whole: whether each parameter is one rank's as a whole.
    """

    parameter: Tensor
    begin: int
    end: int
    cuts: tuple[int, ...]
    layout: tuple[Any, ...]
    strides: tuple[int, ...]
    steps: bool
    is_whole: bool

    def of(self, parameter: Tensor) -> Tensor:
        """The part of the parameter as it is now, without a copy."""
        own = flat(parameter)[self.begin : self.end]
        if self.is_whole and self.steps:
            return own.as_strided(parameter.size(), parameter.stride())
        return self.shaped(own)

    def shaped(self, elements: Tensor) -> Tensor:
        """Elements of the part, of shape (n,), in the shape of the part: (n, 1) for a matrix, for example.

        Some optimizers treat matrices and vectors differently.
        """
        dimensions = len(self.layout[1])
        return elements.reshape(-1, *[1] * (dimensions - 1))


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides that count: of dimensions with several elements."""
    return tuple(stride for stride, count in zip(tensor.stride(), tensor.shape, strict=True) if count > 1)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.device


def flat(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of its memory, without a copy; shape (n,).

    Raises:
        UnsupportedTensorError: they do not lie one after another.
    """
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    if not tensor.permute(order).is_contiguous():
        raise UnsupportedTensorError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}, whose elements do not lie one "
            "after another, cannot be sharded. Remedy: make the parameter contiguous, or leave shard= out"
        )
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def by_element(key: str, value: Any, parameter: Tensor, shape: Sequence[int]) -> bool:
    """Whether a value of the state has a number for each element of a parameter, or of a piece, of this shape."""
    if not isinstance(value, Tensor) or (parameter.dim() == 0 and key in _COUNTS):
        return False
    return tuple(value.shape) == tuple(shape)


def check(index: object, parameter: Tensor, state: dict[str, Any]) -> None:
    """Raise unless a state is of a parameter, and can be cut.

    Raises:
        ValueError: a tensor has another shape than the parameter.
    """
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape != parameter.shape:
            raise ValueError(
                f"the state {key!r} of parameter {index} has shape {tuple(value.shape)}, but the parameter has "
                f"{tuple(parameter.shape)}: it is of another model, or of an optimizer that shard= cannot take"
            )


def cut(parameter: Tensor, state: dict[str, Any], piece: Piece) -> dict[str, Any]:
    """A piece's part of the state of its parameter."""
    own = dict[str, Any]()
    for key, value in state.items():
        if not piece.is_whole and by_element(key, value, parameter, parameter.shape):
            # In the memory order of the parameter's elements.
            like = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
            own[key] = piece.shaped(flat(like)[piece.begin : piece.end].clone())
        else:  # steps change it in place, and the same state may be loaded again
            own[key] = value.clone() if isinstance(value, Tensor) else value
    return own


class Shards:
    """One rank's part of an optimizer that the ranks share.

    A parameter stays in its bucket, and the rank keeps its part of it, however the optimizer's parameters change: the
    state of the part is on this rank alone.

    Args:
        optimizer: whose `param_groups` hold pieces while it steps.
        options: with `shard`.
    """

    def __init__(self, optimizer: Optimizer, options: GradientOptions):
        kinds = [kind.__name__ for kind in type(optimizer).__mro__]
        for kind in kinds:
            if any(word in kind.lower() for word in _ALL):
                raise ValueError(
                    f"{kind} looks at all parameters to step one, or takes sparse gradients only, so ranks that have a "
                    "part would take wrong steps. Remedy: leave shard= out"
                )
            if options.shard_by == "element" and any(word in kind.lower() for word in _WHOLE):
                raise ValueError(
                    f"shard={options.shard!r} cuts parameters by elements, but {kind} looks at whole tensors, so its "
                    'results would be wrong. Remedy: shard_by="parameter"'
                )
        if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
            raise ValueError(
                f"train() and eval() of {kinds[0]} look for the state of whole parameters, which no rank has, so they "
                "would leave the parameters as they are. Remedy: leave shard= out"
            )
        if any(float(its.get("step", 1)) > 0 for its in optimizer.state.values()):
            raise ValueError(
                "an optimizer that has made steps cannot become sharded. Remedy: wrap it first, then call "
                "load_state_dict() on every rank, with the state_dict() of the optimizer before it was wrapped"
            )
        self._optimizer = weakref.ref(optimizer)
        self._options = options
        self._among: tuple[int, int] | None = None  # this rank and the number of ranks that the parts are for
        self._loads: list[int] = []  # with whole parameters: the elements of each rank
        self._pieces: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._buckets: list[list[weakref.ref[Tensor]]] = []
        self._ends: list[list[int]] = []  # by bucket: where each rank's part ends; empty: the parts are even
        self._plan: _native.BucketPlan | None = None
        self._slots: list[Slot] = []
        self._whole: list[dict[str, Any]] | None = None  # of the groups, while they hold pieces
        self._memory: list[tuple[Tensor, Tensor]] = []  # meanwhile: pieces, and the memory of the whole parameters

    @property
    def optimizer(self) -> Any:
        """It lives as long as its methods are called."""
        return self._optimizer()

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that share."""
        return self._options.sharing

    @property
    def reducing(self) -> ProcessSet:
        """The ranks that reduce: the ranks that share, and other sets that each have the whole state."""
        return self._options.process_set

    # -- what belongs to whom

    def buckets(self, slots: Sequence[Slot], groups: Sequence[int | None], threshold_mb: float) -> list[list[int]]:
        """The buckets of gradients, by index of `slots`, in the order that they are cut.

        Parameters that have a bucket keep it.
        """
        place, ranks = self.process_set.rank(), self.process_set.size()
        if self._among not in (None, (place, ranks)):
            raise ValueError(
                f"a sharded optimizer has parts for {self._among and self._among[1]} ranks, but there are {ranks} now, "
                "or their order is another one. Remedy: make it again after init(), and load the full_state_dict()"
            )
        self._among = place, ranks
        index_of = {id(slot.parameter): index for index, slot in enumerate(slots)}
        if any(id(each()) not in index_of for bucket in self._buckets for each in bucket):
            raise ValueError(
                "a parameter has left a sharded optimizer. This would move parts of other parameters between ranks. "
                "Remedy: freeze it by requires_grad_(False) and leave it in the optimizer"
            )
        kept = [[index_of[id(each())] for each in bucket] for bucket in self._buckets]
        known = {index for bucket in kept for index in bucket}
        payloads = {}
        for index, slot in enumerate(slots):
            if index not in known:
                if slot.parameter.is_complex():
                    raise UnsupportedTensorError(
                        f"parameter {slot.name}: shard= takes no complex parameters. Remedy: leave shard= out"
                    )
                # Gradients and parameters are cut alike, so each bucket has one dtype of gradients and of parameters.
                dtype: Any = slot.dtype, slot.parameter.dtype
                group: Any = None if groups[index] is None else (groups[index], dtype)
                payloads[index] = Payload(slot.size_bytes, dtype, slot.device, group)
        is_whole = self.by_parameter
        self._loads = self._loads or [0] * ranks
        owner_of = dict.fromkeys(payloads, 0)  # of a parameter without elements, unless parameters have owners
        if is_whole:
            counts = [slots[index].parameter.numel() for index in payloads]
            owner_of = dict(zip(payloads, owners(counts, self._loads), strict=True))
        new = [
            sorted(bucket, key=lambda index: (owner_of[index], index))
            for bucket in backward_buckets(payloads, threshold_mb)
        ]
        for bucket in new:
            members = [slots[index].parameter for index in bucket]
            counts = [each.numel() for each in members]
            ends = owned_ends(counts, [owner_of[index] for index in bucket], ranks) if is_whole else []
            by_rank = [own_parts(counts, rank, ranks, ends) for rank in range(ranks)]
            self._buckets.append([weakref.ref(each) for each in members])
            self._ends.append(ends)
            for number, (index, parameter) in enumerate(zip(bucket, members, strict=True)):
                begin, end = by_rank[place][number]
                cuts = tuple(parts[number][1] for parts in by_rank)
                steps = begin < end or (place == owner_of[index] and parameter.numel() == 0)
                found = _layout(parameter), _strides(parameter)
                piece = Piece(torch.nn.Parameter(torch.empty(0)), begin, end, cuts, *found, steps, is_whole)
                piece = self._pieces[parameter] = piece._replace(parameter=torch.nn.Parameter(piece.of(parameter)))
                if parameter in self.optimizer.state:  # some optimizers make it before the first step
                    state = cut(parameter, self.optimizer.state.pop(parameter), piece)
                    if steps:
                        self.optimizer.state[piece.parameter] = state
        return kept + new

    @property
    def by_parameter(self) -> bool:
        """Whether each parameter is one rank's as a whole."""
        return self._options.shard_by == "parameter"

    @property
    def ends(self) -> list[list[int]]:
        """For each bucket, where each rank's part ends, in elements of the bucket; empty: the parts are even."""
        return self._ends

    @property
    def has_lost_parts(self) -> bool:
        """Whether parts of the state were lost with their ranks."""
        among = self.process_set.rank(), self.process_set.size()
        return self._among not in (None, among) and any(self.optimizer.state.values())

    def forget(self) -> None:
        """This rank has no parts any more, nor the state of them."""
        for piece in self._pieces.values():
            self.optimizer.state.pop(piece.parameter, None)
        self._pieces.clear()
        self._among, self._plan = None, None
        self._loads, self._buckets, self._ends = [], [], []

    def plan(self, name: str, slots: Sequence[Slot], buckets: Sequence[Sequence[int]], engine: _native.Engine) -> None:
        """Plan how the parameters are gathered after a step."""
        self._slots = list(slots)
        members = [
            (member, dtype_code(slot.parameter.dtype, f"parameter {slot.name}", reduces=False), slot.shape, bucket)
            for slot, (member, _, _, bucket) in zip(slots, members_of(slots, buckets), strict=True)
        ]
        devices = [slots[bucket[0]].device for bucket in buckets]
        identity = checked_id(self.process_set)
        kind = KINDS["allgather"]
        self._plan = engine.plan(
            f"parameters, {name}", Sum, 1.0, 1.0, members, devices, identity, kind=kind, ends=self._ends
        )

    def parameters(self) -> WeakIdKeyDictionary:
        """The parameters that have a bucket."""
        return self._pieces

    def range_of(self, parameter: Tensor) -> tuple[int, int]:
        """Where this rank's part of a parameter begins and ends, in elements."""
        found: Piece = self._pieces[parameter]
        return found.begin, found.end

    def piece(self, parameter: Tensor) -> Piece | None:
        """This rank's part of a parameter; None if nothing has been reduced for it.

        Raises:
            ValueError: the elements of the parameter lie in another order than when it was cut, on every rank alike.
        """
        found: Piece | None = self._pieces.get(parameter)
        if found is not None:
            if _strides(parameter) != found.strides:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} has strides {parameter.stride()} now, but had "
                    "others when the optimizer was wrapped, so its gradient's parts and its state's do not match. "
                    "Remedy: convert the model, as to channels_last, before DistributedOptimizer"
                )
            own = found.of(parameter)
            if own.data_ptr() != found.parameter.data_ptr():
                found.parameter.data = own
        return found

    def take(self, slot: Slot) -> None:
        """The gradient of a parameter was reduced, in this rank's part of it."""
        piece = self._pieces[slot.parameter]
        assert slot.parameter.grad is not None
        own = slot.flat(slot.parameter.grad)[piece.begin : piece.end]
        if self._options.shard == "gradients":
            own = own.clone()
        slot.parameter.grad = ShardedGradient(slot.parameter, own, slot.name, self.process_set)

    # -- the step

    def enter(self) -> None:
        """The groups of the optimizer hold pieces, with their gradients, until `leave`."""
        optimizer = self._optimizer()
        if optimizer is None or self._whole is not None:
            return
        # Names go with the parameters. Some optimizers step by them.
        whole: list[dict[str, Any]] = [
            {key: group[key] for key in ("params", "param_names") if key in group} for group in optimizer.param_groups
        ]
        pieces = [[self._with_gradient(parameter) for parameter in its["params"]] for its in whole]
        self._whole = whole
        self._memory = [(own, own.detach()) for its in pieces for own in its if own is not None]
        for group, own in zip(optimizer.param_groups, pieces, strict=True):
            is_here = [each is not None for each in own]
            group.update({key: list(compress(group[key], is_here)) for key in ("param_names",) if key in group})
            group["params"] = [each for each in own if each is not None]

    def _with_gradient(self, parameter: Tensor) -> Tensor | None:
        piece, gradient = self.piece(parameter), parameter.grad
        if gradient is not None and not isinstance(gradient, ShardedGradient):
            raise ValueError(
                f"step() with shard={self._options.shard!r}: a gradient of shape {tuple(gradient.shape)} was not "
                "reduced. Remedy: leave skip_synchronize() out"
            )
        if piece is not None and _layout(parameter) != piece.layout:  # to gather it would be to write other memory
            raise ValueError(
                f"a parameter was {piece.layout} when the optimizer was wrapped, and is {_layout(parameter)} now. "
                "Remedy: convert the model before DistributedOptimizer"
            )
        if piece is None or not piece.steps:
            return None
        own = piece.parameter
        own.grad = None if gradient is None else gradient.piece.as_strided(own.size(), own.stride())
        return own

    def leave(self) -> None:
        """The groups hold the parameters again."""
        optimizer, whole, self._whole = self._optimizer(), self._whole, None
        if optimizer is None or whole is None:
            return
        memory, self._memory = self._memory, []
        for piece, own in memory:
            piece.grad = None
            if piece.data_ptr() != own.data_ptr():  # the step has assigned `p.data`
                own.copy_(piece.detach())
                piece.data = own
        for group, its in zip(optimizer.param_groups, whole, strict=True):
            group.update(its)

    def gather(self) -> None:
        """Every rank gets the parts of all. Collective; blocks."""
        plan = self._plan
        if plan is None:
            return
        for index, slot in enumerate(self._slots):
            address = slot.parameter.data_ptr()
            plan.submit(index, address, address)
        plan.flush()
        while not plan.wait(WAIT_SLICE_SECONDS):
            pass
        error = plan.error()
        if error is not None:
            plan.keep([slot.parameter for slot in self._slots])
        plan.reset()
        if error is not None:
            raise from_native(*error)

    @contextmanager
    def holding_all(self) -> Iterator[None]:
        """The groups hold this rank's part of every parameter, also an empty one."""
        optimizer = self.optimizer
        whole = [group["params"] for group in optimizer.param_groups]
        stand_ins = [[piece.parameter if (piece := self.piece(each)) else each for each in its] for its in whole]
        for group, its in zip(optimizer.param_groups, stand_ins, strict=True):
            group["params"] = its
        try:
            yield
        finally:
            for group, its in zip(optimizer.param_groups, whole, strict=True):
                group["params"] = its

    def without_state(self, optimizer: Any) -> dict[str, Any]:
        """The optimizer's `state_dict()` with the options of its groups only."""
        state, optimizer.state = optimizer.state, defaultdict(dict)
        try:
            found: dict[str, Any] = optimizer.wrapped_class.state_dict(optimizer)
        finally:
            optimizer.state = state
        return found
