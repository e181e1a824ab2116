"""Plans the reduction of an optimizer's gradients: which gradients travel together, and how.

`plan_buckets` cuts gradients into buckets, the same ones on every rank. `GradientPlan` does all that a reduction takes
where a framework hands over all gradients at once. Where a framework hands them over one by one, as PyTorch does, its
shim goes through these steps while they come.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

from horovodish.collectives.adapter import Adapter
from horovodish.collectives.consistency import Checksums, is_due
from horovodish.collectives.operation import Codec, Operation
from horovodish.collectives.process_sets import ProcessSet, checked_id
from horovodish.collectives.reduce_ops import Sum
from horovodish.collectives.submission import counted
from horovodish.gradients.at_once import Bucket, Memory, Reduced, reduce_at_once
from horovodish.gradients.autotune import Tuner, Tuning, tuner_of, warn_of_no_effect
from horovodish.gradients.layouts import Compared, Comparison, Layout, compare_layouts, compared, variable, warn_of
from horovodish.gradients.options import GradientOptions
from horovodish.runtime import basics
from horovodish.runtime.process import part

__all__ = [
    "FIRST_BUCKET_BYTES",
    "Bucket",
    "GradientAdapter",
    "GradientPlan",
    "Layout",
    "Memory",
    "Payload",
    "Reduced",
    "backward_buckets",
    "name_of",
    "plan_buckets",
    "shape_of",
]

K = TypeVar("K")

FIRST_BUCKET_BYTES = 2**20
"""The bucket that is complete first is kept small, so that reduction starts early in the backward pass. PyTorch's DDP
has the same size."""


COMPARED_REDUCTION = 2
"""Before this reduction the ranks first compare their parameters. Not before the first one: a script may have variables
that it broadcasts after its first step."""


class Trained(NamedTuple):
    """What a traced program trains, so that the ranks can compare it whenever the program runs.

    Attributes:
        values: what the ranks compare, by what messages call it.
        names, shapes: of the variables.
        kin: what to call the reduction, the same on every rank, also where their models differ.
        first: the ranks first compare before this reduction.
        once_for: rank 0 warns once for reductions that have this in common.
        remedy: what to do if the ranks have different values.
    """

    values: dict[str, Any]
    names: list[str]
    shapes: list[str]
    kin: str
    first: int
    once_for: str
    remedy: str


class Payload(NamedTuple):
    """The tensor that travels for one gradient, as far as buckets depend on it.

    Attributes:
        size_bytes: how long it is.
        dtype: its dtype; only equality counts.
        device: where it is; only equality counts.
        group: the number of the group that it belongs to; None: it belongs to none.
        codec: what travels between hosts; only equality counts.
    """

    size_bytes: int
    dtype: Hashable
    device: Hashable = None
    group: int | None = None
    codec: Codec | None = None


def plan_buckets(
    payloads: Sequence[Payload], threshold_bytes: int, first_bytes: int = FIRST_BUCKET_BYTES
) -> list[list[int]]:
    """Put tensors into buckets. Each bucket is negotiated and reduced as a unit. Pure; not collective.

    A bucket holds tensors of one dtype, device and codec. It is filled in the order given, up to `threshold_bytes`; the
    first bucket up to `first_bytes` if that is less. A tensor of `threshold_bytes` or more travels alone, and the
    tensors around it still share a bucket. With a threshold of 0 every tensor travels alone. The tensors of a group
    that have one device and codec form their own bucket, whatever their sizes and dtypes.

    Args:
        payloads: the tensors, in the order that they are expected to be ready.
        threshold_bytes: the most that several tensors may have together.
        first_bytes: the same for the first bucket.

    Returns:
        The buckets, in the order of their completion: the indices of their tensors.

    Example:
        >>> plan_buckets([Payload(size, "float32") for size in (4, 4, 4, 100, 4)], threshold_bytes=10, first_bytes=4)
        [[0], [1, 2], [3], [4]]
    """
    open_buckets: dict[Hashable, _Bucket] = {}
    grouped: dict[Hashable, list[int]] = {}
    buckets: list[list[int]] = []
    for index, (size, dtype, device, group, codec) in enumerate(payloads):
        if group is not None:
            if (group, device, codec) not in grouped:
                buckets.append(grouped.setdefault((group, device, codec), []))
            grouped[group, device, codec].append(index)
            continue
        bucket = open_buckets.get((dtype, device, codec))
        alone = size >= threshold_bytes
        if bucket is None or alone or bucket.size_bytes + size > bucket.limit_bytes:
            bucket = _Bucket(threshold_bytes if buckets else min(first_bytes, threshold_bytes))
            buckets.append(bucket.members)
            if not alone:
                open_buckets[dtype, device, codec] = bucket
        bucket.members.append(index)
        bucket.size_bytes += size
    return sorted(buckets, key=lambda members: members[-1])


def backward_buckets(payloads: dict[K, Payload], fusion_threshold_mb: float) -> list[list[K]]:
    """The buckets of gradients that a backward pass computes, in the order of their completion.

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


class GradientAdapter(ABC):
    """One framework's gradients, as plans use them. A source is the object of a gradient, such as a variable.

    Attributes:
        tensors: the adapter of the framework's tensors. A framework with a `reduce` of its own needs none.
        may_differ: ranks may have gradients for other sources, or of another layout, where nothing is traced.
    """

    tensors: ClassVar[Adapter[Any]]
    may_differ: ClassVar[bool] = True

    def is_traced(self, gradients: Sequence[Any]) -> bool:
        """True while a program is traced, which must be the same one on every rank."""
        return False

    def on_gpu(self, gradients: Sequence[Any]) -> bool:
        """Whether they are reduced on a GPU."""
        return False

    def name_in_step(self, name: str) -> str:
        """A name for the next reduction, the same in every step."""
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
        """A variable's description and checksum now, also while a program is traced; None for other sources."""
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

    def shape(self, tensor: Any, source: Any) -> tuple[int, ...]:
        """The shape of the travelling tensor, the same on every rank."""
        return tuple(tensor.shape)

    def filled(self, gradient: Any, source: Any, layout: Layout) -> Any:
        """A dense gradient, or zeros where it is None, in a layout that another rank has."""
        raise NotImplementedError

    def reduce(
        self, name: str, buckets: Sequence[Bucket], options: GradientOptions, trained: Trained | None = None
    ) -> Reduced:
        """Reduce buckets, all at the same time. Collective; blocks unless a program is traced.

        Args:
            name: what the names of all buckets begin with.
            buckets: what to reduce.
            options: how.
            trained: what the program trains; None where no program is traced, or the plan does not know it.
        """
        return reduce_at_once(name, buckets, options, self)

    def memory(self, operation: Operation, tensors: Sequence[Any]) -> Memory:
        """Where the engine finds a bucket that is reduced eagerly, and where it writes the results. Not collective.

        Args:
            operation: the reduction, with the names of its members.
            tensors: what travels.

        Raises:
            UnsupportedTensorError: the engine cannot reduce one of the tensors.
        """
        adapter, names, op = self.tensors, operation.member_names, operation.op or Sum
        sources = [adapter.source(*pair) for pair in zip(tensors, names, strict=True)]
        results = [adapter.empty(source, None) for source in sources]
        members = [adapter.member(*each, op) for each in zip(sources, results, names, strict=True)]
        placement = adapter.placement(operation, sources, members)
        if not placement.is_staged:
            return Memory(sources, results, results, members, placement)
        sources, arrivals = adapter.copies(sources, results)
        members = [adapter.member(*each, op) for each in zip(sources, arrivals, names, strict=True)]
        return Memory(sources, arrivals, results, members, placement)

    def arrived(self, memory: Memory) -> list[Any]:
        """The results, after the engine has written."""
        if memory.placement.is_staged:
            self.tensors.copy_back(memory.arrivals, memory.results)
        return memory.results

    def reduce_sparse(self, gradient: Any, name: str, options: GradientOptions, absent: bool = False) -> Any:
        """Reduce a sparse gradient. Collective.

        Args:
            gradient: of this rank; without rows if it is absent.
            name: of the operation.
            options: how.
            absent: this rank has none.

        Returns:
            The gradient of all ranks; None if it is absent on every rank, except in a traced program.
        """
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
        label: Callable[[int, Any], str] = lambda index, _: f", variable {index}",
        remedy: str = "",
        kin: str = "",
        compared: Callable[[Any], Any] = lambda source: source,
    ):
        """
        Args:
            options: the user's.
            adapter: of the framework.
            label: what to call the gradient with this number and source, the same on every rank.
            remedy: what to do if the ranks begin with different parameters.
            kin: what to call all reductions whose names follow from their variables, which then tell the ranks'
                reductions apart where their models differ. Empty: the names do not.
            compared: what the ranks compare of a source, to see whether they have the same parameters.
        """
        self.options = options
        self.local: list[Any] = []
        self._adapter = adapter
        self._label = label
        self._remedy = remedy
        self._kin = kin
        self._compared = compared

    def reduce(
        self,
        name: str,
        gradients: Sequence[Any],
        sources: Sequence[Any] | None,
        first: int = COMPARED_REDUCTION,
    ) -> list[Any]:
        """The gradients of all ranks. Collective; blocks unless a program is traced.

        Args:
            name: of these gradients, the same on every rank.
            gradients: of this rank, in the order of the model; None where it has none.
            sources: what they are the gradients of; None where the caller cannot know. Every rank must have the same
                gradients then.
            first: a traced program first compares the sources before this reduction.

        Returns:
            New gradients in the same order. One that is None on every rank stays None. Where some ranks have one, the
            others contribute zeros or no rows, except in a traced program, where the ranks must agree.
        """
        if self.options.alone:
            return list(gradients)
        adapter = self._adapter
        if not adapter.is_traced(gradients):
            self._compare_options()
            basics.engine().begin_step()
        results = list(gradients)
        given, name = name, adapter.name_in_step(name)
        known = gradients if sources is None else sources
        own = self._shared(results, known)
        labels = {index: self._label(index, known[index]) for index in own}
        names = {index: "" if sources is None else name_of(sources[index]) for index in own}
        layouts = has = {index: self._layout(gradient) for index, gradient in own.items()}
        key: Hashable = None
        trained = None
        if sources is not None and adapter.is_traced(gradients):
            trained = self._trained(given, name, sources, first)
        if sources is not None and adapter.may_differ and not adapter.is_traced(gradients):
            # The labels are in the key because the ranks compare anew when other variables are trained.
            key = name, checked_id(self.options.process_set), self.options.sparse_as_dense, *labels.values()
            layouts = self._agreed(key, layouts, labels, names, sources, name)
            alike = {
                index: self._alike(gradient, sources[index], layouts[index])
                if gradient is None or layouts[index] is not has[index]
                else gradient
                for index, gradient in own.items()
            }
        else:
            alike = {index: gradient for index, gradient in own.items() if gradient is not None}
        absent = {index for index in alike if own[index] is None}
        dense = {index: gradient for index, gradient in alike.items() if layouts[index] is not Layout.SPARSE}
        reduced, any_joined = self._reduce_dense(name, dense, absent, known, labels, names, trained)
        if not any_joined and any(layouts[index] is Layout.ABSENT and reduced[index] is not None for index in dense):
            # All ranks have seen a gradient come which none had when they compared.
            part(Compared).layouts.pop(key, None)
        for index, gradient in alike.items():
            if index in dense:
                results[index] = reduced[index]
            else:
                results[index] = adapter.reduce_sparse(gradient, name + labels[index], self.options, index in absent)
        return results

    def _compare_options(self) -> None:
        """Compare the options in the first reduction; of plans that steps make anew, in the first one's. Collective."""
        comparison, key = self.options.comparison, (self._kin, checked_id(self.options.process_set))
        if self._kin and key in part(Compared).kins:
            return
        comparison.compare()
        if self._kin and comparison.have_compared:
            part(Compared).kins.add(key)

    def _reduce_dense(
        self,
        name: str,
        gradients: dict[int, Any],
        absent: set[int],
        sources: Sequence[Any],
        labels: dict[int, str],
        names: dict[int, str],
        trained: Trained | None,
    ) -> tuple[dict[int, Any], bool]:
        """Reduce dense gradients in buckets, and say whether a rank had joined. Collective."""
        adapter, compression = self._adapter, self.options.compression
        travelling = {index: compression.compress(gradient) for index, gradient in gradients.items()}
        payloads = {index: adapter.payload(tensor, sources[index]) for index, (tensor, _) in travelling.items()}
        if (codec := self.options.codec) is not None:
            for index, payload in payloads.items():
                shape = adapter.shape(travelling[index][0], sources[index])
                payloads[index] = payload._replace(
                    codec=codec.of(names[index] or labels[index].lstrip("., "), shape, name)
                )
        if self.options.groups is not None:
            groups = self.options.groups_of([sources[index] for index in gradients])
            payloads = {
                index: payload._replace(group=group)
                for (index, payload), group in zip(payloads.items(), groups, strict=True)
            }
        on_gpu = adapter.on_gpu([*gradients.values()])
        tuner = self._tuner(name, adapter.is_traced([*gradients.values()]), on_gpu)
        tuning = tuner.tuning if tuner else Tuning.of(basics.running().settings, on_gpu=on_gpu)
        members = backward_buckets(payloads, tuning.fusion_threshold_mb)
        buckets = [
            _bucket(name, bucket, labels, names, travelling, absent, payloads[bucket[0]].codec) for bucket in members
        ]
        tensors, any_joined = adapter.reduce(name, buckets, self.options, trained)
        results = {
            index: None if tensor is None else compression.decompress(tensor, travelling[index][1])
            for bucket, its in zip(members, tensors, strict=True)
            for index, tensor in zip(bucket, its, strict=True)
        }
        if tuner is not None:
            tuner.step_done(sum(payload.size_bytes for payload in payloads.values()))
            tuner.decide()
        return results, any_joined

    def _shared(self, gradients: list[Any], sources: Sequence[Any]) -> dict[int, Any]:
        """The gradients to reduce; scales the others in place."""
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
        """Warn if the ranks have different parameters. Collective; blocks, also while a program is traced.

        Raises:
            MismatchError: they have parameters of other shapes, or more of them. Every rank raises it.
        """
        own, process_set, local = self.checksums(sources), self.options.process_set, set(map(id, self.local))
        shared = [source for source in sources if id(source) not in local]
        shapes = [*map(shape_of, shared)]
        names = [*map(name_of, shared)]
        comparison = compare_layouts([], name, process_set, own or None, shapes, shown="".join(names[:1]))
        self._warn(compared(comparison, names, name, process_set, shapes), own, name)

    def with_parameters(self, name: str, gradients: Sequence[Any], sources: Sequence[Any], values: Any) -> list[Any]:
        """Return the gradients. A program that gets `values` compares them on all ranks beside the gradients."""
        local = set(map(id, self.local))
        known = enumerate(zip(sources, values, strict=True))
        labelled = [(_label(index, source), value) for index, (source, value) in known if id(source) not in local]
        return self._adapter.with_parameters(gradients, labelled, name, self.options.process_set, self._remedy)

    def _warn(self, comparison: Comparison, checksums: Checksums, name: str, step: int = 1) -> None:
        warn_of(comparison, checksums, name, self.options.process_set, self._remedy, step=step)

    def checksums(self, sources: Iterable[Any]) -> Checksums:
        """Checksums of the variables among the sources that have a value, except local ones."""
        values = self._values(sources).items()
        return {label: found for label, value in values if (found := self._adapter.checksum(value)) is not None}

    def _values(self, sources: Iterable[Any]) -> dict[str, Any]:
        """What the ranks compare of the sources, except local ones, by what messages call it."""
        local = set(map(id, self.local))
        return {
            _label(index, source): self._compared(source)
            for index, source in enumerate(sources)
            if id(source) not in local
        }

    def _trained(self, given: str, name: str, sources: Sequence[Any], first: int) -> Trained:
        local = set(map(id, self.local))
        shared = [source for source in sources if id(source) not in local]
        return Trained(
            self._values(sources),
            [*map(name_of, shared)],
            [*map(shape_of, shared)],
            self._adapter.name_in_step(self._kin) if self._kin else name,
            first,
            name if self._kin else given,
            self._remedy,
        )

    def _agreed(
        self,
        key: Hashable,
        layouts: dict[int, Layout],
        labels: dict[int, str],
        names: dict[int, str],
        sources: Sequence[Any],
        name: str,
    ) -> dict[int, Layout]:
        """The layouts that the gradients have on any rank, as far as the ranks have compared them. Collective; blocks
        in the first reductions and after one that brought a gradient which no rank had before."""
        process_set, known = self.options.process_set, part(Compared).layouts
        step = counted(f"reductions of {name}", checked_id(process_set))
        compares = is_due(step, COMPARED_REDUCTION)
        if key not in known or compares:
            compared_as = f"{self._kin} {counted(self._kin, checked_id(process_set))}" if self._kin else name
            checksums = self.checksums(sources) if compares else None
            shown = [names[index] or label for index, label in labels.items()]
            shapes = [shape_of(sources[index]) for index in labels]
            comparison = compare_layouts(
                [*layouts.values()], compared_as, process_set, checksums, shapes, shown="".join(shown[:1])
            )
            found = compared(comparison, shown, compared_as, process_set, shapes)
            if found.ranks < process_set.size():  # a rank that has joined does not hear of it, and may come back
                return dict(zip(layouts, found.layouts, strict=True))
            if key not in known or step <= COMPARED_REDUCTION:
                known[key] = found.layouts
            self._warn(found, checksums or {}, name, step)
        return dict(zip(layouts, known[key], strict=True))

    def _alike(self, gradient: Any, source: Any, layout: Layout) -> Any:
        """The gradient in the layout that all ranks give theirs."""
        own, wanted = self._layout(gradient), max(layout, Layout.DENSE)
        if own is wanted:
            return gradient
        return self._adapter.dense(gradient) if own is Layout.SPARSE else self._adapter.filled(gradient, source, wanted)

    def _layout(self, gradient: Any) -> Layout:
        if gradient is None:
            return Layout.ABSENT
        return Layout.SPARSE if self._adapter.is_sparse(gradient) else Layout.DENSE

    def _tuner(self, name: str, traced: bool, on_gpu: bool) -> Tuner | None:
        if traced:
            warn_of_no_effect("programs that are traced, by tf.function or jax.jit")
            return None
        return tuner_of(name, self.options.process_set, on_gpu=on_gpu)


def _bucket(
    name: str,
    members: Sequence[int],
    labels: dict[int, str],
    names: dict[int, str],
    travelling: dict[int, tuple[Any, Any]],
    absent: set[int],
    codec: Codec | None,
) -> Bucket:
    more = f" and {len(members) - 1} more" if len(members) > 1 else ""
    return Bucket(
        f"{name}{labels[members[0]]}{more}",
        [labels[index] for index in members],
        [names[index] for index in members],
        [travelling[index][0] for index in members],
        frozenset(place for place, index in enumerate(members) if index in absent),
        codec,
    )


def _label(index: int, source: Any) -> str:
    return variable(index, name_of(source))


def name_of(source: Any) -> str:
    """The user's name for a parameter; empty if it has none."""
    # TensorFlow adds ":0" to the name that a variable was given.
    return str(getattr(source, "path", None) or getattr(source, "name", "")).removesuffix(":0")


def shape_of(source: Any) -> str:
    """The shape of a variable or a tensor as text; empty for an object without one."""
    return str(getattr(source, "shape", ""))
