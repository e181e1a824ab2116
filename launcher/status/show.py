"""The output of `horovodish status`: a sentence about the problem, and a table of the ranks."""

from collections.abc import Sequence

from horovodish.launcher.hosts.allocation import counted
from horovodish.launcher.status.answers import RankStatus
from horovodish.launcher.status.diagnosis import WORTH_SECONDS, diagnosis, named, what_it_does
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
LATE_SHARE = 0.1
"""A rank is late if the others wait for it for this share of the time. The ranks of a healthy job take turns."""
_NOT_TRAINING: dict[str | None, tuple[str, str]] = {
    None: ("the ranks start", "not called init() yet"),
    "init": ("the ranks start", "called init(), which has not returned yet"),
    "regroup": ("the ranks begin again", "left the others"),
    "anew": ("the ranks begin again", "left the others"),
    "shutdown": ("the ranks end", "called shutdown()"),
    "stopped": ("the ranks end", "called shutdown()"),
    "exit": ("the ranks end", "come to the end of the script"),
    "": ("the ranks end", "ended"),
}
"""By the phase (see horovodish.launcher.job.waiting): what a job does, and what some of its ranks have done."""


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
    lines += in_columns([HEADS, *map(row_of, job.ranks)]) if job.ranks else []
    for rank in job.ranks if stacks else ():
        text = rank.stacks.strip() or ("the process has ended" if rank.has_ended else "no answer has come")
        lines += ["", f"stacks of rank {rank.rank} on {rank.host}, process {rank.process}:", text]
    return "\n".join(lines).rstrip()


def headlines(job: JobStatus) -> list[str]:
    """The problem, or a line that there is none; then a description of the job."""
    hosts = len({rank.host for rank in job.ranks})
    size = f": {counted(len(job.ranks), 'rank')} on {counted(hosts, 'host')}" if job.ranks else ""
    return [*(diagnosis(job) or [_all_well(job)]), f"job {job.process} {job.name}{size}"]


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def row_of(rank: RankStatus) -> tuple[str, ...]:
    """The cells of a rank."""
    memory = f"{rank.memory_kib / 1024:,.0f} MiB" if rank.memory_kib else ""
    step = str(rank.steps) if rank.has_page else ""
    state = STATES.get(rank.state, rank.state)
    return (str(rank.rank), rank.host, str(rank.process or ""), state, step, memory, what_it_does(rank))


def listed(jobs: Sequence[JobStatus]) -> str:
    """A line for each of several jobs."""
    lines = [f"{each.process}  {each.name}  {(diagnosis(each) or [_all_well(each)])[0]}" for each in jobs]
    return "\n".join([f"{len(jobs)} jobs run; horovodish status PROCESS shows one:", *lines])


def _all_well(job: JobStatus) -> str:
    of_phase: dict[str | None, list[int]] = {}
    # An elastic job trains on without the ranks that it has lost.
    trains_on = any(rank.phase == "training" and not rank.has_ended for rank in job.ranks)
    ranks = [rank for rank in job.ranks if not (trains_on and rank.has_ended)]
    for rank in ranks:
        of_phase.setdefault("" if rank.has_ended else rank.phase, []).append(rank.rank)
    for phase, (they, what) in _NOT_TRAINING.items():
        if its := of_phase.get(phase):
            return f"{they}: {named(its, job.ranks)} {'has' if len(its) == 1 else 'have'} {what}"
    step = max((rank.steps for rank in job.ranks), default=0)
    who = "all ranks run" if len(ranks) == len(job.ranks) else f"{len(ranks)} of {len(job.ranks)} ranks run"
    begin = f"{who}{f', in step {step}' if step else ''}; "
    late = {rank: seconds for each in job.ranks for rank, seconds in each.late_seconds.items()}
    shares = [(late.get(rank.rank, 0.0) / (rank.phase_seconds or 1.0), rank) for rank in job.ranks]
    share, latest = max(shares, key=lambda its: its[0], default=(0.0, None))
    if latest is None or share < LATE_SHARE:
        return f"{begin}none has waited for longer than {WORTH_SECONDS:.0f} s"
    time = f"{min(1.0, share):.0%} of the time since init()"
    return f"{begin}{named([latest.rank], job.ranks)} is late: others have waited for it in {time}"
