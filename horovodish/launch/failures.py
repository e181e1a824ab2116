"""A script that ends with an exception that nobody caught: what the other ranks, the launcher and the user are told."""

from __future__ import annotations

import _sitebuiltins
import functools
import json
import os
import re
import reprlib
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from io import StringIO
from opcode import opmap
from types import FrameType, TracebackType
from typing import Any, NamedTuple, NoReturn

from horovodish import _native, errors
from horovodish.errors import EngineStoppedError, RankLostError, StallError
from horovodish.launch import run_folder
from horovodish.settings import AT_END

REPORT_BYTES = 65_000
"""How long a report to the launcher can be: a message to it has 64 KiB."""
LONGEST = 10_000
"""How many characters of an error and of its traceback a report has at most."""
PLACE = 300
"""How many characters the name of a file and its line have at most in a report."""

_FOLDED = ("horovodish", "contextlib")
_STANDARD_LIBRARY = os.path.dirname(os.__file__)

reason: str | None = None
"""Why this process ends early, once it does: "raised ValueError: ..."."""

exited = ""
"""The call that ends this process, set when the script makes it: "sys.exit(3) in a.py:19"."""
exit_status = 0
"""The status."""


class Place(NamedTuple):
    """A line of a script."""

    file: str
    line: int


_hook: Callable[[type[BaseException], BaseException, TracebackType | None], object] | None = None


def watch(
    rank: Callable[[], int | None],
    loss: Callable[[], str],
    left_in_order: Callable[[], bool],
    quoted: Callable[[str], Exception | None],
) -> None:
    """From now on, note such an exception, besides what `sys.excepthook` does.

    Calling it again does nothing, unless the script has set `sys.excepthook` since.

    Args:
        rank: gives the rank of this process, or None when it is none.
        loss: gives what the engine or the launcher says of the rank that was lost, or nothing.
        left_in_order: whether that rank has raised nothing, so that the traceback of this one matters.
        quoted: gives the error of the engine that is part of a text.
    """
    global _hook
    previous, process = sys.excepthook, os.getpid()
    if previous is _hook:
        return
    sys.exit = _exit
    quitter: Any = _sitebuiltins.Quitter
    quitter.__call__ = _quit
    _native.on_exit(_note_exit, threading.main_thread().ident or 0)

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
        if is_usual and (own_error := _unwrapped(value, quoted)):
            value, kind, traceback = own_error, type(own_error), own_error.__traceback__
        because = f", because {lost}" if lost and isinstance(value, EngineStoppedError) else ""
        what = f"{value}{because}"
        has_waited = any(isinstance(each, StallError) for each in chain(value)) or (is_consequence and says_where)
        place = _place(traceback) if has_waited else ""
        error = _encodable(f"{kind.__name__}: {what}")
        for each in chain(value):
            if _is_worded_here(each):
                each.__traceback__ = _folded(each.__traceback__)
        traceback = value.__traceback__
        text = _encodable(_printed(kind, value, traceback)) if is_left_to_launcher else ""
        if suggestion := re.search(r"\. Did you mean: .*\?$", text.rstrip("\n")):
            error += suggestion[0]
        is_told = own is not None and run_folder.report(_encoded(time.time(), error, text, is_consequence, place))
        if own is not None and says_so(value, lost) and not says_where:
            # The traceback that matters is the one of the rank that was lost. The launcher knows which it was.
            if not is_told:
                print(f"horovodish: rank {own} ends: {value}", file=sys.stderr, flush=True)
        elif not (is_left_to_launcher and is_told):
            previous(kind, value, traceback)

    sys.excepthook = _hook = hook


def _printed(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> str:
    """The text that Python prints. Before 3.12, `traceback.format_exception` leaves out suggestions of names."""
    with redirect_stderr(StringIO()) as said:
        sys.__excepthook__(kind, value, traceback)
    return said.getvalue()


def unread(error: Exception, loss: str) -> bool:
    """Note at the end of the script an error that none of its lines has met.

    Args:
        error: of an operation whose result nobody has read.
        loss: as for `says_so`.

    Returns:
        False if there is no launcher to show it.
    """
    global reason
    first, *rest = f"{type(error).__name__}: {error}".split("\n", 1)
    reason = _encodable(f"raised {first}")
    what, separator, remedy = first.partition(". Remedy: ")
    text = _encodable("\n".join([f"{what}; the script has not read the result{separator}{remedy}", *rest]))
    place = AT_END if isinstance(error, StallError | RankLostError) else ""
    return run_folder.report(_encoded(time.time(), text, f"{text}\n", says_so(error, loss), place))


def _unwrapped(error: BaseException, quoted: Callable[[str], Exception | None]) -> Exception | None:
    """The engine's error, unwrapped from a framework's error, because the framework's does not begin with the cause.

    An error that the script itself has raised from the engine's error is returned unchanged.
    """
    at = _origin(error)
    if type(error).__module__ == errors.__name__ or (at is not None and _is_users(at.tb_frame) and _raises(at)):
        return None
    found = quoted(str(error))
    if found is not None:
        found.with_traceback(error.__traceback__)
        found.__cause__, found.__context__ = error.__cause__, error.__context__
        found.__suppress_context__ = error.__suppress_context__
    return found


def _is_worded_here(error: BaseException) -> bool:
    """Whether its text says what the user's lines did wrong: an error of our own, or one that a `raise` of ours made.

    Any other exception in our code may be a mistake of ours, which the frames explain.
    """
    at = _origin(error)
    return type(error).__module__ == errors.__name__ or (
        at is not None and at.tb_frame.f_globals.get("__name__", "").partition(".")[0] == _FOLDED[0] and _raises(at)
    )


def _origin(error: BaseException) -> TracebackType | None:
    """The place where an exception was raised."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at


def _raises(at: TracebackType) -> bool:
    """Whether a `raise` stands there, and not a call of native code."""
    return at.tb_frame.f_code.co_code[at.tb_lasti] == opmap["RAISE_VARARGS"]


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


class _Exit(SystemExit):
    """The exception of `sys.exit`, with the line of the script that has called it."""

    place, caller = "", "sys.exit"

    def __reduce__(self) -> tuple[type[SystemExit], tuple[object, ...]]:
        return SystemExit, self.args

    def __del__(self, own_frame: Callable[[], FrameType] = sys._getframe) -> None:
        # If nobody catches it, Python frees it when no frame is left, and calls what atexit knows only then.
        if self.place and own_frame().f_back is None:
            _end(self.caller, self.code, self.place)


_Exit.__name__ = _Exit.__qualname__ = "SystemExit"  # as messages show it


def _end(caller: str, code: object, place: str) -> None:
    global exited, exit_status
    argument = "" if code is None else reprlib.repr(code)
    exited = f"{caller}({argument})" + (f" in {place}" if place else "")
    exit_status = int(code is not None) if not isinstance(code, int) else code & 0xFF


def _note_exit(code: object, traceback: TracebackType | None) -> None:
    """A SystemExit ends the script, perhaps one that a `raise` made. Before Python 3.12 it has no traceback then."""
    if not exited:
        _end("SystemExit", code, _place(traceback))


@functools.wraps(sys.exit)
def _exit(status: Any = None, /) -> NoReturn:
    _raise_exit(status, "sys.exit")


def _quit(quitter: _sitebuiltins.Quitter, code: Any = None) -> NoReturn:
    """As `exit()` and `quit()`, which close stdin so that an interactive shell ends, too."""
    with suppress(Exception):
        sys.stdin.close()
    _raise_exit(code, quitter.name)


def _raise_exit(status: Any, caller: str) -> NoReturn:
    error = _Exit(status)
    error.caller = caller
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    if frame is not None and threading.current_thread() is threading.main_thread():
        error.place = _place_of(frame, frame.f_lineno)
    try:
        raise error
    finally:
        del error, frame  # or its traceback would keep it alive by this frame


def _place(traceback: TracebackType | None) -> str:
    """The file and the line of the user's where an exception came from; empty if no frame is the user's."""
    place = ""
    while traceback is not None:
        if _is_users(traceback.tb_frame):
            place = _place_of(traceback.tb_frame, traceback.tb_lineno)
        traceback = traceback.tb_next
    return place


def _place_of(frame: FrameType, line: int) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{line}"


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    name = frame.f_globals.get("__name__", "").partition(".")[0]
    is_generated = file.startswith("<") or "__autograph_generated_file" in file  # by TensorFlow, of a user's function
    is_users = not file.startswith(_STANDARD_LIBRARY) and "-packages" not in file and name not in _FOLDED
    return is_users and not is_generated


def place_in_script() -> Place | None:
    """The line of the user's script that this thread is in, or else the main thread."""
    frames = sys._getframe(1), sys._current_frames().get(threading.main_thread().ident or 0)
    for frame in frames:
        while frame is not None:
            if _is_users(frame):
                return Place(frame.f_code.co_filename, frame.f_lineno)
            frame = frame.f_back
    return None


def warn(message: str, place: Place | None = None) -> None:
    """Warn of a mistake in the user's script.

    Args:
        message: the mistake.
        place: the line that the warning is about; None: the line that the script is in now.
    """
    place = place or place_in_script()
    if place is None:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    else:
        warnings.warn_explicit(message, RuntimeWarning, *place)


def says_so(value: BaseException, loss: str) -> bool:
    """Whether an exception says that another rank was lost. JAX and TensorFlow raise their own classes for that.

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


def _encoded(seconds: float, error: str, traceback: str, is_consequence: bool, place: str) -> bytes:
    """A report that fits into a message: a character takes up to six bytes."""
    longest = LONGEST
    while True:
        report = {
            "time": seconds,
            "error": error[:longest],
            "traceback": _shortened(traceback, longest),
            "is_consequence": is_consequence,
            "place": _encodable(place[:PLACE]),
        }
        encoded = json.dumps(report, ensure_ascii=False).encode()
        if len(encoded) <= REPORT_BYTES:
            return encoded
        longest //= 2


def _shortened(traceback: str, longest: int) -> str:
    """Its begin and its end: where the exception was raised, even if its message is long, and what it is."""
    half = longest // 2
    return traceback if len(traceback) <= longest else f"{traceback[:half]}\n...\n{traceback[-half:]}"
