"""A collective with its tensors, and as TensorFlow's operations have it in their attributes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from horovodish.collectives.operation import Operation, codec_of, text_of
from horovodish.collectives.reduce_ops import ReduceOp, chosen_op
from horovodish.tensorflow.sets import attribute_of, set_of


class Call(NamedTuple):
    """A collective that runs, or that belongs to a function while TensorFlow traces it.

    Attributes:
        operation: what to do. In a graph it does not say its own name.
        name: the operation's name, converted by `names.as_input`.
        tensors: its members.
        results: what comes out, by member, once there is something.
        rows: of an allgather or an alltoall, how many rows came from each rank, by member, likewise.
    """

    operation: Operation
    name: Any
    tensors: Sequence[Any]
    results: Sequence[Any] = ()
    rows: Sequence[Any] = ()


def attributes_of(operation: Operation) -> dict[str, Any]:
    """The attributes of the native operation."""
    attributes: dict[str, Any] = {"process_set": attribute_of(operation.process_set)}
    if operation.kind in ("allreduce", "reducescatter"):
        # An attribute of TensorFlow's is float32 at most.
        factors = f"{float(operation.prescale_factor)!r} {float(operation.postscale_factor)!r}"
        attributes.update(op=int(chosen_op(operation.average, operation.op)), factors=factors)
    if operation.kind == "allreduce":
        attributes.update(codec=text_of(operation.codec))
    elif operation.kind == "broadcast":
        attributes.update(root_rank=operation.root_rank)
    return attributes


def call_of(kind: str, native: Any) -> Call:
    """The opposite: what a native operation has done.

    Raises:
        ValueError: its process set is not in use any more.
    """
    name, *inputs = native.inputs  # the last one is a ticket where an operation of its own takes the results
    outputs = list(native.outputs)
    operation = Operation(kind, None, set_of(native.get_attr("process_set")))
    if kind == "broadcast":
        return Call(operation._replace(root_rank=native.get_attr("root_rank")), name, inputs[:1], outputs)
    if kind == "alltoall":
        return Call(operation._replace(splits=inputs[1]), name, inputs[:1], outputs[:1], outputs[1:])
    count = len(native.get_attr("T"))
    if kind == "allgather":
        return Call(operation, name, inputs[:count], outputs[:count], outputs[count:])
    prescale, postscale = map(float, tf.compat.as_str(native.get_attr("factors")).split())
    op = ReduceOp(native.get_attr("op"))
    operation = operation._replace(op=op, prescale_factor=prescale, postscale_factor=postscale)
    if kind == "allreduce":
        operation = operation._replace(codec=codec_of(tf.compat.as_str(native.get_attr("codec"))))
    return Call(operation, name, inputs[:count], outputs)
