"""The gradients of the collectives.

A gradient is that of the sum of the losses of all ranks that take part, so where an operation sends values to other
ranks, its gradient brings their gradients back. It is made of the same operations, so that it has gradients, too.

With the setting collective_gradients=horovod it is multiplied by `collective_gradients.factor`. The setting is read
when the gradient is computed, because a function may be traced before `shutdown()` and called after another `init()`.

It is named after the operation: ranks need not run them in one order. A group stays a group. Ranks that have joined had
no part in the operation and are left out of its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from horovodish.collectives import collective_gradients
from horovodish.collectives.process_sets import global_process_set
from horovodish.collectives.reduce_ops import Average, ReduceOp, Sum
from horovodish.tensorflow import xla
from horovodish.tensorflow.failures import own_errors
from horovodish.tensorflow.library import call, native
from horovodish.tensorflow.names import gradient_name
from horovodish.tensorflow.sets import attribute_of, number_of, set_of
from horovodish.tensorflow.tracing import compiled_by_xla

_UNSCALED = "1.0 1.0"


def _registered(collective: str) -> Callable[[Callable[..., list[Any]]], Callable[..., list[Any]]]:
    """Registers the gradient of a collective, which gives one for each of its tensors."""

    def register(gradient: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def of_tensors(operation: Any, *gradients: Any) -> list[Any]:
            with own_errors():
                return gradient(operation, _name(operation), *gradients)

        def of_operation(operation: Any, *gradients: Any) -> list[Any]:
            found = of_tensors(operation, *gradients)
            return [None, *found, *[None] * (len(operation.inputs) - 1 - len(found))]

        xla.derivatives[collective] = of_tensors
        for part in ("", "Take"):
            tf.RegisterGradient(f"Horovodish{collective}{part}")(of_operation)
        return gradient

    return register


for _operation in ("Join", "JoinTake", "Barrier", "BarrierTake", "Look", "Probe", "Place"):
    tf.no_gradient(f"Horovodish{_operation}")


@_registered("Allreduce")
def _of_allreduce(operation: Any, name: Any, *gradients: Any) -> list[Any]:
    has = _floating(_tensors(operation))
    attributes = _linear(operation, "allreduce")
    return _spread(call("Allreduce", name, _chosen(gradients, has), **attributes), has)


@_registered("Allgather")
def _of_allgather(operation: Any, name: Any, *gradients: Any) -> list[Any]:
    tensors = _tensors(operation)
    has = _floating(tensors)
    counts = _chosen(operation.outputs[len(tensors) :], has)
    process_set = operation.get_attr("process_set")
    summed = _summed(name, _chosen(gradients[: len(tensors)], has), process_set)
    place = _place(process_set)
    rank, factor = place.rank, _factor("allgather", Sum, place.size)
    own = [
        tf.reshape(gradient[tf.reduce_sum(rows[:rank]) :][: rows[rank]], tf.shape(tensor))
        * tf.cast(factor, gradient.dtype)
        for gradient, rows, tensor in zip(summed, counts, _chosen(tensors, has), strict=True)
    ]
    return _spread(own, has)


@_registered("Broadcast")
def _of_broadcast(operation: Any, name: Any, gradient: Any) -> list[Any]:
    (summed,) = _summed(name, [gradient], operation.get_attr("process_set"))
    factor = _factor("broadcast", Sum, _place(operation.get_attr("process_set")).size)
    is_root = tf.equal(_place(attribute_of(global_process_set)).rank, operation.get_attr("root_rank"))
    return [tf.where(is_root, summed * tf.cast(factor, summed.dtype), tf.zeros_like(summed))]


@_registered("Alltoall")
def _of_alltoall(operation: Any, name: Any, gradient: Any, *_: Any) -> list[Any]:
    process_set = operation.get_attr("process_set")
    returned = call("Alltoall", name, gradient, operation.outputs[1], process_set=process_set)
    sent = _even_where_empty(operation.inputs[2], tf.shape(operation.inputs[1], tf.int64)[0], process_set)
    return [_with_absent_rows(returned.received, returned.received_splits, sent)]


@_registered("Reducescatter")
def _of_reducescatter(operation: Any, name: Any, *gradients: Any) -> list[Any]:
    tensors = _tensors(operation)
    has = _floating(tensors)
    attributes = _linear(operation, "reducescatter")
    process_set = attributes["process_set"]
    mark = tf.ones([1])  # so that also a rank without rows can be told from one that has joined
    own = [*_chosen(gradients, has), mark]
    outputs = call("Allgather", name, own, N=len(own), process_set=process_set)
    pre, post = map(float, attributes["factors"].split())
    factor = pre * post * _factor("reducescatter", ReduceOp(attributes["op"]), tf.reduce_sum(outputs.rows[-1]))
    whole = [
        _with_absent_rows(rows, came, _dealt(tf.shape(tensor, tf.int64)[0], process_set)) * tf.cast(factor, rows.dtype)
        for rows, came, tensor in zip(outputs.gathered[:-1], outputs.rows[:-1], _chosen(tensors, has), strict=True)
    ]
    return _spread(whole, has)


def _place(attribute: str | bytes) -> Any:
    """This rank's number in a process set, the set's size and whether gradients are Horovod's, at the time when the
    gradient is computed."""
    if not compiled_by_xla():
        return native.horovodish_place(process_set=number_of(attribute))
    process_set = set_of(attribute)
    horovods = int(collective_gradients.are_horovods())
    return SimpleNamespace(rank=process_set.rank(), size=process_set.size(), horovods_gradients=horovods)


def _factor(kind: str, op: ReduceOp, ranks: Any) -> Any:
    ranks = tf.cast(ranks, tf.float64)
    exact, horovods = (collective_gradients.factor(kind, op, ranks, each) for each in (False, True))
    return tf.where(tf.cast(_place(attribute_of(global_process_set)).horovods_gradients, tf.bool), horovods, exact)


def _name(operation: Any) -> Any:
    result = operation.outputs[0]
    return gradient_name(operation.inputs[0], result.name if tf.is_symbolic_tensor(result) else "")


def _tensors(operation: Any) -> list[Any]:
    """The tensors that a collective was given; the first input is its name."""
    return list(operation.inputs)[1 : 1 + len(operation.get_attr("T"))]


def _linear(operation: Any, kind: str) -> dict[str, Any]:
    op = ReduceOp(operation.get_attr("op"))
    if op not in (Average, Sum):
        raise NotImplementedError(
            f"{kind} has a gradient for op=Average and op=Sum only, not for op={op.name.capitalize()}; pass "
            "tf.stop_gradient(tensor) where none is wanted"
        )
    factors = operation.get_attr("factors")
    factors = factors.decode() if isinstance(factors, bytes) else factors
    return {"op": int(op), "factors": factors, "process_set": operation.get_attr("process_set")}


def _summed(name: Any, tensors: Sequence[Any], process_set: str | bytes) -> list[Any]:
    if not tensors:
        return []
    return list(call("Allreduce", name, list(tensors), op=int(Sum), factors=_UNSCALED, process_set=process_set))


def _floating(tensors: Iterable[Any]) -> list[bool]:
    return [tensor.dtype.is_floating for tensor in tensors]


def _chosen(values: Iterable[Any], has: Sequence[bool]) -> list[Any]:
    """The values of the floating-point members. The other members have no gradient."""
    return [value for value, chosen in zip(values, has, strict=False) if chosen]


def _spread(gradients: Iterable[Any], has: Sequence[bool]) -> list[Any]:
    """The opposite of `_chosen`: None where there is no gradient."""
    following = iter(gradients)
    return [next(following) if chosen else None for chosen in has]


def _dealt(rows: Any, process_set: str | bytes) -> Any:
    """How rows are dealt out as evenly as possible, by rank."""
    ranks = tf.cast(_place(process_set).size, tf.int64)
    return rows // ranks + tf.cast(tf.range(ranks) < rows % ranks, tf.int64)


def _even_where_empty(splits: Any, rows: Any, process_set: str | bytes) -> Any:
    return tf.cond(tf.equal(tf.size(splits), 0), lambda: _dealt(rows, process_set), lambda: splits)


def _with_absent_rows(rows: Any, came: Any, expected: Any) -> Any:
    """`rows`, with zeros in the place of those of ranks that have joined and gave none."""
    positions = tf.range(tf.reduce_sum(expected))
    ends = tf.cumsum(expected)
    rank = tf.searchsorted(ends, positions, side="right")
    within = positions - tf.gather(ends - expected, rank)
    begins = tf.gather(tf.cumsum(came) - came, rank)
    there = tf.gather(came, rank) > 0

    def spread() -> Any:
        blank = tf.zeros(tf.concat([[1], tf.shape(rows)[1:]], 0), rows.dtype)
        return tf.gather(tf.concat([rows, blank], 0), tf.where(there, begins + within, tf.shape(rows, tf.int64)[0]))

    return tf.cond(tf.reduce_all(tf.equal(came, expected)), lambda: rows, spread)
