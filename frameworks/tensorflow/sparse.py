"""The sum of `tf.IndexedSlices`, such as the gradients of embeddings."""

from __future__ import annotations

import tensorflow as tf

from horovodish.collectives.adapter import checked_op
from horovodish.collectives.operation import Operation
from horovodish.collectives.reduce_ops import Average, Sum
from horovodish.errors import UnsupportedTensorError
from horovodish.gradients.compression import Compressor
from horovodish.tensorflow.operations import check_dtypes, gathered, refuse_on_error
from horovodish.tensorflow.tracing import compiled_by_xla


def reduced_slices(
    operation: Operation, slices: tf.IndexedSlices, compression: Compressor, absent: bool = False
) -> tf.IndexedSlices | None:
    """The sum or average of the slices of all ranks. What travels is in proportion to the slices, not to the shape.

    Every rank first adds up its own slices of the same index. Then the slices of all ranks are gathered and added up
    likewise: an optimizer such as Keras's Adam squares slices of the same index one by one. In a function that XLA
    compiles the slices are gathered as they are, and every rank must have as many. When executing eagerly, the result
    is None if the slices are `absent` on every rank: each of them has given an empty stand-in.

    Raises:
        UnsupportedTensorError: the op is neither `Sum` nor `Average`, or the dtype cannot be reduced.
    """
    op = checked_op("allreduce", str(operation.name), operation.average, operation.op)
    gather = Operation("allgather", operation.name, operation.process_set)
    with refuse_on_error(gather):
        if op not in (Average, Sum):
            raise UnsupportedTensorError(
                f"{operation.name}: it is sparse, and op={op.name.capitalize()} is not for IndexedSlices; use "
                "op=Average or op=Sum, or pass tf.convert_to_tensor(slices)"
            )
        check_dtypes(operation, [slices.values])
    values, indices = slices.values, tf.cast(slices.indices, tf.int64)  # int32 on one rank, int64 on another
    values, indices = _added_up(values, indices)
    payload, context = compression.compress(values)
    mark = tf.constant([0 if absent else 1], tf.uint8)  # of every rank that takes part
    (payload, indices, marks), _ = gathered(gather, [payload, indices, mark])
    if tf.executing_eagerly() and not tf.reduce_any(marks > 0):
        return None
    values, indices = _added_up(compression.decompress(payload, context), indices)
    factor = operation.prescale_factor * operation.postscale_factor
    ranks = tf.size(marks) if op is Average else tf.constant(1)
    if values.dtype.is_floating:
        values *= tf.cast(tf.cast(factor, tf.float64) / tf.cast(ranks, tf.float64), values.dtype)
    else:
        if factor != 1.0:
            values = tf.cast(tf.cast(values, tf.float64) * factor, values.dtype)
        # An int8 holds no more than 127 ranks.
        values = tf.cast(tf.truncatediv(tf.cast(values, tf.int64), tf.cast(ranks, tf.int64)), values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _added_up(values: tf.Tensor, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    if compiled_by_xla():  # which knows no shape that depends on values
        return values, indices
    indices, positions = tf.unique(indices)
    return tf.math.unsorted_segment_sum(values, positions, tf.size(indices)), indices
