"""Whether the ranks go on with the same variables, where a `tf.function` reduces gradients.

The name of the reduction also names its variables. Native code asks for their values in the second execution, and now
and then later, before it starts the reduction. All that the function writes after the reduction waits for it, see
`whole_steps.py`, so these are the values that the gradients were computed from.
"""

from __future__ import annotations

import itertools
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context, executor

from horovodish.collectives.consistency import Checksums
from horovodish.collectives.process_sets import ProcessSet
from horovodish.gradients.parameters import Model, compare, readers
from horovodish.gradients.plan import COMPARED_REDUCTION
from horovodish.tensorflow.tracing import compiled_by_xla, in_graph_for_sessions

BROADCAST_REMEDY = (
    "call hvd.broadcast_variables(model.variables, root_rank=0) before the first step, which needs equal learning "
    "rates and optimizer state"
)

_Sources = tuple[Sequence[Any], Callable[[list[Any]], Checksums], Callable[[list[str]], Model]]
_sources: ContextVar[_Sources | None] = ContextVar("_sources", default=None)
_process = uuid.uuid4().hex  # functions loaded from a file have the id of another process
_numbers = itertools.count(1)
_comparisons: dict[str, Callable[[int], None]] = {}


@contextmanager
def of_variables(
    sources: Sequence[Any],
    checksums: Callable[[list[Any]], Checksums],
    model: Callable[[list[str]], Model],
) -> Iterator[None]:
    """Reductions within this context reduce the gradients of these sources.

    Args:
        sources: variables and other things.
        checksums: computes the checksums of the variables in a list of sources. A source that was deleted is None.
        model: what this rank trains, by the names of the reductions.
    """
    token = _sources.set((sources, checksums, model))
    try:
        yield
    finally:
        _sources.reset(token)


def described(name: str, operations: list[str], process_set: ProcessSet) -> str:
    """A text for native code, which begins a step with it, and stands for the variables of the reduction. Empty where
    native code cannot have it."""
    if tf.executing_eagerly() or compiled_by_xla() or in_graph_for_sessions():
        return ""
    given = _sources.get()
    if given is None:
        return "tensorflow without variables"
    sources, checksums, model = given
    # A function does not keep its variables alive either.
    known = [weakref.ref(source) if hasattr(source, "assign") else lambda: None for source in sources]

    def read() -> Checksums:
        # A user's threads may execute asynchronously. What they read would wait for the function that waits for this.
        own = executor.new_executor(enable_async=False)  # the context does not keep it
        context.context().executor = own
        return checksums([source() for source in known])

    def read_beside() -> Checksums:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(read).result()

    reduction = f"{_process}.{next(_numbers)}"
    trained = model(operations)
    _comparisons[reduction] = lambda number: compare(
        name, process_set, number, COMPARED_REDUCTION, read_beside, BROADCAST_REMEDY, model=trained
    )
    return f"tensorflow {reduction}"


def _read(reduction: str, _: list[int], number: int) -> None:
    if reduction in _comparisons:
        _comparisons[reduction](number)


readers["tensorflow"] = _read
