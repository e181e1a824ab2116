"""Files that a rank leaves for its supervisor, in the folder that the supervisor names in the rank's environment."""

import contextlib
import os
import time
from pathlib import Path

from horovodish.launch.environment import launcher_environment
from horovodish.settings import RANK_PROCESS_VARIABLE, RUN_DIR_VARIABLE, START_VARIABLE

__all__ = ["GO", "await_go", "is_followed", "news", "place_in_memory", "reached", "report", "worlds_before"]

GO = "go"
"""What the launcher of an elastic job says to a rank that waits in its first `init()`, once its turn has come. How many
worlds other processes have made before follows."""
_LOOK_SECONDS = 0.02

_process = 0  # that has called init(), which a forked child is not
_worlds_before = 0


def report(failure: bytes) -> bool:
    """Say that this rank ends with this exception. The supervisor never sees a part of it.

    Args:
        failure: what `horovodish.launcher.job.outcome.Failure` reads.

    Returns:
        False if there is no supervisor.
    """
    path = _path("failure")
    if path is None:
        return False
    unfinished = path.with_suffix(".unfinished")
    try:
        unfinished.write_bytes(failure)
        unfinished.rename(path)
    except OSError:
        return False  # the launcher is gone
    return True


def reached(phase: str, *details: int) -> None:
    """Tell the launcher how far this rank has come, so that it can name a rank that the others wait for.

    Args:
        phase: "init", "running", "training", "shutdown", "stopped", "regroup", "anew" or "exit";
            `horovodish.launcher.job.waiting` explains them.
        details: with "training", the commit that the rank continues from, and how many steps are repeated; with
            "exit", the exit status of the script, 0 if it is not known.
    """
    global _process
    if not is_followed():
        return
    if phase == "init":
        _process = os.getpid()
    path = _path("phases")
    if path is not None:
        with contextlib.suppress(OSError), path.open("a", encoding="ascii") as file:  # else the launcher is gone
            file.write(f"{':'.join([phase, *map(str, details)])} {os.getpid()}\n")


def news(heard: int) -> list[str]:
    """The launcher's lines to this rank so far, without the first ones.

    Args:
        heard: how many lines to leave out.
    """
    path = _path("news")
    try:
        return path.read_text("ascii").splitlines()[heard:] if path else []
    except OSError:
        return []  # it has said nothing yet, or is gone


def await_go() -> None:
    """In an elastic job, wait until it is the turn of these processes: others may train until they are all here."""
    global _worlds_before
    if START_VARIABLE not in os.environ or not is_followed():
        return
    while not (told := [line for line in news(0) if line.startswith(GO)]):
        time.sleep(_LOOK_SECONDS)
    _worlds_before = int(told[0].partition(" ")[2])


def worlds_before() -> int:
    """How many worlds earlier processes of an elastic job have made. Known since the first `init()`; else 0."""
    return _worlds_before


def is_followed() -> bool:
    """Whether the launcher follows the phases of this process: it is a rank of the run, not a process of a rank's."""
    if RUN_DIR_VARIABLE not in os.environ or _process not in (0, os.getpid()):
        return False
    process = os.environ.get(RANK_PROCESS_VARIABLE, "").partition(" ")[0]
    return process in ("", str(os.getpid()))


def place_in_memory(kind: str) -> Path | None:
    """Where this rank keeps what its supervisor may look for, on a host that has memory for files.

    Args:
        kind: the end of the name.
    """
    path = _path(kind)
    folder = path and path.with_name("segments").resolve()  # a short path: a socket's has 107 bytes at most
    return folder / path.name if path and folder and folder.is_dir() else None


def _path(kind: str) -> Path | None:
    folder, launched = os.environ.get(RUN_DIR_VARIABLE), launcher_environment()
    return None if folder is None or launched is None else Path(folder, f"rank-{launched.rank}.{kind}")
