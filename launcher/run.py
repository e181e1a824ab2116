"""`horovodish run`: from the options to the exit status."""

import contextlib
import functools
import os
import secrets
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from horovodish.errors import LaunchError, SettingError
from horovodish.launcher.agents.agent import key_of, written
from horovodish.launcher.agents.meeting import Meeting, hosts_of_meeting, on_agents, watch, write_program
from horovodish.launcher.elastic.job import ElasticJob
from horovodish.launcher.hosts.addresses import addresses
from horovodish.launcher.hosts.allocation import counted, is_here
from horovodish.launcher.job import environment
from horovodish.launcher.job.conclusion import conclude
from horovodish.launcher.job.job import Job
from horovodish.launcher.job.losses import EndOnLoss
from horovodish.launcher.job.output import Output, say, say_unless_stuck
from horovodish.launcher.job.progress import Progress
from horovodish.launcher.job.signals import signals_taken
from horovodish.launcher.mpirun.command import Mpirun, agent, arguments, variables
from horovodish.launcher.mpirun.installation import (
    Library,
    candidates,
    find_library,
    inspect,
    matching,
    search_path,
    with_home,
)
from horovodish.launcher.options import LaunchOptions
from horovodish.launcher.report import run_report
from horovodish.launcher.report.libraries import conflict
from horovodish.launcher.status import metrics
from horovodish.launcher.supervisor import start
from horovodish.launcher.supervisor.supervisor import allow_many_files, problem_of
from horovodish.settings import AGENT_SECRET_VARIABLE, START_VARIABLE, Settings, load, table

LEAST_ROOM_BYTES = 1 << 20
"""How much room there must be for temporary files."""


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
    allow_many_files()
    if options.agents and not options.meeting:
        return _run_on_agents(options, environ)
    if not options.as_horovod and (problem := conflict()):
        raise LaunchError(problem)
    try:
        os.getcwd()
    except FileNotFoundError:
        raise LaunchError("the ranks cannot be started: the current folder was removed. Remedy: cd elsewhere") from None
    given = environ
    if options.meeting:  # each host has GPUs of its own
        of_this_host = (environment.GPUS_VARIABLE, AGENT_SECRET_VARIABLE)
        environ = {name: value for name, value in environ.items() if name not in of_this_host}
    if options.report:
        options = replace(options, settings={**options.settings, **run_report.settings(options, environ)})
    environ = environment.with_settings(with_home(environ), options.settings)
    settings = load(environ, warn=say)
    here = _runs_here(options)
    if here:
        _check_files(settings)
    library = find_library(environ)
    mpirun = matching(library, (inspect(path, environ) for path in candidates(environ)))
    if options.as_horovod:
        environ = environment.with_horovods_names(environ)
    if here and (problem := problem_of([*options.command], search_path(environ))):
        status, reason = problem.split(" ", 1)
        say(reason)
        return int(status)

    def prepared(
        options: LaunchOptions, variables: Mapping[str, str], policy: EndOnLoss
    ) -> contextlib.AbstractContextManager[Job]:
        unbuffered = not sys.stdout.isatty()
        own = environment.rank_environment(environ, options.np, asdict(settings), unbuffered=unbuffered)
        return _prepared(options, settings, mpirun, library, {**own, **variables}, policy)

    served = metrics.served(options.metrics_port) if options.metrics_port else contextlib.nullcontext()
    try:
        with served:
            if options.is_elastic:
                return ElasticJob(options, prepared, mpirun.tolerates_losses, given).run()
            progress = Progress()
            with prepared(options, {}, EndOnLoss()) as job, signals_taken(job.take_signal), job.running():
                while job.turn():
                    progress.show(job.awaited, says=options.is_far)
                progress.show("")
            return conclude(job)
    finally:
        if options.report:
            run_report.make(options.report)


def _run_on_agents(options: LaunchOptions, environ: Mapping[str, str]) -> int:
    """As `run()`, on the hosts of agents that join."""
    assert options.agents
    given = environ.get(AGENT_SECRET_VARIABLE, "")
    secret = given or secrets.token_hex(16)
    progress = Progress()
    try:
        opened = Meeting(addresses(options.network_interfaces), key_of(secret), options.agent_port)
    except OSError as problem:
        raise LaunchError(f"agents cannot join at port {options.agent_port}: {problem.strerror}") from problem
    with opened as meeting:
        _, port, *own = meeting.contact.split()
        with_secret = "" if given else f"{AGENT_SECRET_VARIABLE}={secret} "
        say(f"start {counted(options.agents, 'agent')}: {with_secret}horovodish agent --join {written(own)}:{port}")
        meeting.when_refused = lambda address: say_unless_stuck(
            f"somebody at {address} may not join: an agent needs the same {AGENT_SECRET_VARIABLE} as the launcher"
        )
        until = time.monotonic() + options.elastic_timeout
        meeting.gather(options.agents, until, progress.show, lambda: "", is_elastic=options.is_elastic)
        progress.show("")
        options = on_agents(options, meeting)
        if options.is_elastic:
            meeting.when_lost = lambda: say_unless_stuck(meeting.lost[-1])
        return run(options, environ)


def _runs_here(options: LaunchOptions) -> bool:
    """Whether ranks run on this host from the start. An elastic job begins with the slots that there are.

    Raises:
        SettingError: the ranks do not fit on the hosts, and the job is not elastic.
    """
    if not options.is_elastic:
        return any(is_here(each.host) for each in options.host_ranks)
    if options.host_discovery_script:
        return False
    return options.allocation is None or any(is_here(host.name) for host in options.allocation.hosts)


def _check_files(settings: Settings) -> None:
    """Raises SettingError if a rank could not write a file that a setting names. Each rank would raise."""
    for row in table():
        path = getattr(settings, row.name) if row.is_file else ""
        folder = os.path.dirname(path) or "."
        problem = ""
        if path and not os.path.isdir(folder):
            problem = f"there is no folder {folder}"
        elif path and (os.path.isdir(path) or not os.path.basename(path)):
            problem = "that is a folder; name a file in it"
        elif path and os.path.exists(path) and not os.path.isfile(path):
            problem = "that is not a regular file; name one"
        elif path:
            try:
                tempfile.TemporaryFile(dir=folder).close()
            except OSError as failure:
                problem = f"no file can be made in the folder {folder}: {failure.strerror}"
        if problem:
            raise SettingError(f"{row.flag} {path}: {problem}")


def _check_room(folder: Path) -> None:
    """Raises LaunchError if MPI would not find room for its files. It says so in a page."""
    there = os.statvfs(folder)
    if there.f_bavail * there.f_frsize < LEAST_ROOM_BYTES:
        raise LaunchError(
            f"the ranks cannot be started: {folder.parent} is full, and MPI needs {LEAST_ROOM_BYTES >> 20} MiB there. "
            "Remedy: make room, or let TMPDIR name another folder"
        )


@contextlib.contextmanager
def _prepared(
    options: LaunchOptions,
    settings: Settings,
    mpirun: Mpirun,
    library: Library,
    environ: dict[str, str],
    policy: EndOnLoss,
) -> Iterator[Job]:
    """A job that can run, with what it needs as long as it does.

    Raises:
        LaunchError: that cannot be made.
    """
    with contextlib.ExitStack() as opened:
        try:
            folder = opened.enter_context(start.run_folder())
        except OSError as failure:
            raise LaunchError(f"the ranks cannot be started: {failure}") from failure
        _check_room(folder)
        if options.meeting:
            options = replace(options, launch_agent=write_program(folder, options.meeting))
        if "ssh" in agent(options, environ)[:1] and not shutil.which("ssh", path=environ["PATH"]):
            raise LaunchError("there is no ssh on this host: install openssh-client, or use --launch-agent PROGRAM")
        environ.update(variables(mpirun, options, environ, folder))
        if options.is_far:
            environ[start.TEXT_VARIABLE] = start.supervisor_text()
        exported = sorted({*environment.exported(environ), *start.EXPORTED})
        supervisor = start.supervisor_command(
            folder, mpirun.rank_variable, mpirun.segments_variable, is_far=options.is_far
        )
        command = arguments(mpirun, options, supervisor, environ, exported=exported, as_root=os.geteuid() == 0)
        output = Output(options, environ, appends=environ.get(START_VARIABLE, "0") != "0")
        opened.callback(output.close)
        try:
            job = Job(command, environ, options, settings, folder, output, policy)
            opened.callback(job.close)
            if options.meeting:
                agents = watch(options.meeting)
                opened.callback(agents.close)
                job.watch_agents(agents, functools.partial(hosts_of_meeting, options.meeting))
            if options.verbose:
                say(f"{library.library} from {library.path}, started by {mpirun}")
                say(shlex.join(command))
                say(f"each rank runs: {shlex.join(options.command)}")
        except OSError as failure:
            raise LaunchError(f"the ranks cannot be started: {failure}") from failure
        yield job
