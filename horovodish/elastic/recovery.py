"""Going on without ranks that were lost, where MPI can: Open MPI with its fault tolerance ULFM switched on.

After an `mpirun --with-ft ulfm` the death of a rank ends neither the job nor the other ranks. Their calls raise
`RankLostError`; then they start again among themselves, in the same processes:

    try:
        train()
    except hvd.RankLostError:
        hvd.shutdown()
        hvd.init(hvd.surviving_communicator())
        ...  # send the state of the rank that is furthest to the others: docs/failures.md
        train()

Without it, and with every other MPI, a lost rank ends the job.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, cast

from horovodish import _native
from horovodish.errors import LaunchError, NotInitializedError
from horovodish.mpi import binding, communicators
from horovodish.runtime import basics

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["surviving_communicator"]

_REVOKE_AFTER_SECONDS = 1.0
"""The engine tells every rank which one was lost. If MPI ended their calls sooner, they would not know."""


def surviving_communicator() -> Intracomm:
    """The ranks that are left when others have died, as a communicator for `init()`.

    Every rank that is left must call it, after `shutdown()`; it blocks until all of them have, for at most
    HOROVODISH_START_TIMEOUT_SECONDS. It takes the ranks of the last `init()`, with a `comm` or without, in their
    order; they are numbered anew from 0. Communicators of the user's own are left alone.

    Returns:
        An `mpi4py` communicator of the ranks that are left, the same on all of them.

    Raises:
        NotInitializedError: `init()` was never called in this process, or not under MPI.
        LaunchError: MPI's fault tolerance is off, or a rank that is left does not call this: it is stopped, or busy
            with something else.

    Example:
        >>> hvd.shutdown()
        >>> hvd.init(hvd.surviving_communicator())
    """
    basics.shutdown()
    last = communicators.last()
    if last is None:
        raise NotInitializedError("surviving_communicator() needs an init() under MPI before it")
    if not binding.tolerates_faults():
        cannot = "go on without a lost rank" if basics.loss() else "begin again in the same processes"
        raise LaunchError(f"MPI cannot {cannot} here. Start the ranks with Open MPI's `mpirun --with-ft ulfm`")
    ends: list[Intracomm | Exception] = []
    # MPI's Shrink waits for a stopped rank for ever, and Open MPI 5.0's Ishrink fails on a revoked communicator.
    thread = threading.Thread(target=_shrink, args=(last.control, ends), name="shrink", daemon=True)
    thread.start()
    thread.join(_REVOKE_AFTER_SECONDS)
    if not ends:
        last.engine.Revoke()
        last.control.Revoke()
        thread.join(last.start_timeout_seconds - _REVOKE_AFTER_SECONDS)
    if not ends:
        _native.end_without_lost_ranks()  # MPI_Finalize would wait for the thread
        raise LaunchError(
            f"not every rank that is left called surviving_communicator() within {last.start_timeout_seconds} seconds: "
            "one is stopped, or busy with something else. HOROVODISH_START_TIMEOUT_SECONDS gives them more time"
        )
    if isinstance(ends[0], Exception):
        raise LaunchError(f"MPI could not leave out the lost ranks: {ends[0]}") from ends[0]
    return ends[0]


def _shrink(comm: Intracomm, ends: list[Intracomm | Exception]) -> None:
    try:
        ends.append(cast("Intracomm", comm.Shrink()))
    except Exception as problem:
        ends.append(problem)
