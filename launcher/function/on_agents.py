"""Ranks on hosts where somebody else, such as Ray or Spark, starts the agents."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from horovodish.launcher.agents.meeting import Meeting, on_agents
from horovodish.launcher.function.ranks import LOOPBACK, Problem, Ranks
from horovodish.launcher.hosts.addresses import addresses
from horovodish.launcher.job.output import say_unless_stuck
from horovodish.launcher.job.progress import Progress
from horovodish.launcher.options import LaunchOptions


@contextlib.contextmanager
def agents_joined(
    options: LaunchOptions, start: Callable[[str], object], *, within_seconds: float, problem: Problem
) -> Iterator[Meeting]:
    """A context with agents. At its end they are told to end.

    Args:
        options: of the launcher, with the number of ranks, which is also the number of agents.
        start: starts the agents, each with the contact that it is given.
        within_seconds: how long they may take to join.
        problem: of the agents. While there is one, it is of no use to wait for them.

    Raises:
        LaunchError: not all agents have joined; of an elastic job, as many as it needs at least.
    """
    with Meeting([*addresses(options.network_interfaces), LOOPBACK]) as meeting:
        start(meeting.contact)
        progress = Progress()
        count = options.least if options.is_elastic else options.np
        until = time.monotonic() + within_seconds
        meeting.gather(count, until, progress.show, lambda: problem(0.0), is_elastic=options.is_elastic)
        progress.show("")
        if options.is_elastic:
            meeting.when_lost = lambda: say_unless_stuck(meeting.lost[-1])
        yield meeting


def ranks_of(
    meeting: Meeting,
    options: LaunchOptions,
    environ: Mapping[str, str],
    problem: Problem,
    files: Mapping[str, Any] | None = None,
) -> Ranks:
    """Ranks that the agents start. `Ranks` explains the arguments."""
    return Ranks(on_agents(options, meeting), environ, problem=problem, files=files)
