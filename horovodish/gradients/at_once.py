"""Buckets of gradients that are all there, reduced in one native plan: they are under way together.

Each gradient has its place in a bucket, also one that this rank does not have. The rank says with the bucket that it is
absent, and hears with the result whether any rank has it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from horovodish import _native
from horovodish.collectives.devices import Placement
from horovodish.collectives.operation import Codec, Member, Operation, text_of
from horovodish.collectives.process_sets import checked_id
from horovodish.collectives.submission import WAIT_SLICE_SECONDS, refuse
from horovodish.errors import from_native
from horovodish.gradients.options import GradientOptions
from horovodish.runtime import basics

__all__ = ["Bucket", "Memory", "Reduced", "reduce_at_once"]


class Bucket(NamedTuple):
    """Some gradients that travel together.

    Attributes:
        name: of the operation.
        labels: of the gradients, the same on every rank.
        shown: what messages of this rank call them; empty where they use the label.
        tensors: what travels instead of each gradient.
        absent: the places of those that this rank does not have. Their tensors are zeros.
        codec: what travels between hosts; None: the tensors.
    """

    name: str
    labels: list[str]
    shown: list[str]
    tensors: list[Any]
    absent: frozenset[int] = frozenset()
    codec: Codec | None = None

    def members(self, name: str = "") -> list[str]:
        """The tensors as the engine names them, after `name`; after a tab what messages of this rank call them."""
        return [f"{name}{label}\t{shown}" for label, shown in zip(self.labels, self.shown, strict=True)]


class Memory(NamedTuple):
    """The memory of a bucket.

    Attributes:
        sources: own the memory that the engine reads.
        arrivals: own the memory that it writes.
        results: the tensors that get what arrives; the same ones unless the placement is staged.
        members: the memory of both as the engine sees it.
        placement: where it is.
    """

    sources: list[Any]
    arrivals: list[Any]
    results: list[Any]
    members: list[Member]
    placement: Placement


class Reduced(NamedTuple):
    """The results of buckets.

    Attributes:
        buckets: for each the reduced tensors, None for one that no rank has.
        any_joined: whether a rank had joined, so that it does not hear which ones no rank has.
    """

    buckets: list[list[Any]]
    any_joined: bool = False


class _Adapter(Protocol):
    def memory(self, operation: Operation, tensors: Sequence[Any]) -> Memory: ...
    def arrived(self, memory: Memory) -> list[Any]: ...


def reduce_at_once(name: str, buckets: Sequence[Bucket], options: GradientOptions, adapter: _Adapter) -> Reduced:
    """Reduce buckets. Collective; blocks. As many buckets, of as many tensors, on every rank.

    Args:
        name: what the names of the operations and of the gradients begin with, the same on every rank.
        buckets: what to reduce.
        options: how.
        adapter: knows the memory of the tensors.

    Raises:
        What `horovodish.collectives` lists.
    """
    if not buckets:
        return Reduced([])
    labels = [[name + label for label in bucket.labels] for bucket in buckets]
    memories = _memories(name, labels, buckets, options, adapter)
    members = [
        (f"{label}\t{shown}", dtype, shape, number)
        for number, (its, bucket, memory) in enumerate(zip(labels, buckets, memories, strict=True))
        for label, shown, (_, _, dtype, shape) in zip(its, bucket.shown, memory.members, strict=True)
    ]
    devices = [memory.placement.device for memory in memories]
    factors = options.prescale_factor, options.postscale_factor
    codecs = [text_of(bucket.codec) for bucket in buckets]
    identity = checked_id(options.process_set)
    plan = basics.engine().plan(name, options.op, *factors, members, devices, identity, codecs=codecs)
    try:
        _submit(plan, buckets, memories)
        while not plan.wait(WAIT_SLICE_SECONDS):
            pass
    except BaseException:  # Ctrl-C, for one: what was submitted goes on
        plan.keep(memories)
        raise
    _finish(plan, memories)
    nowhere, numbers = set(plan.absent_everywhere()), itertools.count()
    return Reduced(
        [[None if next(numbers) in nowhere else tensor for tensor in adapter.arrived(each)] for each in memories],
        plan.any_joined(),
    )


def _memories(
    name: str,
    labels: Sequence[Sequence[str]],
    buckets: Sequence[Bucket],
    options: GradientOptions,
    adapter: _Adapter,
) -> list[Memory]:
    names = [f"{name}, bucket {number}" for number in range(len(buckets))]  # as the engine names a plan's operations
    try:
        return [
            adapter.memory(options.operation(each, its)._replace(codec=bucket.codec), bucket.tensors)
            for each, its, bucket in zip(names, labels, buckets, strict=True)
        ]
    except Exception as problem:
        for each in names:  # the other ranks wait for all of them
            refuse("allreduce", each, checked_id(options.process_set), problem)
        raise


def _submit(plan: _native.BucketPlan, buckets: Sequence[Bucket], memories: Sequence[Memory]) -> None:
    index = 0
    for bucket, memory in zip(buckets, memories, strict=True):
        stream = memory.placement.current_stream() if memory.placement.current_stream is not None else 0
        for place, (source, target, _, _) in enumerate(memory.members):
            hand_over = plan.absent if place in bucket.absent else plan.submit
            hand_over(index, source, target, stream)
            index += 1


def _finish(plan: _native.BucketPlan, memories: Sequence[Memory]) -> None:
    """Have the current stream wait for the results, or raise the error of the plan."""
    streams = [memory.placement.current_stream for memory in memories if memory.placement.current_stream is not None]
    error = plan.error()
    if error is not None:
        plan.keep(memories)
        raise from_native(*error)
    for current_stream in streams[:1]:  # a rank uses one GPU
        plan.order_after(current_stream())
