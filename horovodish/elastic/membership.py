"""Who takes part: what the launcher says to this rank, and how the ranks that are left begin again.

The launcher sees every rank's end. When one is lost, or new hosts are there, each rank says that it has left the old
world; then the launcher says to all of them either who the next world is, in these processes, or that they shall end
because it starts new ones. It writes lines to a file in the folder of the run:

    lost [RANK]      a rank is lost, or the ranks have lost touch: leave
    hosts            new hosts are there: leave at the next commit
    stay             they are not there any more: do not leave because of them
    world R,R,...    go on with these ranks of the job
    end              leave the state in memory and end
    alone            fail: the scripts of other ranks have ended, and new processes would come to the same
"""

from __future__ import annotations

import gc
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path

from horovodish import _native, settings
from horovodish.elastic import recovery
from horovodish.errors import LaunchError
from horovodish.launch import run_folder
from horovodish.mpi import binding
from horovodish.runtime import basics
from horovodish.runtime.process import part

__all__ = [
    "can_regroup",
    "cannot_regroup",
    "follow",
    "hosts_updated",
    "is_elastic",
    "regroup",
    "start",
    "state_folder",
    "worlds",
]

ENDS = 75
"""The exit status of a rank that has left its state for a new process; sysexits.h calls it "try again"."""
_LOOK_SECONDS = 0.02  # each word of the launcher may delay a recovery by this much


@dataclass
class _Told:
    """The launcher's messages so far.

    Attributes:
        answers: that `regroup()` waits for.
        hosts_updated: whether it waits for a commit.
        follower: the thread that hears it.
        worlds: how many these processes have formed, besides the first one.
    """

    answers: queue.Queue[tuple[str, str]] = field(default_factory=queue.Queue)
    hosts_updated: bool = False
    follower: threading.Thread | None = None
    worlds: int = 0


def is_elastic() -> bool:
    """Whether a launcher looks after this rank that can go on without ranks, or with more."""
    return settings.START_VARIABLE in os.environ and run_folder.is_followed()


def start() -> int:
    """How often the launcher had started ranks before these."""
    return int(os.environ.get(settings.START_VARIABLE, "0"))


def worlds() -> int:
    """How many worlds the processes of this start have formed, besides the first one."""
    return part(_Told).worlds


def state_folder() -> Path | None:
    """A folder in memory of this host that lasts as long as the job; None without such a launcher."""
    folder = os.environ.get(settings.STATE_FOLDER_VARIABLE)
    return Path(folder) if folder and is_elastic() else None


def hosts_updated() -> bool:
    """Whether the launcher waits for a commit at which it can take in new hosts."""
    return part(_Told).hosts_updated


def follow() -> None:
    """From now on, hear what the launcher says. Calling it again does nothing."""
    told = part(_Told)
    if told.follower is None and is_elastic():
        _native.end_without_lost_ranks()
        told.follower = _thread(_listen, "membership", told)


def can_regroup() -> bool:
    """Whether these processes can begin again after an error, so that it can be seen whether it comes again."""
    return basics.mpi_enabled() and binding.tolerates_faults()


def cannot_regroup() -> LaunchError:
    """The error of ranks that were started without what lets them go on after a loss."""
    size = basics.size()
    return LaunchError(
        f"the ranks cannot go on without a lost one, because they were started without --min-np: {basics.loss()}\n"
        f"Remedy: horovodish run -np {size} --min-np {size - 1} ..."
    )


def regroup(keep: Callable[[], None], *, anew: bool = False) -> None:
    """After `shutdown()`: `init()` with the ranks that take part from now on, or the end of this process.

    Args:
        keep: leaves the last commit in memory of this host.
        anew: new processes must go on.

    Raises:
        LaunchError: no launcher can say who is left, and MPI does not know it. Or the scripts of others have ended
            twice, so that too few ranks are left.
        SystemExit: new processes go on.
    """
    told = part(_Told)
    if not is_elastic():
        basics.init(recovery.surviving_communicator())
        told.worlds += 1
        return
    run_folder.reached("anew" if anew else "regroup")
    while True:
        word, rest = told.answers.get()
        if word == "world":
            ranks = [int(rank) for rank in rest.split(",")]
            _thread(_form, "init", told, ranks)
        elif word == "formed":
            told.worlds += 1
            return
        elif word == "alone":
            raise LaunchError(
                "too few ranks are left for --min-np, because the scripts of the others have ended. New processes have "
                "come to the same. Remedy: let all ranks take equally many steps, or call hvd.join() on all of them"
            )
        elif word == "end":
            keep()
            gc.freeze()  # to look for cycles at the end takes nearly a second of a core, which new processes need
            basics.end_for_others()
            raise SystemExit(ENDS)


def _thread(target: Callable[..., None], name: str, *args: object) -> threading.Thread:
    """Acts for the rank that starts it."""
    thread = threading.Thread(target=copy_context().run, args=[target, *args], name=name, daemon=True)
    thread.start()
    return thread


def _form(told: _Told, ranks: list[int]) -> None:
    """In a thread of its own: if one more rank dies, MPI may never return from it."""
    try:
        basics.init(ranks)
    except Exception as problem:
        print(f"horovodish: the remaining ranks could not start again: {problem}", file=sys.stderr, flush=True)
        run_folder.reached("regroup")  # the launcher has new processes go on
    else:
        told.answers.put(("formed", ""))


def _listen(told: _Told) -> None:
    _native.add_background_thread(threading.get_native_id())
    heard = 0
    while True:
        for line in run_folder.news(heard):
            heard += 1
            word, _, rest = line.partition(" ")
            if word == "lost":
                basics.cut_off(f"rank {rest} was lost" if rest else "the ranks lost touch")
            elif word in ("hosts", "stay"):
                told.hosts_updated = word == "hosts"
            elif word != run_folder.GO:
                told.hosts_updated = False
                told.answers.put((word, rest))
        time.sleep(_LOOK_SECONDS)
