"""A script that ends with an exception that nobody caught: what the other ranks, the launcher and the user are told."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from opcode import opmap
from traceback import format_exception
from types import FrameType, TracebackType

from horovodish import errors
from horovodish.errors import EngineStoppedError, RankLostError
from horovodish.launch import run_folder

REPORT_BYTES = 65_000
"""How long a report to the launcher can be: a message to it has 64 KiB."""
LONGEST = 10_000
"""How many characters of an error and of its traceback a report has at most."""

_FOLDED = ("horovodish", "contextlib")
_STANDARD_LIBRARY = os.path.dirname(os.__file__)

reason: str | None = None
"""Why this process ends early, once it does: "raised ValueError: ..."."""

_hook: Callable[[type[BaseException], BaseException, TracebackType | None], object] | None = None


def watch(rank: Callable[[], int | None], loss: Callable[[], str], left_in_order: Callable[[], bool]) -> None:
    """From now on, note such an exception, besides what `sys.excepthook` does.

    Calling it again does nothing, unless the script has set `sys.excepthook` since.

    Args:
        rank: gives the rank of this process, or None when it is none.
        loss: gives what the engine or the launcher says of the rank that was lost, or nothing.
        left_in_order: whether that rank has raised nothing, so that the traceback of this one matters.
    """
    global _hook
    previous, process = sys.excepthook, os.getpid()
    if previous is _hook:
        return

    def hook(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        global reason
        if reason is not None and os.getpid() == process:  # a hook between two of ours calls the earlier one
            previous(kind, value, traceback)
            return
        reason = _encodable(f"raised {kind.__name__}: {value}")
        own = rank() if os.getpid() == process else None  # a forked child is no rank
        is_usual = previous is sys.__excepthook__
        lost = loss()
        is_consequence = any(says_so(each, lost) for each in chain(value))
        says_where = not is_consequence or left_in_order()
        is_left_to_launcher = is_usual and says_where
        because = f", because {lost}" if lost and isinstance(value, EngineStoppedError) else ""
        what = f"{value}{because}"
        if is_consequence and says_where and (place := _place(traceback)):
            first, *rest = what.split("\n", 1)
            what = "\n".join([f"{first}; {place} waits for it", *rest])
        error = _encodable(f"{kind.__name__}: {what}")
        for each in chain(value):
            if _is_worded_here(each):
                each.__traceback__ = _folded(each.__traceback__)
        traceback = value.__traceback__
        text = _encodable("".join(format_exception(kind, value, traceback))) if is_left_to_launcher else ""
        is_told = own is not None and run_folder.report(_encoded(time.time(), error, text, is_consequence))
        if own is not None and says_so(value, lost) and not says_where:
            # The traceback that matters is the one of the rank that was lost. The launcher knows which it was.
            if not is_told:
                print(f"horovodish: rank {own} ends: {value}", file=sys.stderr, flush=True)
        elif not (is_left_to_launcher and is_told):
            previous(kind, value, traceback)

    sys.excepthook = _hook = hook


def _is_worded_here(error: BaseException) -> bool:
    """Whether its text says what the user's lines did wrong: an error of our own, or one that a `raise` of ours made.

    Any other exception in our code may be a mistake of ours, which the frames explain.
    """
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return type(error).__module__ == errors.__name__ or (
        at is not None
        and at.tb_frame.f_globals.get("__name__", "").partition(".")[0] == _FOLDED[0]
        and at.tb_frame.f_code.co_code[at.tb_lasti] == opmap["RAISE_VARARGS"]
    )


def _folded(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without frames of horovodish, and without those that a framework has below the user's last line.

    An error of ours says what that line did wrong.
    """
    at, kept = traceback, []
    while at is not None:
        if at.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in _FOLDED:
            kept.append(at)
        at = at.tb_next
    folded = None
    users = [number for number, each in enumerate(kept, start=1) if _is_users(each.tb_frame)]
    for each in reversed(kept[: users[-1] if users else None]):
        folded = TracebackType(folded, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return folded or traceback


def _place(traceback: TracebackType | None) -> str:
    """The file and the line of the user's where an exception came from; empty if no frame is the user's."""
    place = ""
    while traceback is not None:
        if _is_users(traceback.tb_frame):
            place = f"{os.path.basename(traceback.tb_frame.f_code.co_filename)}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    name = frame.f_globals.get("__name__", "").partition(".")[0]
    return not file.startswith(("<", _STANDARD_LIBRARY)) and "-packages" not in file and name not in _FOLDED


def users_level() -> int:
    """The `stacklevel` with which the caller's warning names the line of the user's script that it is about."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and not _is_users(frame):
        frame, level = frame.f_back, level + 1
    return level if frame else 1


def says_so(value: BaseException, loss: str) -> bool:
    """Whether an exception says that another rank was lost, for which JAX and TensorFlow have classes of their own.

    Args:
        value: the exception.
        loss: what was said of the lost rank; empty if none was lost. An engine that was stopped because of it does not
            quote it, any other error of the engine does.
    """
    is_cut_off = isinstance(value, EngineStoppedError)
    return isinstance(value, RankLostError) or bool(loss and (is_cut_off or loss in str(value)))


def chain(value: BaseException) -> list[BaseException]:
    """An exception and those that it came of."""
    chain: list[BaseException] = []
    at: BaseException | None = value
    while at is not None and at not in chain:
        chain.append(at)
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return chain


def _encodable(text: str) -> str:
    """The text as UTF-8 can express it: Python keeps the bytes of a file name in another encoding as surrogates."""
    return text.encode(errors="backslashreplace").decode()


def _encoded(seconds: float, error: str, traceback: str, is_consequence: bool) -> bytes:
    """A report that fits into a message: a character takes up to six bytes."""
    longest = LONGEST
    while True:
        report = {
            "time": seconds,
            "error": error[:longest],
            "traceback": _shortened(traceback, longest),
            "is_consequence": is_consequence,
        }
        encoded = json.dumps(report, ensure_ascii=False).encode()
        if len(encoded) <= REPORT_BYTES:
            return encoded
        longest //= 2


def _shortened(traceback: str, longest: int) -> str:
    """Its begin and its end: where the exception was raised, even if its message is long, and what it is."""
    half = longest // 2
    return traceback if len(traceback) <= longest else f"{traceback[:half]}\n...\n{traceback[-half:]}"
