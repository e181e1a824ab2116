"""`horovodish run`: from the command to the exit status."""

import contextlib
import os
import select
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from horovodish.errors import LaunchError
from horovodish.launcher.absence import absent
from horovodish.launcher.conclusion import conclude
from horovodish.launcher.environment import THREADS_VARIABLE, exported, rank_environment, with_settings
from horovodish.launcher.folder import run_folder
from horovodish.launcher.hosts import Allocation, is_here, place
from horovodish.launcher.installation import candidates, find_library, inspect, matching
from horovodish.launcher.job import Job
from horovodish.launcher.mpirun import Start, Wishes, arguments, rank_variable, segments_variable, variables
from horovodish.launcher.output import STDERR, Output, style
from horovodish.launcher.program import EXPORTED, TEXT_VARIABLE, supervisor_command, supervisor_text
from horovodish.launcher.reception import addresses
from horovodish.launcher.supervisor import problem_of
from horovodish.settings import load

__all__ = ["Request", "run", "say"]


@dataclass(frozen=True)
class Request:
    """What the user wants to be run.

    Attributes:
        np: number of ranks.
        command: what each rank runs.
        settings: text by the name of the setting, for those that were given as flags.
        hosts: which hosts the ranks may use; None: this one.
        oversubscribe: whether hosts may get more ranks than they have slots.
        wishes: what mpirun is to be told.
        gpus_per_rank: how many GPUs each rank sees; None: all of its host.
        prefix_output: begin each line that a rank writes with `[rank] `.
        prefix_timestamp: begin it with the time, too.
        output_folder: where what the ranks write is kept in addition, or None.
        verbose: say what is done, and pass on all that mpirun says.
    """

    np: int
    command: Sequence[str]
    settings: Mapping[str, str]
    hosts: Allocation | None = None
    oversubscribe: bool = False
    wishes: Wishes = field(default_factory=Wishes)
    gpus_per_rank: int | None = None
    prefix_output: bool = False
    prefix_timestamp: bool = False
    output_folder: str | None = None
    verbose: bool = False


def say(message: str, prefix: str = "horovodish: ") -> None:
    """Writes the lines of a message to stderr, if somebody reads it."""
    with contextlib.suppress(OSError):
        for line in message.splitlines():
            print(f"{prefix}{line}", file=sys.stderr, flush=True)


def _say_at_once(message: str) -> None:
    """Says it unless stderr is not read at the moment: what goes on must not wait for its reader."""
    _, is_read, _ = select.select([], [STDERR], [], 0)
    if is_read:
        say(message)


def run(request: Request, environ: Mapping[str, str]) -> int:
    """Runs the ranks and waits for them. Must be called in the main thread.

    Args:
        request: what to run.
        environ: the user's environment.

    Returns:
        The exit status of the rank that failed first. Signal n counts as 128 + n: of a rank that was killed, and of the
        launcher when that ended the job.

    Raises:
        SettingError: a setting has a value that is not accepted, or the ranks do not fit on the hosts.
        LaunchError: MPI is missing, mpirun belongs to another MPI, or the ranks cannot be started.
    """
    environ = with_settings(environ, request.settings)
    settings = load(environ, warn=say)
    shares = place(request.np, request.hosts, oversubscribe=request.oversubscribe)
    is_far = not all(is_here(share.host) for share in shares)
    at = addresses(request.wishes.network_interfaces) if is_far else None
    library = find_library(environ)
    mpirun = matching(library, (inspect(path, environ) for path in candidates(environ)))
    with_threads = THREADS_VARIABLE not in environ
    environ = rank_environment(environ, request.np, asdict(settings), unbuffered=not sys.stdout.isatty())
    problem = problem_of(request.command[0], environ["PATH"]) if any(is_here(share.host) for share in shares) else ""
    if problem:
        status, reason = problem.split(" ", 1)
        say(reason)
        return int(status)
    with run_folder() as folder:
        program = supervisor_command(
            folder, rank_variable(mpirun), segments_variable(mpirun), request.command, is_far=is_far
        )
        start = Start(
            program,
            shares,
            is_far=is_far,
            by_scheduler=request.hosts is not None and request.hosts.by_scheduler,
            as_root=os.geteuid() == 0,
            wishes=request.wishes if is_far else replace(request.wishes, network_interfaces=()),
        )
        environ.update(variables(mpirun, start, environ, folder))
        if is_far:
            environ[TEXT_VARIABLE] = supervisor_text()
            start = replace(start, exported=sorted({*exported(environ), *EXPORTED}))
        output = Output(
            request.np,
            style(
                environ, prefix=request.prefix_output, timestamp=request.prefix_timestamp, folder=request.output_folder
            ),
        )
        try:
            job = Job(
                arguments(mpirun, start, environ),
                request.np,
                environ,
                folder,
                output,
                at=at,
                with_threads=with_threads,
                gpus_per_rank=request.gpus_per_rank,
                start_timeout=settings.start_timeout_seconds,
                is_hopeless=lambda came, said: any(absent(shares, came, said).values()),
                tell=_say_at_once,
            )
            if request.verbose:
                say(f"{library.library} from {library.path}, started by {mpirun}")
                say(shlex.join(job.arguments))
            job.run()
        except OSError as failure:
            raise LaunchError(f"the ranks cannot be started: {failure}") from failure
        return conclude(job, request.np, shares, say, verbose=request.verbose)
