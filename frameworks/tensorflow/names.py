"""The names of operations: unique among those under way, and the same on every rank.

A function is traced again for inputs of another shape or dtype, on some ranks and not on others. So names count the
operations of one function from its beginning, every time that it is traced, and never across traces. Session graphs
have no names. Each one with a collective gets a number, which starts the names of its operations. A name is an input of
the operation, not an attribute: when executing eagerly, TensorFlow keeps a kernel for every set of attributes.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovodish.collectives.submission import generated_name
from horovodish.tensorflow.tracing import compiled_by_xla, in_graph_for_sessions

_counters: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()
_graph_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_graph_numbers = itertools.count(1)


def operation_name(kind: str, given: str | None, process_set_id: int) -> str:
    """The name of an operation that is called now.

    Args:
        kind: of operation, such as "allreduce".
        given: what the user calls it; None where it is to be counted.
        process_set_id: where it takes place.
    """
    if given is not None:
        return given
    if tf.executing_eagerly():
        return generated_name(kind, process_set_id)
    return _counted(f"{_function_name()}/{kind}")


def name_in_step(name: str) -> str:
    """A name for a collective that is called once in every step, the same in every step.

    When executing eagerly, calls wait for their results, so a name is free again when the next step begins; a name of
    its own for each step would be negotiated anew.
    """
    return name if tf.executing_eagerly() else _counted(f"{_function_name()}/{name}")


def as_input(name: str, described: str = "", members: Sequence[str] = ()) -> Any:
    """A name as the operations take it: the name of the traced function, if any, a newline, and the name.

    Where the ranks disagree about an operation of a function, its others fail with it. It is a tensor, or text for XLA.
    The function is followed, after a tab each, by `described`, what `parameters` says of variables, and by the name
    of each member and what messages of this rank call it; without `members` they are numbered.
    """
    function = "" if tf.executing_eagerly() else _function_name()
    if compiled_by_xla():
        return f"{function}\n{name}"
    return _as_bytes("\t".join([function, described, *members]) + f"\n{name}")


def _as_bytes(text: str) -> Any:
    return tf.constant(np.frombuffer(text.encode(), np.uint8))


def gradient_name(forward: Any, source: str) -> Any:
    """The name of the operation that computes the gradient of another one, as the operations take it.

    Args:
        forward: the other one's name, likewise.
        source: in a graph, the name of the other one's result, because there may be several gradients of it.
    """
    ending = ".gradient"
    if not tf.executing_eagerly():
        number = _count(f"gradient of {source}")
        ending += "" if number == 1 else str(number)
    return forward + ending if isinstance(forward, str) else tf.concat([forward, _as_bytes(ending)], 0)


def _counted(prefix: str) -> str:
    return f"{prefix}.{_count(prefix)}"


def _count(key: str) -> int:
    counter = _counters.setdefault(_function(), Counter())
    counter[key] += 1
    return counter[key]


def _function_name() -> str:
    function = _function()
    if not hasattr(function, "name"):
        return _graph_name(function)
    with tf.init_scope():
        if not in_graph_for_sessions():
            return str(function.name)
        return f"{_graph_name(tf.compat.v1.get_default_graph())}/{function.name}"


def _graph_name(graph: Any) -> str:
    if graph not in _graph_names:
        _graph_names[graph] = f"graph{next(_graph_numbers)}"
    return _graph_names[graph]


def _function() -> Any:
    """The graph of the function that is traced, or for sessions; the bodies of its loops and branches belong to it."""
    graph = tf.compat.v1.get_default_graph()
    while type(graph).__name__ not in ("FuncGraph", "Graph") and getattr(graph, "outer_graph", None) is not None:
        graph = graph.outer_graph
    return graph
