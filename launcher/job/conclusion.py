"""The last words of a run: what made it end, if that was not its natural end, and the exit status."""

import re
import signal
import socket
from collections.abc import Iterable, Mapping

from horovodish.launcher.job.hints import hint
from horovodish.launcher.job.job import Job
from horovodish.launcher.job.outcome import SIGNALS, Failure, shortened, signal_name, without_repetition
from horovodish.launcher.job.output import say, say_unless_stuck
from horovodish.launcher.job.waiting import ranks_in_words
from horovodish.launcher.mpirun.messages import worth_reading

KILLED = SIGNALS + signal.SIGKILL
HYDRA_LOST = (signal.SIGKILL, 255)
"""MPICH's mpiexec ends with these where it has lost a process, or a host. Then it kills all others."""


def conclude(job: Job) -> int:
    """Says what made a job that has run end, and returns the exit status."""
    said, absence = job.mpirun.said, job.absent_hosts()
    if job.options.verbose or not any(absence.values()):
        is_done = job.completed or job.policy.are_done
        reasons = (
            job.stopped_by,
            job.lost_agent,
            job.fault,
            job.refusal,
            is_done,
            job.lost,
            job.abandoned,
            job.standstill,
        )
        say(worth_reading(said) if any(reasons) and not job.options.verbose else said, prefix="")
    if job.refusal:
        say(job.refusal.what)
        return job.refusal.exit_status
    at_fault = [job.fault.rank] if job.fault and not job.fault.is_consequence else []
    root = next(iter([*job.lost, *at_fault, *job.left]), None)
    is_ended = job.stopped_by or job.lost_agent
    if root is not None and not is_ended:
        followed = consequences(job.failures.values(), root)
        for ranks, error in followed:
            say(f"{ranks_in_words(ranks)} failed because a rank was lost: {error}")
        if followed and job.options.is_elastic:
            say("hvd.elastic.run and hvd.elastic.attempt go on without a lost rank: call collectives inside of them")
    for failures in told_last(job.failures.values(), job.fault.rank if job.fault and not is_ended else None):
        ranks = [failure.rank for failure in failures]
        hosts = dict.fromkeys(job.hosts[rank] for rank in sorted(ranks))
        say(f"{ranks_in_words(ranks)} on {', '.join(hosts)} raised:")
        say(without_repetition(failures[0].traceback), prefix="")
    if job.stopped_by:
        if job.stopped_by != signal.SIGPIPE:
            say_unless_stuck(f"the job was ended by {signal_name(job.stopped_by)}")
        return 128 + job.stopped_by
    if job.lost_agent and job.completed < job.options.np:
        say(job.lost_agent)
        return KILLED
    status, reason = _verdict(job, absence, is_fault_of_a_rank=bool(at_fault))
    if job.fault:
        failure = job.failures.get(job.fault.rank)
        say(hint(failure.error if failure else job.fault.what, job.hosts[job.fault.rank], job.pythons))
    np = job.options.np
    if job.has_state and not job.options.is_elastic and status > SIGNALS and np > 1:
        flags = f"-np {np} --min-np {np - 1}"
        reason += f"; the job ends because it was started without --min-np: horovodish run {flags} ..."
    say(reason)
    return status


def _verdict(job: Job, absence: Mapping[str, str], *, is_fault_of_a_rank: bool) -> tuple[int, str]:
    """The exit status and its reason, which is empty if the job came to its natural end."""
    np = job.options.np
    if job.policy.are_done and not job.left:
        return 0, ""
    if job.left and job.completed < np and not is_fault_of_a_rank:
        left = f"rank {job.left[0]} on {job.hosts[job.left[0]]} ended with exit status 0 while other ranks needed it"
        return 1, f"{left}, without ending its script. Did it call os._exit()?"
    if job.fault and not job.lost:  # with a host that is lost, MPI makes ranks fail on the others
        return job.fault.exit_status, f"rank {job.fault.rank} on {job.hosts[job.fault.rank]} {job.fault.what}"
    if job.completed == np:
        return 0, ""
    if job.standstill:
        return 1, job.standstill
    if job.policy.last_loss:
        return KILLED, job.policy.last_loss
    mpirun = job.mpirun.command[0]
    status = job.mpirun.status if job.mpirun.status >= 0 else 128 - job.mpirun.status
    if len(job.hosts) < np:
        lines = [f"{host} did not come up" + (f": {reason}" if reason else "") for host, reason in absence.items()]
        late = "in time" + ("" if any(absence.values()) else "; --start-timeout gives them more")
        ended = late if job.timed_out else f"before {mpirun} ended with exit status {status}"
        return 1, "\n".join([f"only {len(job.hosts)} of {np} ranks were started {ended}", *lines])
    if job.is_unwanted:
        return 1, ""
    if job.completed:
        return 1, f"a rank left with exit status 0 but without MPI_Finalize, so {mpirun} ended the other ranks"
    some_are_lost = 0 < len(job.lost) < np and not job.mpirun.was_killed
    if some_are_lost or (job.lost and (job.mpirun.was_told or status in HYDRA_LOST)):
        status = KILLED  # as Open MPI's mpirun where it ends by itself, most times
    return status or 1, _who_ended_the_ranks(job, mpirun, status)


def _who_ended_the_ranks(job: Job, mpirun: str, status: int) -> str:
    here = socket.gethostname()
    if job.mpirun.was_killed:
        return f"{mpirun} was killed by {signal_name(-job.mpirun.status)}"
    if job.lost and (len(job.lost) < job.options.np or status == KILLED):  # else mpirun killed all of them
        host = job.hosts[job.lost[0]]
        ranks = [rank for rank in job.lost if job.hosts[rank] == host]
        unreachable = "" if host == here else ", or the host cannot be reached any more"
        supervisors = "its supervisor" if len(ranks) == 1 else "their supervisors"
        return f"{ranks_in_words(ranks)} on {host} vanished: somebody killed {supervisors}{unreachable}"
    if job.abandoned:
        # When a daemon ends, mpirun ends on its own host, too. One that has the time ends its ranks first.
        host = next((host for host in job.abandoned if host != here), (job.told or job.abandoned)[0])
        return f"the processes of {mpirun} on {host} ended before the ranks did: somebody killed them"
    return f"{mpirun} ended the job with exit status {status}"


def consequences(failures: Iterable[Failure], root: int) -> list[tuple[list[int], str]]:
    """The errors that ranks raised because rank `root` was lost, grouped. MPI may have ended further ranks since.

    Failures with a traceback are shown with it.

    Args:
        failures: of all ranks.
        root: the rank that was lost first.
    """
    equal: dict[str, list[int]] = {}
    for failure in sorted(failures, key=lambda failure: failure.rank):
        if failure.is_consequence and not failure.traceback and re.search(rf"rank {root}\b", failure.error):
            equal.setdefault(shortened(_of_any_rank(failure)), []).append(failure.rank)
    return [(ranks, error) for error, ranks in equal.items()]


def told_last(failures: Iterable[Failure], root: int | None) -> list[list[Failure]]:
    """The failures whose tracebacks the ranks have left to the launcher, with the failure of `root` last.

    Equal errors that were raised in the same line are together.

    What ranks raise because of Ctrl-C is not among them.
    """
    untold = [each for each in failures if each.traceback and not each.is_interrupt]
    equal: dict[tuple[str, str, str], list[Failure]] = {}
    for failure in sorted(untold, key=lambda failure: (failure.rank != root, failure.time)):
        # Each of two ranks whose models differ says it of the other one.
        error = re.sub(r".* ranks? [\d, -]+ cannot take part: ", "", _of_any_rank(failure), count=1)
        lines = re.findall(r'^  File "(?!.*__autograph_generated).*", line \d+', failure.traceback, re.MULTILINE)
        equal.setdefault((error, failure.place, "".join(lines[-1:])), []).append(failure)
    return list(reversed(equal.values()))


def _of_any_rank(failure: Failure) -> str:
    """The error without the number of the rank that has raised it: others may have raised the same."""
    return failure.error.replace(f" failed on rank {failure.rank}", " failed", 1)
