"""What travels together when the gradients of an optimizer are reduced, and how it travels.

`plan_buckets` cuts gradients into buckets and `compare_layouts` finds out which of them are sparse or absent on some
rank. Both give the same on every rank. `GradientPlan` does all that a reduction takes where a framework hands over all
gradients at once. Where a framework hands them over one by one, as PyTorch does, its shim goes through these steps
while they come.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from horovodish.collectives.adapter import Adapter
from horovodish.collectives.array_adapter import ARRAYS
from horovodish.collectives.consistency import Checksums, are_equal, details, summands, warn_of_difference
from horovodish.collectives.operation import Operation
from horovodish.collectives.process_sets import ProcessSet
from horovodish.collectives.reduce_ops import Sum
from horovodish.collectives.submission import Handle
from horovodish.gradients.autotune import Tuner, Tuning, tuner_of, warn_of_no_effect
from horovodish.gradients.options import GradientOptions
from horovodish.runtime import basics

__all__ = [
    "FIRST_BUCKET_BYTES",
    "Bucket",
    "Comparison",
    "GradientAdapter",
    "GradientPlan",
    "Layout",
    "Payload",
    "backward_buckets",
    "compare_layouts",
    "plan_buckets",
    "warn_of",
]

K = TypeVar("K")

FIRST_BUCKET_BYTES = 2**20
"""The bucket that is complete first is kept small, so that reduction starts early in the backward pass."""


COMPARED_REDUCTION = 2
"""Before this reduction outside of programs, the ranks compare their parameters."""
_reductions: Counter[str] = Counter()  # by the name of the gradients
basics.follow(stopped=_reductions.clear)


class Payload(NamedTuple):
    """What the buckets depend on: what travels instead of one gradient.

    Attributes:
        size_bytes: how long it is.
        dtype: its dtype; only equality counts.
        device: where it is; only equality counts.
        group: the number of the group that it belongs to; None: it belongs to none.
    """

    size_bytes: int
    dtype: Hashable
    device: Hashable = None
    group: int | None = None


def plan_buckets(
    payloads: Sequence[Payload], threshold_bytes: int, first_bytes: int = FIRST_BUCKET_BYTES
) -> list[list[int]]:
    """Put tensors into buckets, each of which is negotiated and reduced as a unit. Pure; not collective.

    A bucket holds tensors of one dtype and device and is filled in the order given, up to `threshold_bytes`; the one
    that is opened first, up to `first_bytes` if that is less. A tensor of `threshold_bytes` or more travels alone, and
    the tensors around it still share a bucket. With a threshold of 0 every tensor travels alone. The tensors of a group
    that are on one device are a bucket of their own, whatever their sizes and dtypes.

    Args:
        payloads: the tensors, in the order in which they are expected to be ready.
        threshold_bytes: the most that several tensors may have together.
        first_bytes: the same for the first bucket.

    Returns:
        The buckets, in the order in which they are complete: the indices of their tensors.

    Example:
        >>> plan_buckets([Payload(size, "float32") for size in (4, 4, 4, 100, 4)], threshold_bytes=10, first_bytes=4)
        [[0], [1, 2], [3], [4]]
    """
    open_buckets: dict[Hashable, _Bucket] = {}
    grouped: dict[Hashable, list[int]] = {}
    buckets: list[list[int]] = []
    for index, (size, dtype, device, group) in enumerate(payloads):
        if group is not None:
            if (group, device) not in grouped:
                buckets.append(grouped.setdefault((group, device), []))
            grouped[group, device].append(index)
            continue
        bucket = open_buckets.get((dtype, device))
        alone = size >= threshold_bytes
        if bucket is None or alone or bucket.size_bytes + size > bucket.limit_bytes:
            bucket = _Bucket(threshold_bytes if buckets else min(first_bytes, threshold_bytes))
            buckets.append(bucket.members)
            if not alone:
                open_buckets[dtype, device] = bucket
        bucket.members.append(index)
        bucket.size_bytes += size
    return sorted(buckets, key=lambda members: members[-1])


def backward_buckets(payloads: dict[K, Payload], fusion_threshold_mb: float) -> list[list[K]]:
    """The buckets of gradients that a backward pass computes, in the order in which they are complete.

    Args:
        payloads: what travels instead of the gradients, by whatever they are known, in the order of the model. Backward
            finishes them roughly in the opposite order.
        fusion_threshold_mb: the setting.
    """
    order = list(reversed(payloads))
    planned = plan_buckets([payloads[key] for key in order], int(fusion_threshold_mb * 2**20))
    return [[order[place] for place in bucket] for bucket in planned]


class _Bucket:
    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self.members: list[int] = []


class Layout(IntEnum):
    """What a rank has of a gradient. The sum over the ranks says whether any of them has a sparse or a dense one."""

    ABSENT = 0
    DENSE = 1
    SPARSE = 2**16


class Comparison(NamedTuple):
    """What ranks have found out of each other's gradients and parameters.

    Attributes:
        layouts: for each gradient, SPARSE if any rank has a sparse one, DENSE if any has a dense one, else ABSENT.
        ranks: how many have taken part, without those that have joined.
        differs: whether all ranks of the process set have given checksums, and these were not equal.
    """

    layouts: list[Layout]
    ranks: int
    differs: bool


def compare_layouts(
    layouts: Sequence[Layout], gradients: str, process_set: ProcessSet, checksums: Checksums | None = None
) -> Handle[Comparison]:
    """Find out which layouts the gradients have on any rank. Collective; does not block.

    Args:
        layouts: of this rank's gradients; as many on every rank.
        gradients: what they are called, the same on every rank.
        process_set: the ranks that compare.
        checksums: of what ought to be equal on the ranks, if this rank gives them. Other ranks may not.
    """
    given = [0] * 5 if checksums is None else [1, *summands(checksums)]

    def result(sums: Sequence[Any], _: object) -> Comparison:
        numbers = sums[0].tolist()
        totals, (ranks, gave, *summed) = numbers[: len(layouts)], numbers[len(layouts) :]
        found = [Layout.SPARSE if total >= Layout.SPARSE else Layout(min(total, 1)) for total in totals]
        return Comparison(found, ranks, gave == process_set.size() and not are_equal(summed, gave))

    name = f"{gradients}: layouts of the gradients, one for each parameter"
    own = np.array([*layouts, 1, *given], np.int64)
    return ARRAYS.start(Operation("allreduce", name, process_set, Sum), [own], result)


def warn_of(comparison: Comparison, checksums: Checksums, gradients: str, process_set: ProcessSet, remedy: str) -> None:
    """Warn if the ranks have found that their parameters differ. Collective; blocks.

    Args:
        comparison: its `differs` is the same on every rank.
        checksums: of this rank.
        gradients, process_set: as for `compare_layouts`.
        remedy: what to do about it.
    """
    if comparison.differs:
        warn_of_difference(details(checksums, gradients, process_set).wait(), process_set, remedy)


class Bucket(NamedTuple):
    """Some gradients that travel together.

    Attributes:
        name: of the operation.
        labels: of the gradients, for messages.
        tensors: what travels instead of each gradient.
    """

    name: str
    labels: list[str]
    tensors: list[Any]


class GradientAdapter(ABC):
    """What a plan must know of one framework's gradients. A source is what a gradient belongs to, such as a variable.

    Attributes:
        tensors: the adapter of the framework's tensors. A framework with a `reduce` of its own needs none.
        may_differ: ranks may have gradients for other sources, or of another layout, where nothing is traced.
    """

    tensors: ClassVar[Adapter[Any]]
    may_differ: ClassVar[bool] = True

    def is_traced(self, gradients: Sequence[Any]) -> bool:
        """True while a program is traced, which must be the same one on every rank."""
        return False

    def name_in_step(self, name: str) -> str:
        """A name for what is reduced now, the same in every step."""
        return name

    def is_sparse(self, gradient: Any) -> bool:
        """True if this gradient has rows for some indices only."""
        return False

    def dense(self, gradient: Any) -> Any:
        """A gradient with all of its rows."""
        return gradient

    def divided(self, gradient: Any, divisor: int) -> Any:
        """A gradient of any layout over a number."""
        return gradient / divisor

    def checksum(self, source: Any) -> tuple[str, int] | None:
        """What a variable is now, and a checksum of it, also while a program is traced; None for other sources."""
        return None

    def with_parameters(
        self,
        gradients: Sequence[Any],
        parameters: Sequence[tuple[str, Any]],
        name: str,
        process_set: ProcessSet,
        remedy: str,
    ) -> list[Any]:
        """The gradients. Before they are first reduced, the ranks compare these parameters. Does not block.

        Args:
            gradients: what will be reduced; None where this rank has none.
            parameters: arrays, also traced ones, and what to call them.
            name: of the gradients, the same on every rank.
            process_set: the ranks that reduce.
            remedy: what to do if the parameters differ.
        """
        return list(gradients)

    @abstractmethod
    def payload(self, tensor: Any, source: Any) -> Payload:
        """What the buckets depend on, the same on every rank."""

    def filled(self, gradient: Any, source: Any, layout: Layout) -> Any:
        """A dense gradient, or zeros where it is None, in a layout that another rank has."""
        raise NotImplementedError

    def reduce(self, name: str, buckets: Sequence[Bucket], options: GradientOptions) -> list[list[Any]]:
        """Reduce buckets, all of which are under way before the first one is waited for. Collective.

        Args:
            name: what the names of all buckets begin with.
            buckets: what to reduce.
            options: how.

        Returns:
            For each bucket the reduced tensors.
        """
        handles = []
        for bucket in buckets:
            operation = options.operation(bucket.name, [name + label for label in bucket.labels])
            handles.append(self.tensors.group(operation, bucket.tensors))
        return [handle.wait() for handle in handles]

    def reduce_sparse(self, gradient: Any, name: str, options: GradientOptions) -> Any:
        """Reduce a sparse gradient. Collective."""
        raise NotImplementedError


class GradientPlan:
    """How the gradients of one optimizer are reduced, where all of them are there at once.

    Attributes:
        options: how they are reduced.
        local: sources whose gradients stay this rank's own.
    """

    def __init__(
        self,
        options: GradientOptions,
        adapter: GradientAdapter,
        label: Callable[[int, Any], str] = lambda index, _: f"[{index}]",
        remedy: str = "",
    ):
        """
        Args:
            options: the user's.
            adapter: of the framework.
            label: what to call the gradient with this number and source, the same on every rank.
            remedy: what to do if the ranks begin with different parameters.
        """
        self.options = options
        self.local: list[Any] = []
        self._adapter = adapter
        self._label = label
        self._remedy = remedy

    def reduce(self, name: str, gradients: Sequence[Any], sources: Sequence[Any] | None) -> list[Any]:
        """The gradients of all ranks. Collective; blocks unless a program is traced.

        Args:
            name: of these gradients, the same on every rank.
            gradients: of this rank, in the order of the model; None where it has none.
            sources: what they are the gradients of; None where the caller cannot know. Every rank must have the same
                gradients then.

        Returns:
            New gradients in the same order. One that is None on every rank stays None. Where some ranks have one, the
            others contribute zeros or no rows, except in a traced program, where the ranks must agree.
        """
        if self.options.alone:
            return list(gradients)
        adapter, traced = self._adapter, self._adapter.is_traced(gradients)
        results = list(gradients)
        name = adapter.name_in_step(name)
        known = gradients if sources is None else sources
        own = self._shared(results, known)
        if sources is not None and adapter.may_differ and not traced:
            own = self._alike(own, sources, name)
        sparse = [index for index, gradient in own.items() if gradient is not None and adapter.is_sparse(gradient)]
        dense = [index for index, gradient in own.items() if gradient is not None and index not in sparse]
        travelling = {index: self.options.compression.compress(own[index]) for index in dense}
        groups = dict(zip(own, self.options.groups_of([known[index] for index in own]), strict=True))
        payloads = {
            index: adapter.payload(tensor, known[index])._replace(group=groups[index])
            for index, (tensor, _) in travelling.items()
        }
        tuner = self._tuner(name, traced)
        tuning = tuner.tuning if tuner else Tuning.of(basics.running().settings)
        members = backward_buckets(payloads, tuning.fusion_threshold_mb)
        buckets = [self._bucket(name, bucket, travelling, known) for bucket in members]
        for bucket, reduced in zip(members, adapter.reduce(name, buckets, self.options), strict=True):
            for index, tensor in zip(bucket, reduced, strict=True):
                results[index] = self.options.compression.decompress(tensor, travelling[index][1])
        for index in sparse:
            label = self._label(index, known[index])
            results[index] = adapter.reduce_sparse(own[index], name + label, self.options)
        if tuner is not None:
            tuner.step_done(sum(payload.size_bytes for payload in payloads.values()))
            tuner.decide()
        return results

    def _shared(self, gradients: list[Any], sources: Sequence[Any]) -> dict[int, Any]:
        """Those that are to be reduced; scales the others in place."""
        local, options, shared = set(map(id, self.local)), self.options, {}
        for index, gradient in enumerate(gradients):
            if id(sources[index]) not in local:
                takes_dense = options.sparse_as_dense and gradient is not None
                shared[index] = self._adapter.dense(gradient) if takes_dense else gradient
            elif options.scale_local_gradients and gradient is not None:
                gradients[index] = self._adapter.divided(gradient, options.process_set.size())
        return shared

    def is_traced(self, gradients: Sequence[Any]) -> bool:
        """Whether a program is traced, not run."""
        return self._adapter.is_traced(gradients)

    def compare_parameters(self, name: str, sources: Sequence[Any]) -> None:
        """Warn if the ranks have different parameters. Collective; blocks, also while a program is traced."""
        if own := self.checksums(sources):
            self._warn(compare_layouts([], name, self.options.process_set, own).wait(), own, name)

    def with_parameters(self, name: str, gradients: Sequence[Any], sources: Sequence[Any], values: Any) -> list[Any]:
        """The gradients, with which the values of their variables are compared in a program that gets these."""
        local = set(map(id, self.local))
        known = enumerate(zip(sources, values, strict=True))
        labelled = [(_label(index, source), value) for index, (source, value) in known if id(source) not in local]
        return self._adapter.with_parameters(gradients, labelled, name, self.options.process_set, self._remedy)

    def _warn(self, comparison: Comparison, checksums: Checksums, name: str) -> None:
        warn_of(comparison, checksums, name, self.options.process_set, self._remedy)

    def checksums(self, sources: Iterable[Any]) -> Checksums:
        """Of the variables among the sources that have a value. Local ones are this rank's own."""
        local = set(map(id, self.local))
        return {
            _label(index, source): checksum
            for index, source in enumerate(sources)
            if id(source) not in local and (checksum := self._adapter.checksum(source)) is not None
        }

    def _alike(self, own: dict[int, Any], sources: Sequence[Any], name: str) -> dict[int, Any]:
        """The gradients, of the same layouts on every rank."""
        layouts = list(map(self._layout, own.values()))
        # Not before the first step: a script may have variables that it broadcasts after it.
        _reductions[name] += 1
        checksums = self.checksums(sources) if _reductions[name] == COMPARED_REDUCTION else None
        wanted = compare_layouts(layouts, name, self.options.process_set, checksums).wait()
        self._warn(wanted, checksums or {}, name)
        return {
            index: gradient if layout is before else self._adapter.filled(gradient, sources[index], layout)
            for (index, gradient), before, layout in zip(own.items(), layouts, wanted.layouts, strict=True)
        }

    def _layout(self, gradient: Any) -> Layout:
        if gradient is None:
            return Layout.ABSENT
        return Layout.SPARSE if self._adapter.is_sparse(gradient) else Layout.DENSE

    def _tuner(self, name: str, traced: bool) -> Tuner | None:
        if traced:
            warn_of_no_effect("programs that are traced, by tf.function or jax.jit")
            return None
        return tuner_of(name, self.options.process_set)

    def _bucket(self, name: str, members: Sequence[int], travelling: dict[int, Any], sources: Sequence[Any]) -> Bucket:
        labels = [self._label(index, sources[index]) for index in members]
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        return Bucket(f"{name}{labels[0]}{more}", labels, [travelling[index][0] for index in members])


def _label(index: int, source: Any) -> str:
    return f"variable {index} '{getattr(source, 'path', None) or getattr(source, 'name', '')}'"
