"""The end of a backward pass: autograd tells when it comes, and every reducer that took part is finished there."""

from __future__ import annotations

import sys
from typing import Protocol

import torch
from torch.autograd.function import BackwardCFunction


class Participant(Protocol):
    """Something to be finished at the end of a backward pass."""

    def pause(self) -> None:
        """A backward within another backward has ended; the outer one goes on."""

    def end_backward(self) -> None:
        """The outermost backward has ended: hand over what is left, without waiting for other ranks."""

    def wait(self) -> None:
        """Wait for what was handed over."""


_participants: list[Participant] = []
_APPLY = BackwardCFunction.apply.__code__


def join(participant: Participant) -> None:
    """Called by the first hook of a participant in a backward pass."""
    _participants.append(participant)
    torch.autograd.Variable._execution_engine.queue_callback(_end)


def leave(participant: Participant) -> None:
    """Undoes `join`, after a backward pass that raised and therefore had no end."""
    _participants[:] = [other for other in _participants if other is not participant]


def _end() -> None:
    participants = list(_participants)
    _participants.clear()
    if not participants:
        return
    if _inside_another_backward():
        for participant in participants:
            participant.pause()
        return
    # All hand over before any waits: the ranks need not have met their participants in the same order.
    for participant in participants:
        participant.end_backward()
    errors = [error for error in map(_error_of_wait, participants) if error is not None]
    if errors:
        raise errors[0]


def _error_of_wait(participant: Participant) -> Exception | None:
    try:
        participant.wait()
    except Exception as error:
        return error
    return None


def _inside_another_backward() -> bool:
    """Whether the backward that ends here was started by the backward of a custom function, as checkpointing does."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_code is _APPLY:
            return True
        frame = frame.f_back
    return False
