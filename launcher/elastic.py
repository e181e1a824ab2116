"""An elastic job: starts ranks, and starts new ones when those cannot go on, with as many as there is room for."""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from horovodish.launcher.job.job import Job
from horovodish.launcher.job.members import Members
from horovodish.launcher.job.output import say
from horovodish.launcher.mpirun.command import Mpirun
from horovodish.launcher.options import LaunchOptions
from horovodish.launcher.supervisor.supervisor import MEMORY
from horovodish.settings import START_VARIABLE, STATE_FOLDER_VARIABLE

FIRST_REST_SECONDS, LONGEST_REST_SECONDS = 2.0, 300.0
"""How long the slot of a lost rank is left alone. Each time that the same number of ranks is lost again, twice as long."""


def members_of(options: LaunchOptions, mpirun: Mpirun) -> Members | None:
    """The members of one start of an elastic job; None if the job is none."""
    if not options.is_elastic:
        return None
    return Members(options.np, options.min_np or 1, mpirun.tolerates_losses, options.elastic_timeout)


def run(options: LaunchOptions, start: Callable[[LaunchOptions, dict[str, str]], Job]) -> Job:
    """Starts the ranks as often as it takes.

    Args:
        options: of an elastic job.
        start: starts ranks with these options and further variables, and waits for their end.

    Returns:
        The last start.
    """
    rest = FIRST_REST_SECONDS
    with _memory() as memory:
        wanted = options.np
        number = 0
        while True:
            job = start(options, {START_VARIABLE: str(number), STATE_FOLDER_VARIABLE: str(memory)})
            members = job.members
            if members is None or not _goes_on(job, members):
                return job
            number += 1
            if options.reset_limit is not None and number > options.reset_limit:
                say(f"new processes have gone on {options.reset_limit} times, which --reset-limit allows, and no more")
                return job
            np = options.np - len(members.lost)
            if np < (options.min_np or 1):
                say(
                    f"{max(np, 0)} slots are left, fewer than --min-np {options.min_np or 1}: trying all in {rest:.0f} s"
                )
                time.sleep(rest)
                rest = min(2 * rest, LONGEST_REST_SECONDS)
                np = wanted
            options = replace(options, np=np)


def _goes_on(job: Job, members: Members) -> bool:
    """Whether new processes shall go on."""
    if job.stopped_by or job.refusal or job.fault or job.standstill:
        return False
    return members.has_run and not members.finished


@contextlib.contextmanager
def _memory() -> Iterator[Path]:
    """A folder in memory for the state, for as long as the job lasts."""
    parent = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="hvd-state-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
