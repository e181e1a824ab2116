"""`horovodish run`: from the options to the exit status."""

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict

from horovodish.errors import LaunchError
from horovodish.launcher import elastic
from horovodish.launcher.hosts.allocation import is_here
from horovodish.launcher.job import environment
from horovodish.launcher.job.conclusion import conclude
from horovodish.launcher.job.job import Job
from horovodish.launcher.job.output import Output, say
from horovodish.launcher.mpirun.command import Mpirun, arguments, variables
from horovodish.launcher.mpirun.installation import Library, candidates, find_library, inspect, matching
from horovodish.launcher.options import LaunchOptions
from horovodish.launcher.report.libraries import conflict
from horovodish.launcher.supervisor import start
from horovodish.launcher.supervisor.supervisor import problem_of
from horovodish.settings import NP_VARIABLE, Settings, load


def run(options: LaunchOptions, environ: Mapping[str, str]) -> int:
    """Runs the ranks and waits for them. Must be called in the main thread.

    Args:
        options: what to run.
        environ: the user's environment.

    Returns:
        The exit status of the rank that failed first. Signal n counts as 128 + n: of a rank that was killed, and of the
        launcher when that ended the job.

    Raises:
        SettingError: a setting has a value that is not accepted, or the ranks do not fit on the hosts.
        LaunchError: MPI is missing, mpirun belongs to another MPI, the ranks cannot be started, or horovod-names is
            installed beside Horovod.
    """
    if not options.as_horovod and (problem := conflict()):
        raise LaunchError(problem)
    environ = environment.with_settings(environ, options.settings)
    settings = load(environ, warn=say)
    hosts = [each.host for each in options.host_ranks]
    library = find_library(environ)
    mpirun = matching(library, (inspect(path, environ) for path in candidates(environ)))
    unbuffered = not sys.stdout.isatty()
    environ = environment.rank_environment(environ, options.np, asdict(settings), unbuffered=unbuffered)
    if options.as_horovod:
        environ = environment.with_horovods_names(environ)
    if any(map(is_here, hosts)) and (problem := problem_of(options.command[0], environ["PATH"])):
        status, reason = problem.split(" ", 1)
        say(reason)
        return int(status)

    def start_once(options: LaunchOptions, variables: Mapping[str, str]) -> Job:
        return _start(options, settings, mpirun, library, {**environ, NP_VARIABLE: str(options.np), **variables})

    return conclude(elastic.run(options, start_once) if options.is_elastic else start_once(options, {}))


def _start(
    options: LaunchOptions, settings: Settings, mpirun: Mpirun, library: Library, environ: dict[str, str]
) -> Job:
    """Starts the ranks and waits for them.

    Raises:
        LaunchError: they cannot be started.
    """
    with start.run_folder() as folder:
        environ.update(variables(mpirun, options, environ, folder))
        if options.is_far:
            environ[start.TEXT_VARIABLE] = start.supervisor_text()
        exported = sorted({*environment.exported(environ), *start.EXPORTED})
        supervisor = start.supervisor_command(
            folder, mpirun.rank_variable, mpirun.segments_variable, options.command, is_far=options.is_far
        )
        command = arguments(mpirun, options, supervisor, environ, exported=exported, as_root=os.geteuid() == 0)
        output = Output(options, environ)
        try:
            job = Job(command, environ, options, settings, folder, output, elastic.members_of(options, mpirun))
            if options.verbose:
                say(f"{library.library} from {library.path}, started by {mpirun}")
                say(shlex.join(command))
            job.run()
        except OSError as failure:
            raise LaunchError(f"the ranks cannot be started: {failure}") from failure
        return job
