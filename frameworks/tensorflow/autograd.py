"""The gradients of the collectives, by the rules of `collectives/derivatives.py`.

A gradient is made of the same operations, so that it has gradients, too. The setting collective_gradients is read when
the gradient is computed, because a function may be traced before `shutdown()` and called after another `init()`.

It is named after the operation: ranks need not run them in one order. A group stays a group. Ranks that have joined had
no part in the operation and are left out of its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from horovodish.collectives.derivatives import are_horovods, check_linear, chosen, factor, opposite, spread
from horovodish.collectives.operation import Operation
from horovodish.collectives.process_sets import ProcessSet, checked_id, global_process_set
from horovodish.tensorflow import xla
from horovodish.tensorflow.calls import Call, call_of
from horovodish.tensorflow.failures import own_errors
from horovodish.tensorflow.library import native, run
from horovodish.tensorflow.names import gradient_name
from horovodish.tensorflow.tracing import compiled_by_xla

_REMEDY = "tf.stop_gradient(tensor)"


def _registered(
    kind: str, parts: Sequence[str] = ("", "Take")
) -> Callable[[Callable[..., list[Any]]], Callable[..., list[Any]]]:
    """Registers the gradient of a collective, which gives one for each of its tensors. Operations end in `parts`."""

    def register(gradient: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def of_call(call: Call, *gradients: Any) -> list[Any]:
            with own_errors():
                return gradient(call, *gradients)

        def of_operation(operation: Any, *gradients: Any) -> list[Any]:
            found = of_call(call_of(kind, operation), *gradients)
            return [None, *found, *[None] * (len(operation.inputs) - 1 - len(found))]

        xla.derivatives[kind] = of_call
        for part in parts:
            tf.RegisterGradient(f"Horovodish{kind.capitalize()}{part}")(of_operation)
        return gradient

    return register


for _operation in ("Join", "JoinTake", "Barrier", "BarrierTake", "Look", "Probe", "Place"):
    tf.no_gradient(f"Horovodish{_operation}")


@_registered("allreduce", ("", "Take", "Room"))
def _of_allreduce(call: Call, *gradients: Any) -> list[Any]:
    check_linear(call.operation, _REMEDY)
    has = _floating(call.tensors)
    reduced, _ = _sent_back(call, chosen(gradients, has))
    return spread(reduced, has)


@_registered("allgather")
def _of_allgather(call: Call, *gradients: Any) -> list[Any]:
    has = _floating(call.tensors)
    summed, _ = _sent_back(call, chosen(gradients, has))
    place = _place(call.operation.process_set)
    rank, scale = place.rank, _factor(call.operation, place.size)
    own = [
        tf.reshape(gradient[tf.reduce_sum(rows[:rank]) :][: rows[rank]], tf.shape(tensor))
        * tf.cast(scale, gradient.dtype)
        for gradient, rows, tensor in zip(summed, chosen(call.rows, has), chosen(call.tensors, has), strict=True)
    ]
    return spread(own, has)


@_registered("broadcast")
def _of_broadcast(call: Call, gradient: Any) -> list[Any]:
    (summed,), _ = _sent_back(call, [gradient])
    scale = _factor(call.operation, _place(call.operation.process_set).size)
    is_root = tf.equal(_place(global_process_set).rank, call.operation.root_rank)
    return [tf.where(is_root, summed * tf.cast(scale, summed.dtype), tf.zeros_like(summed))]


@_registered("alltoall")
def _of_alltoall(call: Call, gradient: Any, *_: Any) -> list[Any]:
    splits, process_set = call.operation.splits, call.operation.process_set
    (returned,), (came,) = _sent_back(call, [gradient], splits=call.rows[0])
    sent = _dealt(tf.shape(call.tensors[0], tf.int64)[0], process_set)
    if splits is not None:
        sent = tf.cond(tf.equal(tf.size(splits), 0), lambda: sent, lambda: splits)
    return [_with_absent_rows(returned, came, sent)]


@_registered("reducescatter")
def _of_reducescatter(call: Call, *gradients: Any) -> list[Any]:
    check_linear(call.operation, _REMEDY)
    has = _floating(call.tensors)
    mark = tf.ones([1])  # so that also a rank without rows can be told from one that has joined
    (*gathered, _), (*counts, marks) = _sent_back(call, [*chosen(gradients, has), mark])
    scale = _factor(call.operation, tf.reduce_sum(marks))
    dealt = [_dealt(tf.shape(tensor, tf.int64)[0], call.operation.process_set) for tensor in chosen(call.tensors, has)]
    whole = [
        _with_absent_rows(rows, came, expected) * tf.cast(scale, rows.dtype)
        for rows, came, expected in zip(gathered, counts, dealt, strict=True)
    ]
    return spread(whole, has)


def _sent_back(call: Call, gradients: Sequence[Any], **changes: Any) -> tuple[list[Any], list[Any]]:
    """Runs the opposite of a collective; as `library.run`."""
    if not gradients:
        return [], []
    result = call.results[0]
    name = gradient_name(call.name, result.name if tf.is_symbolic_tensor(result) else "")
    return run(Call(opposite(call.operation)._replace(**changes), name, gradients))


def _place(process_set: ProcessSet) -> Any:
    """This rank's number in a process set, the set's size and whether gradients are Horovod's, at the time when the
    gradient is computed."""
    if not compiled_by_xla():
        return native.horovodish_place(process_set=checked_id(process_set))
    return SimpleNamespace(rank=process_set.rank(), size=process_set.size(), horovods_gradients=int(are_horovods()))


def _factor(operation: Operation, ranks: Any) -> Any:
    exact, horovods = (factor(operation, tf.cast(ranks, tf.float64), each) for each in (False, True))
    return tf.where(tf.cast(_place(global_process_set).horovods_gradients, tf.bool), horovods, exact)


def _floating(tensors: Iterable[Any]) -> list[bool]:
    return [tensor.dtype.is_floating for tensor in tensors]


def _dealt(rows: Any, process_set: ProcessSet) -> Any:
    """As `dealt_rows`, of a number of rows that is known only when the gradient is computed."""
    ranks = tf.cast(_place(process_set).size, tf.int64)
    return rows // ranks + tf.cast(tf.range(ranks) < rows % ranks, tf.int64)


def _with_absent_rows(rows: Any, came: Any, expected: Any) -> Any:
    """`rows`, with rows of zeros for ranks that have joined and gave none."""
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
