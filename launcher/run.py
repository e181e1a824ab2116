"""`horovodish run`: from the command to the closing line and the exit status."""

import contextlib
import os
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from horovodish.errors import LaunchError
from horovodish.launcher.environment import THREADS_VARIABLE, rank_environment, with_settings
from horovodish.launcher.installation import candidates, find_library, inspect, matching
from horovodish.launcher.job import Job
from horovodish.launcher.link import LONGEST_PATH_BYTES
from horovodish.launcher.mpirun import folders, worth_reading
from horovodish.launcher.supervisor import SEGMENTS
from horovodish.settings import load

__all__ = ["Request", "run", "say"]

NOT_EXECUTABLE, NOT_FOUND = 126, 127  # a shell's exit statuses
MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Request:
    """What the user wants to be run.

    Attributes:
        np: number of ranks.
        command: what each rank runs.
        settings: text by the name of the setting, for those that were given as flags.
        prefix_output: begin each line that a rank writes with `[rank] `.
        verbose: say what is done, and pass on all that mpirun says.
    """

    np: int
    command: Sequence[str]
    settings: Mapping[str, str]
    prefix_output: bool = False
    verbose: bool = False


def say(message: str, prefix: str = "horovodish: ") -> None:
    """Writes the lines of a message to stderr, if somebody reads it."""
    with contextlib.suppress(OSError):
        for line in message.splitlines():
            print(f"{prefix}{line}", file=sys.stderr, flush=True)


def run(request: Request, environ: Mapping[str, str]) -> int:
    """Runs the ranks on this host and waits for them. Must be called in the main thread.

    Args:
        request: what to run.
        environ: the user's environment.

    Returns:
        The exit status of the rank that failed first. Signal n counts as 128 + n: of a rank that was killed, and of the
        launcher when that ended the job.

    Raises:
        SettingError: a setting has a value that is not accepted.
        LaunchError: MPI is missing, mpirun belongs to another MPI, or the ranks cannot be started.
    """
    environ = with_settings(environ, request.settings)
    settings = load(environ, warn=say)
    library = find_library(environ)
    mpirun = matching(library, (inspect(path, environ) for path in candidates(environ)))
    unbuffered = not sys.stdout.isatty()
    with run_folder() as folder, memory_folder(folder) as segments:
        environ = {**folders(mpirun, folder, segments), **environ}
        variables = rank_environment(environ, request.np, folder, asdict(settings), unbuffered=unbuffered)
        problem = problem_of(request.command[0], variables["PATH"])
        if problem:
            say(problem[0])
            return problem[1]
        if THREADS_VARIABLE not in environ:
            say(threads_notice(request.np, variables[THREADS_VARIABLE]))
        try:
            job = Job(
                mpirun,
                request.np,
                request.command,
                variables,
                folder,
                prefix=request.prefix_output,
                start_timeout=settings.start_timeout_seconds,
                tell=say,
            )
            if request.verbose:
                say(f"{library.library} from {library.path}, started by {mpirun}")
                say(shlex.join(job.arguments))
            job.run()
        except OSError as failure:
            raise LaunchError(f"the ranks cannot be started: {failure}") from failure
        return conclude(job, request)


def threads_notice(np: int, threads: str) -> str:
    """Tells the user about the variable that was set for the ranks."""
    ranks, cores = f"{np} rank{'s' * (np > 1)}", len(os.sched_getaffinity(0))
    return f"{ranks} on {cores} cores: {THREADS_VARIABLE}={threads} for each; set it to choose another number"


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """A private folder that exists as long as the run."""
    longest = LONGEST_PATH_BYTES - len("/horovodish-XXXXXXXX/launcher.socket")
    parent = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(
        prefix="horovodish-", dir=parent if len(parent) <= longest else "/tmp", ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


@contextlib.contextmanager
def memory_folder(run_folder: Path) -> Iterator[Path | None]:
    """A private folder in memory, if the system has a place for it, by a link in the run folder.

    The link lets the supervisors remove it when the launcher was killed.
    """
    if not os.access(MEMORY, os.W_OK):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="hvd-", dir=MEMORY, ignore_cleanup_errors=True) as folder:
        link = run_folder / SEGMENTS
        link.symlink_to(folder)
        yield link


def problem_of(program: str, path: str) -> tuple[str, int] | None:
    """Why a rank could not run `program`, and the exit status that a shell has for it; None if it could."""
    if shutil.which(program, path=path):
        return None
    if os.path.isfile(program):
        python = f": start it with python {program}" if program.endswith(".py") else ""
        return f"{program} is not executable{python}", NOT_EXECUTABLE
    return f"{program}: command not found", NOT_FOUND


def conclude(job: Job, request: Request) -> int:
    """Says what made the job end, if that was not its natural end, and returns the exit status."""
    said = job.mpirun_log.read_text(encoding="utf-8", errors="replace").replace("\0", "")
    explained = job.stopped_by or job.fault or job.completed
    say(worth_reading(said) if explained and not request.verbose else said, prefix="")
    if job.stopped_by:
        return 128 + job.stopped_by
    if job.fault:
        say(f"rank {job.fault.rank} on {socket.gethostname()} {job.fault.what}")
        return job.fault.exit_status
    if job.completed == request.np:
        return 0
    mpirun = job.arguments[0]
    status = job.mpirun_status if job.mpirun_status >= 0 else 128 - job.mpirun_status
    if job.timed_out:
        say(f"only {job.started} of {request.np} ranks were started in time; --start-timeout gives them more")
        status = 1
    elif job.started < request.np:
        say(f"only {job.started} of {request.np} ranks were started before {mpirun} ended with exit status {status}")
    elif job.completed:
        say(f"a rank left with exit status 0 but without MPI_Finalize, so {mpirun} ended the other ranks")
        status = 1
    else:
        say(f"{mpirun} ended the job with exit status {status}")
    return status or 1
