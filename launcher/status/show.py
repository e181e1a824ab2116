"""The output of `horovodish status`: a sentence about the problem, and a table of the ranks."""

from collections.abc import Sequence

from horovodish.launcher.hosts.allocation import counted
from horovodish.launcher.status.answers import RankStatus
from horovodish.launcher.status.diagnosis import WORTH_SECONDS, diagnosis, what_it_does
from horovodish.launcher.status.jobs import JobStatus, ask

HEADS = ("rank", "host", "process", "state", "step", "memory", "does")
STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "disk",
    "T": "stopped",
    "t": "traced",
    "Z": "ended",
    "X": "ended",
    "": "silent",
}
"""By the letter in /proc; empty: no answer has come."""


def show(job: str, *, stacks: bool, live: bool) -> int:
    """Prints what a job does, or a list of the jobs if there are several. Returns the exit status.

    Args:
        job: the process or the name; empty: whichever runs.
        stacks: whether to print Python stacks.
        live: whether to go on until the job ends or the user interrupts it.

    Raises:
        LaunchError: there is no such job, or it cannot be shown live.
    """
    found = ask(job, "stacks" if stacks else "status")
    if len({each.process for each in found}) > 1:
        print(listed(found))
        return 0
    if live:
        from horovodish.launcher.status.watch import watch

        return watch(found[0])
    print("\n\n".join(text_of(each, stacks=stacks) for each in found))
    return 0


def text_of(job: JobStatus, *, stacks: bool) -> str:
    """The output for one job."""
    lines = [*headlines(job), ""]
    rows = [HEADS, *map(row_of, job.ranks)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows if job.ranks else ():
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for rank in job.ranks if stacks else ():
        text = rank.stacks.strip() or ("the process has ended" if rank.has_ended else "no answer has come")
        lines += ["", f"stacks of rank {rank.rank} on {rank.host}, process {rank.process}:", text]
    return "\n".join(lines).rstrip()


def headlines(job: JobStatus) -> list[str]:
    """The problem, or a line that there is none; then a description of the job."""
    hosts = len({rank.host for rank in job.ranks})
    what = f"job {job.process} {job.name}: {counted(len(job.ranks), 'rank')} on {counted(hosts, 'host')}"
    return [*(diagnosis(job) or [_all_well(job)]), what]


def row_of(rank: RankStatus) -> tuple[str, ...]:
    """The cells of a rank."""
    memory = f"{rank.memory_kib / 1024:,.0f} MiB" if rank.memory_kib else ""
    step = str(rank.steps) if rank.has_page else ""
    state = STATES.get(rank.state, rank.state)
    return (str(rank.rank), rank.host, str(rank.process or ""), state, step, memory, what_it_does(rank))


def listed(jobs: Sequence[JobStatus]) -> str:
    """A line for each of several jobs."""
    lines = [f"{each.process}  {each.name or '?'}  {(diagnosis(each) or [_all_well(each)])[0]}" for each in jobs]
    return "\n".join([f"{len(jobs)} jobs run; horovodish status PROCESS shows one:", *lines])


def _all_well(job: JobStatus) -> str:
    step = max((rank.steps for rank in job.ranks), default=0)
    at = f", in step {step}" if step else ""
    return f"all ranks run{at}; none has waited for longer than {WORTH_SECONDS:.0f} s"
