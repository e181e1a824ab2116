"""How the gradients of a tape or an optimizer become those of all ranks.

They travel in buckets that are planned from their sizes alone, in the opposite order of the variables, which is roughly
the order in which a backward pass finishes them. In a function a bucket leaves as soon as it is complete.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from horovodish import settings
from horovodish.collectives import allreduce
from horovodish.compression import Compressor, check_compression
from horovodish.fusion import plan_buckets
from horovodish.process_sets import ProcessSet, check_kind
from horovodish.reduce_ops import Average, Max, ReduceOp, chosen_op
from horovodish.tensorflow.names import stable_name
from horovodish.tensorflow.operations import Reduction, reduced_groups
from horovodish.tensorflow.sparse import reduced_slices

Groups = int | Sequence[Sequence[Any]] | None

_ABSENT, _DENSE, _SPARSE = 0, 1, 2
"""What a rank has for a variable. The largest over the ranks says how it is reduced."""


@dataclass(frozen=True)
class GradientReduction:
    """The arguments of `DistributedGradientTape` and its siblings that say how gradients are reduced.

    Attributes:
        groups: variables whose gradients are reduced as a unit, or the number of such groups to make of all.
        local: the ids of variables whose gradients stay those of this rank.
    """

    compression: Compressor
    sparse_as_dense: bool
    op: ReduceOp
    prescale_factor: float
    postscale_factor: float
    groups: Groups
    process_set: ProcessSet
    scale_local_gradients: bool
    local: set[int] = field(default_factory=set)

    @property
    def alone(self) -> bool:
        """Whether this rank has nobody to reduce with: it is the only one, or outside the process set."""
        return self.process_set.size() == 1 or not self.process_set.included()


def checked_reduction(
    compression: Compressor,
    sparse_as_dense: bool,
    op: ReduceOp,
    gradient_predivide_factor: float,
    num_groups: int,
    groups: Groups,
    process_set: ProcessSet,
    scale_local_gradients: bool,
) -> GradientReduction:
    """The arguments of `DistributedGradientTape`, once it is clear that they go together.

    Raises:
        ValueError: they do not.
    """
    op = chosen_op(None, op)
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor} needs op=Average")
    if gradient_predivide_factor <= 0:
        raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor} is not positive")
    check_compression(compression)
    check_kind(process_set)
    if num_groups and groups is not None:
        raise ValueError("num_groups= and groups= were both given; groups= takes a number, too")
    chosen = groups if groups is not None else num_groups or None
    if isinstance(chosen, int) and chosen < 0:
        raise ValueError(f"groups={chosen} is not possible; it is a number of groups, 0 for none, or a list of lists")
    if not isinstance(chosen, int | None) and not all(isinstance(group, list | tuple) for group in chosen):
        raise ValueError("groups must be a number, or a list of lists of variables")
    return GradientReduction(
        compression,
        sparse_as_dense,
        op,
        1.0 / gradient_predivide_factor,
        gradient_predivide_factor,
        chosen or None,
        process_set,
        scale_local_gradients,
    )


def reduced_gradients(gradients: Sequence[Any], sources: Sequence[Any], how: GradientReduction) -> list[Any]:
    """The gradients of all ranks. Collective.

    Args:
        gradients: of this rank: tensors, IndexedSlices, or None where it has none.
        sources: what they are the gradients of.
        how: to reduce them.

    Returns:
        New gradients in the same order. One that is None on every rank stays None; where some ranks have one, the
        others contribute zeros when executing eagerly. In a function the ranks must agree.
    """
    if how.alone:
        return list(gradients)
    results = [_scaled_local(g, how) if id(s) in how.local else g for g, s in zip(gradients, sources, strict=True)]
    shared = [index for index, source in enumerate(sources) if id(source) not in how.local]
    own = {index: _prepared(gradients[index], how) for index in shared}
    name = stable_name("gradients", _described([sources[index] for index in shared]))
    if tf.executing_eagerly():
        own = _agreed(own, sources, name, how)
    there = [index for index in reversed(shared) if own[index] is not None]
    dense = [index for index in there if not isinstance(own[index], tf.IndexedSlices)]
    reduction = Reduction(how.op, how.prescale_factor, how.postscale_factor, how.process_set)
    buckets = _buckets(dense, own, sources, how)
    compressed = {index: how.compression.compress(own[index]) for members in buckets for index in members}
    groups = [
        ([compressed[index][0] for index in members], f"{name}.{_label(members, sources)}") for members in buckets
    ]
    for members, found in zip(buckets, reduced_groups(groups, reduction), strict=True):
        for index, result in zip(members, found, strict=True):
            results[index] = how.compression.decompress(result, compressed[index][1])
    for index in set(there) - set(dense):
        label = f"{name}.{_label([index], sources)}"
        results[index] = reduced_slices(own[index], label, reduction, how.compression)
    return results


def _prepared(gradient: Any, how: GradientReduction) -> Any:
    if isinstance(gradient, tf.IndexedSlices) and how.sparse_as_dense:
        return tf.convert_to_tensor(gradient)
    return gradient


def _scaled_local(gradient: Any, how: GradientReduction) -> Any:
    if gradient is None or not how.scale_local_gradients:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / how.process_set.size(), gradient.indices, gradient.dense_shape)
    return gradient / how.process_set.size()


def _agreed(own: dict[int, Any], sources: Sequence[Any], name: str, how: GradientReduction) -> dict[int, Any]:
    """The gradients, with zeros where only other ranks have one, and as slices where another rank has slices."""
    kinds = np.array([_kind(gradient) for gradient in own.values()], np.uint8)
    wanted = allreduce(kinds, op=Max, name=f"{name}: which ranks have them", process_set=how.process_set)
    return {
        index: own[index] if kind == _kind(own[index]) else _as_kind(own[index], sources[index], kind)
        for index, kind in zip(own, wanted.tolist(), strict=True)
    }


def _kind(gradient: Any) -> int:
    if gradient is None:
        return _ABSENT
    return _SPARSE if isinstance(gradient, tf.IndexedSlices) else _DENSE


def _as_kind(gradient: Any, source: Any, kind: int) -> Any:
    if kind == _DENSE:
        return tf.zeros(source.shape, source.dtype)
    rows = 0 if gradient is None else source.shape[0]
    values = tf.zeros([0, *source.shape[1:]], source.dtype) if gradient is None else gradient
    return tf.IndexedSlices(values, tf.range(rows, dtype=tf.int64), tf.constant(source.shape, tf.int64))


def _described(sources: Iterable[Any]) -> str:
    """A short text that differs for sources of other shapes or dtypes, for the names of their gradients."""
    described = [(str(source.shape), tf.as_dtype(source.dtype).name) for source in sources]
    return hashlib.sha256(repr(described).encode()).hexdigest()[:8]


def _label(members: Sequence[int], sources: Sequence[Any]) -> str:
    source = sources[members[0]]
    name = getattr(source, "path", None) or (source.name if hasattr(source, "assign") else "")
    return f"{members[0]}:{name}" + (f" and {len(members) - 1} more" if len(members) > 1 else "")


def _buckets(
    dense: Sequence[int], own: dict[int, Any], sources: Sequence[Any], how: GradientReduction
) -> list[list[int]]:
    tensors = [own[index] for index in dense]
    # A gradient's shape may be unknown to the function, on some ranks only. That of its variable never is.
    counts = [tf.TensorShape(sources[index].shape).num_elements() or 0 for index in dense]
    numbers = plan_buckets(
        [count * tensor.dtype.size for count, tensor in zip(counts, tensors, strict=True)],
        [tensor.dtype for tensor in tensors],
        threshold_bytes=int(settings.load().fusion_threshold_mb * 2**20),
        groups=[_group_of(how.groups, len(dense))(place, sources[index]) for place, index in enumerate(dense)],
    )
    members = defaultdict(list)
    for number, index in zip(numbers, dense, strict=True):
        members[number].append(index)
    return [members[number] for number in sorted(members)]


def _group_of(groups: Groups, count: int) -> Callable[[int, Any], int | None]:
    if groups is None:
        return lambda place, source: None
    if isinstance(groups, int):
        return lambda place, source: place * groups // count
    numbers = {id(variable): number for number, group in enumerate(groups) for variable in group}
    return lambda place, source: numbers.get(id(source))
