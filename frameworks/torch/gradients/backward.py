"""The end of a backward pass: autograd tells when it comes, and every reducer that took part is finished there.

The hooks of `reducer.py` call `join`. `Participant` is what they have finished: a `Reducer`.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch._compile import _disable_dynamo
from torch.autograd.function import BackwardCFunction

from horovodish.collectives.submission import WAIT_SLICE_SECONDS


class Participant(Protocol):
    """Something to be finished at the end of a backward pass."""

    def pause(self) -> None:
        """A backward within another backward has ended; the outer one goes on."""

    def resume(self) -> None:
        """The outer one has gone on; `join` it unless a hook has done so already."""

    def end_backward(self) -> None:
        """The outermost backward has ended; must not wait for other ranks."""

    def hand_over(self, patience_seconds: float) -> bool:
        """Hand over the remaining gradients. Wait this long for other ranks if needed; False: call again."""

    def wait(self) -> None:
        """Wait for what was handed over."""

    def tune(self) -> None:
        """Take the decision of the autotuner, if one is due; may wait for other ranks, once all have waited."""


class _Pass:
    """A backward pass. Only autograd keeps it, as the owner of the call at the end, also where the pass raises."""

    def __init__(self) -> None:
        self._participants: list[Participant] = []

    def add(self, participant: Participant) -> None:
        self._participants.append(participant)

    def remove(self, participant: Participant) -> None:
        self._participants = [other for other in self._participants if other is not participant]

    def end(self) -> None:
        with _lock:
            participants, self._participants = self._participants, []
        if participants:
            _finish(participants)


# By the id of autograd's graph task: several threads may run a backward pass each, and one pass of CUDA tensors runs in
# several threads.
_passes: weakref.WeakValueDictionary[int, _Pass] = weakref.WeakValueDictionary()
_lock = threading.RLock()  # reentrant: garbage collection while it is held may call `leave`
_GLANCE_SECONDS = 1e-4  # per reduction, in turn: other ranks may need the first one that is ready
_APPLY = BackwardCFunction.apply.__code__


@_disable_dynamo
def join(participant: Participant) -> None:
    """Called by the first hook of a participant in a backward pass.

    Raises:
        RuntimeError: the pass is one of compiled autograd, which does not tell when it ends.
    """
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled_autograd is not None and compiled_autograd.in_compiled_autograd_region:
        raise RuntimeError(
            "compiled autograd does not tell when backward() ends, so gradients cannot be reduced there; leave "
            "torch._dynamo.config.compiled_autograd off. torch.compile works without it"
        )
    task = torch._C._current_graph_task_id()
    with _lock:
        joined = _passes.get(task)
        if joined is None:
            joined = _passes[task] = _Pass()
            torch.autograd.Variable._execution_engine.queue_callback(joined.end)
        joined.add(participant)


def leave(participant: Participant) -> None:
    """Undoes `join`, where the participant is finished before its backward pass ends."""
    with _lock:
        for joined in list(_passes.values()):
            joined.remove(participant)


def _finish(participants: Sequence[Participant]) -> None:
    if _inside_another_backward():
        for participant in participants:
            participant.pause()
        _resume_in_outer(participants)
        return
    # All hand over before any waits: the ranks need not have met their participants in the same order.
    for participant in participants:
        participant.end_backward()
    errors: list[Exception] = []
    hand_over(participants, errors)
    for finish in [*(each.wait for each in participants), *(each.tune for each in participants)]:
        try:
            finish()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def hand_over(participants: Sequence[Participant], errors: list[Exception] | None = None) -> None:
    """Make all participants hand over their remaining gradients, each as soon as it can.

    Args:
        participants: `end_backward` was called for them.
        errors: takes what a participant raises while the others go on; it is raised at once when None.
    """
    left, patience_seconds = list(participants), 0.0
    while left:
        left = [each for each in left if not _has_handed_over(each, patience_seconds, errors)]
        # The engine must know that this thread waits, or it could not tell that every rank waits.
        patience_seconds = WAIT_SLICE_SECONDS if len(left) == 1 else _GLANCE_SECONDS


def _has_handed_over(participant: Participant, patience_seconds: float, errors: list[Exception] | None) -> bool:
    try:
        return participant.hand_over(patience_seconds)
    except Exception as error:
        if errors is None:
            raise
        errors.append(error)
        return True


def _resume_in_outer(participants: Sequence[Participant]) -> None:
    """Make the outer backward call `resume`: no hook may do it where all parameters are in checkpointed blocks."""
    # A callback queued now would belong to the backward that ends. The nodes that follow the custom function are run by
    # the outer one.
    function: Any = torch._C._current_autograd_node()
    if function is None:
        return

    def resume(_: Any) -> None:
        for handle in handles:
            handle.remove()
        for participant in participants:
            participant.resume()

    handles = [node.register_prehook(resume) for node, _ in function.next_functions if node is not None]


def _inside_another_backward() -> bool:
    """Whether the backward that ends here was started by the backward of a custom function, as checkpointing does."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_code is _APPLY:
            return True
        frame = frame.f_back
    return False
