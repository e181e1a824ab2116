"""`horovodish run`: from the options to the exit status."""

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from horovodish.errors import LaunchError
from horovodish.launcher.elastic import ElasticJob
from horovodish.launcher.hosts.allocation import is_here
from horovodish.launcher.job import environment
from horovodish.launcher.job.conclusion import conclude
from horovodish.launcher.job.job import Job
from horovodish.launcher.job.output import Output, say
from horovodish.launcher.job.signals import signals_taken
from horovodish.launcher.job.survivors import NoSurvivors
from horovodish.launcher.mpirun.command import Mpirun, arguments, variables
from horovodish.launcher.mpirun.installation import Library, candidates, find_library, inspect, matching
from horovodish.launcher.options import LaunchOptions
from horovodish.launcher.report.libraries import conflict
from horovodish.launcher.supervisor import start
from horovodish.launcher.supervisor.supervisor import problem_of
from horovodish.settings import START_VARIABLE, Settings, load


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
    given = environ
    environ = environment.with_settings(environ, options.settings)
    settings = load(environ, warn=say)
    hosts = [each.host for each in options.host_ranks]
    library = find_library(environ)
    mpirun = matching(library, (inspect(path, environ) for path in candidates(environ)))
    if options.as_horovod:
        environ = environment.with_horovods_names(environ)
    if options.np and any(map(is_here, hosts)) and (problem := problem_of(options.command[0], environ["PATH"])):
        status, reason = problem.split(" ", 1)
        say(reason)
        return int(status)

    def prepared(
        options: LaunchOptions, variables: Mapping[str, str], survivors: NoSurvivors
    ) -> contextlib.AbstractContextManager[Job]:
        unbuffered = not sys.stdout.isatty()
        own = environment.rank_environment(environ, options.np, asdict(settings), unbuffered=unbuffered)
        return _prepared(options, settings, mpirun, library, {**own, **variables}, survivors)

    if options.is_elastic:
        return ElasticJob(options, prepared, mpirun.tolerates_losses, given).run()
    with prepared(options, {}, NoSurvivors()) as job, signals_taken(job.take_signal), job.running():
        while job.turn():
            pass
    return conclude(job)


@contextlib.contextmanager
def _prepared(
    options: LaunchOptions,
    settings: Settings,
    mpirun: Mpirun,
    library: Library,
    environ: dict[str, str],
    survivors: NoSurvivors,
) -> Iterator[Job]:
    """A job that can run, with what it needs as long as it does.

    Raises:
        LaunchError: that cannot be made.
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
        output = Output(options, environ, appends=environ.get(START_VARIABLE, "0") != "0")
        try:
            job = Job(command, environ, options, settings, folder, output, survivors)
            if options.verbose:
                say(f"{library.library} from {library.path}, started by {mpirun}")
                say(shlex.join(command))
        except OSError as failure:
            raise LaunchError(f"the ranks cannot be started: {failure}") from failure
        yield job
