"""TensorFlow's gradients as gradient plans use them, eagerly and in functions.

In a function a bucket leaves as soon as it is complete: nothing there waits for another bucket.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovodish._native import DTYPES
from horovodish.collectives.consistency import checksum_of
from horovodish.collectives.devices import ON_HOST
from horovodish.collectives.operation import Operation
from horovodish.gradients.options import GradientOptions
from horovodish.gradients.plan import (
    Bucket,
    GradientAdapter,
    GradientPlan,
    Layout,
    Memory,
    Payload,
    Reduced,
    Trained,
    name_of,
)
from horovodish.tensorflow import parameters
from horovodish.tensorflow.names import name_in_step
from horovodish.tensorflow.operations import reduced_groups, room_for
from horovodish.tensorflow.sparse import reduced_slices
from horovodish.tensorflow.tracing import compiled_by_xla


class _Gradients(GradientAdapter):
    """Gradients of variables of TensorFlow or Keras, and of tensors."""

    def is_traced(self, gradients: Sequence[Any]) -> bool:
        return not tf.executing_eagerly()

    def on_gpu(self, gradients: Sequence[Any]) -> bool:
        return compiled_by_xla() and bool(tf.config.list_physical_devices("GPU"))

    def name_in_step(self, name: str) -> str:
        return name_in_step(name)

    def is_sparse(self, gradient: Any) -> bool:
        return isinstance(gradient, tf.IndexedSlices)

    def dense(self, gradient: Any) -> Any:
        return tf.convert_to_tensor(gradient)

    def divided(self, gradient: Any, divisor: int) -> Any:
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(gradient.values / divisor, gradient.indices, gradient.dense_shape)
        return gradient / divisor

    def checksum(self, source: Any) -> tuple[str, int] | None:
        variable = getattr(source, "_value", source)  # Keras's variables hold one of TensorFlow's
        if not isinstance(variable, tf.Variable):
            return None
        with tf.init_scope():  # a variable that the traced function itself makes has no value yet
            return checksum_of(variable.numpy()) if variable.is_initialized() else None

    def payload(self, tensor: Any, source: Any) -> Payload:
        dtype = tensor.dtype
        return Payload(math.prod(self.shape(tensor, source)) * dtype.size, dtype)

    def shape(self, tensor: Any, source: Any) -> tuple[int, ...]:
        # A gradient's shape may be unknown to the function, on some ranks only. The variable's shape is always known.
        shape = tf.TensorShape(source.shape)
        return tuple(shape) if shape.is_fully_defined() else (0,)

    def filled(self, gradient: Any, source: Any, layout: Layout) -> Any:
        if layout is Layout.DENSE:
            return tf.zeros(source.shape, source.dtype)
        rows = 0 if gradient is None else source.shape[0]
        values = tf.zeros([0, *source.shape[1:]], source.dtype) if gradient is None else gradient
        return tf.IndexedSlices(values, tf.range(rows, dtype=tf.int64), tf.constant(source.shape, tf.int64))

    def reduce(
        self, name: str, buckets: Sequence[Bucket], options: GradientOptions, trained: Trained | None = None
    ) -> Reduced:
        if tf.executing_eagerly():
            return super().reduce(name, buckets, options)
        groups = [
            (options.operation(bucket.name, bucket.members(name))._replace(codec=bucket.codec), bucket.tensors)
            for bucket in buckets
        ]
        names = [bucket.name for bucket in buckets]
        described = parameters.described(name, names, options.process_set, trained, self.checksum)
        return Reduced(reduced_groups(groups, described))

    def memory(self, operation: Operation, tensors: Sequence[Any]) -> Memory:
        sources = [tensor if tensor.device.endswith("CPU:0") else tensor.cpu() for tensor in tensors]
        results, addresses = room_for(operation, sources)
        members = [
            (source, result, DTYPES[tensor.dtype.name], tuple(tensor.shape.as_list()))
            for tensor, source, result in zip(tensors, addresses, addresses[len(tensors) :], strict=False)
        ]
        return Memory(sources, results, results, members, ON_HOST)

    def reduce_sparse(self, gradient: Any, name: str, options: GradientOptions, absent: bool = False) -> Any:
        return reduced_slices(options.operation(name), gradient, options.compression, absent)


GRADIENTS = _Gradients()


def plan_of(options: GradientOptions) -> GradientPlan:
    """A plan that calls gradients by the names of their variables, which must be the same on every rank."""
    return GradientPlan(options, GRADIENTS, _label, parameters.BROADCAST_REMEDY, "gradients of a tape")


def reduced_gradients(gradients: Sequence[Any], sources: Sequence[Any], plan: GradientPlan) -> list[Any]:
    """The gradients of all ranks. Collective; as `GradientPlan.reduce`."""
    local = set(map(id, plan.local))
    shared = [source for source in sources if id(source) not in local]
    described = [(str(source.shape), tf.as_dtype(source.dtype).name) for source in shared]
    # Every step makes a new tape, so only the sources that it is asked for tell its gradients from other gradients.
    digest = hashlib.sha256(repr(described).encode()).hexdigest()[:8]
    numbers = sum(tf.TensorShape(source.shape).num_elements() or 0 for source in shared)
    name = f"gradients of {len(shared)} variable{'s' * (len(shared) != 1)} with {numbers} numbers ({digest})"
    return plan.reduce(name, gradients, sources)


def _label(index: int, source: Any) -> str:
    name = name_of(source) if hasattr(source, "assign") else ""
    return f".{index}:{name}"
