"""Ranks on hosts where somebody else, such as Ray or Spark, starts the agents."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from horovodish.launcher.agents.meeting import Meeting, on_agents
from horovodish.launcher.function.ranks import LOOPBACK, Ranks
from horovodish.launcher.hosts.addresses import addresses
from horovodish.launcher.job.progress import Progress
from horovodish.launcher.options import LaunchOptions


@contextlib.contextmanager
def ranks_on_agents(
    options: LaunchOptions,
    environ: Mapping[str, str],
    start: Callable[[str], object],
    *,
    within_seconds: float,
    stops: Callable[[], str],
    files: Mapping[str, Any] | None = None,
) -> Iterator[Ranks]:
    """A context with ranks, one for each agent. At its end ranks and agents are told to end.

    Args:
        options: of the launcher, with the number of ranks.
        environ: of the launcher.
        start: starts as many agents, each with the contact that it is given.
        within_seconds: how long they may take to join.
        stops: returns why there is no use in waiting for them; nothing as long as there is.
        files: what to use instead of `sys.stdout` and `sys.stderr`, by the names "stdout" and "stderr".

    Raises:
        LaunchError: not all agents have joined.
    """
    with Meeting([*addresses(options.network_interfaces), LOOPBACK]) as meeting:
        start(meeting.contact)
        progress = Progress()
        meeting.gather(options.np, time.monotonic() + within_seconds, progress.show, stops)
        progress.show("")
        with Ranks(on_agents(options, meeting), environ, meeting=meeting, files=files) as ranks:
            yield ranks
