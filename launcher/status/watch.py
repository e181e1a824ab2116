"""`horovodish status --watch`: the table of the ranks, live and with rates."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

from horovodish.errors import LaunchError
from horovodish.launcher.status.jobs import JobStatus, ask
from horovodish.launcher.status.links import link_rates
from horovodish.launcher.status.show import HEADS, headlines, in_columns, row_of

PERIOD_SECONDS = 1.0
RATES = ("steps/s", "reduced/s", "waited for")
"""Additional columns of the live table: the last is the share of time that the other ranks wait for this one."""


MOST_LINKS = 6
DISPENSABLE = ("memory", "process", "reduced/s", "state", "step", "waited for", "steps/s", "host")
"""The columns that a narrow terminal leaves out, in this order."""
DOES_WIDTH = 30
"""So much of the last column is worth another one."""


def watch(job: JobStatus) -> int:
    """Shows a job until it ends or the user interrupts. Returns the exit status.

    Raises:
        LaunchError: rich is not installed.
    """
    try:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        remedy = "pip install rich. Without it, call horovodish status again"
        raise LaunchError(f"--watch needs rich, which is not installed. Remedy: {remedy}") from None

    console = Console()

    def drawn(now: JobStatus, before: JobStatus) -> Group:
        shown = fitting(rows(now, before), console.width)
        table = Table(box=None, pad_edge=False)
        for column in zip(*shown, strict=True):
            whole = None if column[0] == HEADS[-1] else max(map(len, column))
            table.add_column(column[0], no_wrap=True, min_width=whole)
        for row in shown[1:]:
            table.add_row(*map(Text, row))
        return Group(*map(Text, headlines(now)), Text(""), table, Text(links(now, before)))

    if not console.is_terminal:
        for now, before in _answers(job):
            lines = [time.strftime("%H:%M:%S"), *headlines(now), "", *in_columns(rows(now, before)), links(now, before)]
            print("\n".join(lines), flush=True)
        return 0
    with Live(console=console, auto_refresh=False) as live:
        for now, before in _answers(job):
            live.update(drawn(now, before), refresh=True)
    return 0


def _answers(job: JobStatus) -> Iterator[tuple[JobStatus, JobStatus]]:
    """Each answer with the one before it, from now on until the job ends."""
    before = job
    while True:
        yield job, before
        time.sleep(PERIOD_SECONDS)
        try:
            before, job = job, ask(str(job.process), "status")[0]
        except LaunchError:
            return


def rows(now: JobStatus, before: JobStatus) -> list[Sequence[str]]:
    """The live table, header first."""
    table: list[Sequence[str]] = [(*HEADS[:-1], *RATES, HEADS[-1])]
    for rank, its_rates in zip(now.ranks, rates(now, before), strict=True):
        *cells, does = row_of(rank)
        table.append((*cells, *its_rates, does))
    return table


def fitting(rows: Sequence[Sequence[str]], width: int) -> list[list[str]]:
    """The rows of a table, header first, without the columns that do not fit into a terminal of this width."""
    widths = {column[0]: max(map(len, column)) + 2 for column in zip(*rows, strict=True)}
    *others, last = widths
    for head in DISPENSABLE:
        if sum(widths[each] for each in others) + min(widths[last], DOES_WIDTH) > width:
            others.remove(head)
    return [[cell for head, cell in zip(rows[0], row, strict=True) if head in (*others, last)] for row in rows]


def links(now: JobStatus, before: JobStatus) -> str:
    """The busiest links, from two answers."""
    busiest = list(link_rates(now, before).items())
    texts = [f"{link} {size / 1e6:,.1f} MB/s" for link, size in busiest[:MOST_LINKS]]
    more = [f"{len(busiest) - MOST_LINKS} more"] if len(busiest) > MOST_LINKS else []
    return "\nsent: " + ", ".join(texts + more) if busiest else ""


def rates(now: JobStatus, before: JobStatus) -> list[tuple[str, ...]]:
    """The cells of `RATES` by rank, from two answers."""
    seconds = now.at_seconds - before.at_seconds
    earlier = {rank.rank: rank for rank in before.ranks}
    waited_for = [_waited_for(job) for job in (now, before)]
    cells: list[tuple[str, ...]] = []
    for rank in now.ranks:
        was = earlier.get(rank.rank)
        if was is None or seconds <= 0 or not (rank.has_page and was.has_page) or rank.steps < was.steps:
            cells.append(("", "", ""))
            continue
        waited = (waited_for[0][rank.rank] - waited_for[1][rank.rank]) / seconds
        megabytes = (rank.reduced_bytes - was.reduced_bytes) / seconds / 1e6
        steps = (rank.steps - was.steps) / seconds
        cells.append((f"{steps:.1f}", f"{megabytes:,.1f} MB", f"{max(0.0, min(1.0, waited)):.0%}"))
    return cells


def _waited_for(job: JobStatus) -> dict[int, float]:
    """By rank, for how many seconds the others have waited for it, also in what it has not called yet."""
    seconds: dict[int, float] = defaultdict(float)
    for each in job.ranks:
        for rank, late in each.late_seconds.items():
            seconds[rank] += late
        pending = (its for its in each.pending if its.process_set == 0)
        if oldest := max(pending, key=lambda its: its.seconds, default=None):
            for rank in oldest.missing:
                seconds[rank] += oldest.seconds
    return seconds
