"""The last words of a run: what made it end, if that was not its natural end, and the exit status."""

import socket
from collections.abc import Callable, Iterable, Sequence

from horovodish.launcher.absence import absent
from horovodish.launcher.hosts import Share
from horovodish.launcher.job import Job
from horovodish.launcher.mpirun import worth_reading
from horovodish.launcher.outcome import Failure

__all__ = ["conclude", "told_last"]


def conclude(job: Job, np: int, shares: Sequence[Share], say: Callable[..., None], *, verbose: bool) -> int:
    """Says what made the job end, and returns the exit status.

    Args:
        job: has run.
        np: number of ranks.
        shares: which ranks should have run where.
        say: gets what there is to say, and on request another prefix than the launcher's.
        verbose: pass on all that mpirun has said.
    """
    said = job.said_by_mpirun
    absence = absent(shares, set(job.hosts), said)
    if verbose or not any(absence.values()):
        explained = job.stopped_by or job.fault or job.refusal or job.completed or job.lost or job.abandoned
        say(worth_reading(said) if explained and not verbose else said, prefix="")
    if job.refusal:
        say(job.refusal.what)
        return job.refusal.exit_status
    for failure in told_last(job.failures.values(), job.fault.rank if job.fault and not job.stopped_by else None):
        say(f"rank {failure.rank} on {job.hosts[failure.rank]} raised:")
        say(failure.traceback, prefix="")
    if job.stopped_by:
        return 128 + job.stopped_by
    if job.fault and not job.lost:  # with a host that is lost, MPI makes ranks fail on the others
        say(f"rank {job.fault.rank} on {job.hosts[job.fault.rank]} {job.fault.what}")
        return job.fault.exit_status
    if job.completed == np:
        return 0
    mpirun = job.arguments[0]
    status = job.mpirun_status if job.mpirun_status >= 0 else 128 - job.mpirun_status
    if len(job.hosts) < np:
        for host, reason in absence.items():
            say(f"{host} did not come up" + (f": {reason}" if reason else ""))
        came = f"only {len(job.hosts)} of {np} ranks were started"
        if job.timed_out:
            say(f"{came} in time; --start-timeout gives them more")
        else:
            say(f"{came} before {mpirun} ended with exit status {status}")
        return 1
    if job.completed:
        say(f"a rank left with exit status 0 but without MPI_Finalize, so {mpirun} ended the other ranks")
        return 1
    if job.lost and not job.mpirun_was_killed:
        host = job.hosts[job.lost[0]]
        ranks = [f"rank {rank}" for rank in job.lost if job.hosts[rank] == host]
        say(f"{' and '.join(ranks)} on {host} vanished: killed there, or the host cannot be reached any more")
    elif job.abandoned and not job.mpirun_was_killed:
        # When a daemon is killed, mpirun ends on its own host, too.
        host = next((host for host in job.abandoned if host != socket.gethostname()), job.abandoned[0])
        say(f"the processes of {mpirun} on {host} ended before the ranks did: somebody killed them")
    else:
        say(f"{mpirun} ended the job with exit status {status}")
    return status or 1


def told_last(failures: Iterable[Failure], root: int | None) -> list[Failure]:
    """The failures whose tracebacks the ranks have left to the launcher, each error once, that of the rank `root` last.

    What ranks raise because of Ctrl-C, or because another one is lost, is not among them.
    """
    untold = [each for each in failures if each.traceback and not each.is_consequence and not each.is_interrupt]
    first: dict[str, Failure] = {}
    for failure in sorted(untold, key=lambda failure: (failure.rank != root, failure.time)):
        first.setdefault(failure.error, failure)
    return list(reversed(first.values()))
