"""`horovodish status --watch`: the table of the ranks, live and with rates."""

import time

from horovodish.errors import LaunchError
from horovodish.launcher.status.jobs import JobStatus, ask
from horovodish.launcher.status.links import link_rates
from horovodish.launcher.status.show import HEADS, headlines, row_of

PERIOD_SECONDS = 1.0
RATES = ("steps/s", "reduced/s", "waited for")
"""What the live table has besides: the last column is the share of the time that the other ranks wait for this one."""


MOST_LINKS = 6


def watch(job: JobStatus) -> int:
    """Shows a job until it ends or the user interrupts. Returns the exit status.

    Raises:
        LaunchError: rich is not installed.
    """
    try:
        from rich.console import Group
        from rich.live import Live
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        remedy = "pip install rich. Without it, call horovodish status again"
        raise LaunchError(f"--watch needs rich, which is not installed. Remedy: {remedy}") from None

    def drawn(now: JobStatus, before: JobStatus) -> Group:
        table = Table(*HEADS[:-1], *RATES, HEADS[-1], box=None, pad_edge=False)
        for rank, its_rates in zip(now.ranks, rates(now, before), strict=True):
            *cells, does = row_of(rank)
            table.add_row(*map(Text, (*cells, *its_rates, does)))
        return Group(*map(Text, headlines(now)), Text(""), table, Text(links(now, before)))

    before = now = job
    with Live(drawn(now, before), auto_refresh=False) as live:
        while True:
            time.sleep(PERIOD_SECONDS)
            try:
                found = ask(str(job.process), "status")
            except LaunchError:
                return 0
            before, now = now, found[0]
            live.update(drawn(now, before), refresh=True)


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
    late = [{rank: its for each in job.ranks for rank, its in each.late_seconds.items()} for job in (now, before)]
    cells: list[tuple[str, ...]] = []
    for rank in now.ranks:
        was = earlier.get(rank.rank)
        if was is None or seconds <= 0 or not (rank.has_page and was.has_page) or rank.steps < was.steps:
            cells.append(("", "", ""))
            continue
        waited = (late[0].get(rank.rank, 0.0) - late[1].get(rank.rank, 0.0)) / seconds
        megabytes = (rank.reduced_bytes - was.reduced_bytes) / seconds / 1e6
        steps = (rank.steps - was.steps) / seconds
        cells.append((f"{steps:.1f}", f"{megabytes:,.1f} MB", f"{max(0.0, min(1.0, waited)):.0%}"))
    return cells
