"""Whether the ranks go on with the same variables, where a `tf.function` reduces gradients.

The name of the reduction also names its variables. Native code asks for their values in the second execution, and now
and then later, before it starts the reduction. All that the function writes after the reduction waits for it, see
`whole_steps.py`, so these are the values that the gradients were computed from.
"""

from __future__ import annotations

import itertools
import uuid
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context, executor

from horovodish.collectives.consistency import Checksums
from horovodish.collectives.process_sets import ProcessSet
from horovodish.gradients.parameters import Model, compare, readers
from horovodish.gradients.plan import COMPARED_REDUCTION, Trained
from horovodish.tensorflow.tracing import compiled_by_xla, in_graph_for_sessions

BROADCAST_REMEDY = (
    "call hvd.broadcast_variables(model.variables, root_rank=0) before the first step, which needs equal learning "
    "rates and optimizer state"
)

_process = uuid.uuid4().hex  # functions loaded from a file have the id of another process
_numbers = itertools.count(1)
_comparisons: dict[str, Callable[[int], None]] = {}


def described(
    name: str,
    operations: list[str],
    process_set: ProcessSet,
    trained: Trained | None,
    checksum: Callable[[Any], tuple[str, int] | None],
) -> str:
    """A text for native code, which begins a step with it, and stands for the variables of the reduction. Empty where
    native code cannot have it.

    Args:
        name: of the reduction, the same on every rank.
        operations: the names of the operations of the reduction.
        process_set: the ranks that reduce.
        trained: what the ranks compare; None: nothing.
        checksum: describes a variable; None for one that was deleted or has no value.
    """
    if tf.executing_eagerly() or compiled_by_xla() or in_graph_for_sessions():
        return ""
    if trained is None:
        return "tensorflow without variables"
    # A function does not keep its variables alive either.
    known = [(label, weakref.ref(each)) for label, each in trained.values.items() if hasattr(each, "assign")]

    def read() -> Checksums:
        # A user's threads may execute asynchronously. What they read would wait for the function that waits for this.
        own = executor.new_executor(enable_async=False)  # the context does not keep it
        context.context().executor = own
        return {label: found for label, variable in known if (found := checksum(variable())) is not None}

    def read_beside() -> Checksums:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(read).result()

    reduction = f"{_process}.{next(_numbers)}"
    # If the first comparison comes later, the ranks have compared their models while they traced the function.
    has_model = trained.first <= COMPARED_REDUCTION
    model = Model(trained.kin, trained.names, trained.shapes, operations) if has_model else None
    # The function below is kept for ever, so it has no `trained`, which has the variables.
    first, remedy, once_for = trained.first, trained.remedy, trained.once_for
    _comparisons[reduction] = lambda number: compare(
        name, process_set, number, first, read_beside, remedy, model=model, once_for=once_for
    )
    return f"tensorflow {reduction}"


def _read(reduction: str, _: list[int], number: int) -> None:
    if reduction in _comparisons:
        _comparisons[reduction](number)


readers["tensorflow"] = _read
