"""The command `horovodish`: from its arguments to its exit status."""

import os
import signal
import sys
from collections.abc import Sequence

from horovodish.errors import LaunchError, SettingError
from horovodish.launcher import config_file
from horovodish.launcher.agents.agent import join_by_hand
from horovodish.launcher.flags import (
    COMMANDS,
    agent_parser,
    check_parser,
    did_you_mean,
    merge_parser,
    notices_without_effect,
    parser,
    predict_parser,
    report_parser,
    run_parser,
    status_parser,
)
from horovodish.launcher.job.output import say
from horovodish.launcher.options import EXAMPLE, launch_options
from horovodish.launcher.own_python import module_command
from horovodish.launcher.report.check import check
from horovodish.launcher.report.libraries import conflict
from horovodish.launcher.run import run
from horovodish.launcher.status.show import show
from horovodish.reports.merge_traces import merge
from horovodish.settings import AGENT_SECRET_VARIABLE

READER_GONE = 141
"""The exit status if the reader of the output ends, as in `| head -1`."""
CALIBRATE = "horovodish predict --calibrate CLUSTER.yaml -np 8 -H alpha:4,beta:4"
USAGE_ERROR = 2
INTERRUPTED = 130
STARTERS = ("torchrun", "mpirun", "mpiexec", "horovodrun")
"""Commands that start processes. Each rank would start several, which would wait for each other without end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, without the program's name, and returns the exit status; 2: it makes no sense.

    Raises:
        SystemExit: with status 0, for --help and --version.
    """
    try:
        status = _chosen(arguments)
        sys.stdout.flush()
    except OSError as problem:
        if not isinstance(problem, BrokenPipeError):
            say(f"the output cannot be written: {problem.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes what is left when it ends
        return READER_GONE if isinstance(problem, BrokenPipeError) else 1
    return status


def _chosen(arguments: Sequence[str] | None) -> int:
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # horovodish.launch.interrupts has changed it
    _open_standard_files()
    try:
        match list(sys.argv[1:] if arguments is None else arguments):
            case ["run", *rest]:
                return _run(rest)
            case ["check", *rest]:
                given = check_parser().parse(rest)
                options = None
                if given.hosts or given.hostfile:
                    flags = [word for word in rest if word != "--json"]
                    options = launch_options(run_parser().parse([*flags, "--", "true"]), os.environ)
                return check(os.environ, as_json=given.json, options=options)
            case ["agent", *rest]:
                agent = agent_parser().parse(rest)
                return join_by_hand(agent.join, agent.slots, os.environ.pop(AGENT_SECRET_VARIABLE, ""))
            case ["report", *rest]:
                reports = report_parser()
                asked = reports.parse(rest)
                if not asked.files:
                    reports.error("the following arguments are required: FILE")
                from horovodish.reports import page  # the launcher starts without NumPy

                return page.report(asked.files, asked.output, without_names=asked.without_names)
            case ["predict", "--calibrate", *rest]:
                return _calibrate(rest)
            case ["predict", first, *rest] if first.startswith("--calibrate="):
                return _calibrate([first.partition("=")[2], *rest])
            case ["predict", *rest]:
                predicts = predict_parser()
                of = predicts.parse(rest)
                if of.calibrate:
                    predicts.error(f"--calibrate comes first: {CALIBRATE}")
                if not of.models:
                    predicts.error("the following arguments are required: FILE")
                from horovodish.reports import prediction  # the launcher starts without NumPy

                return prediction.run(
                    of.models,
                    of.cluster,
                    of.ranks,
                    strong=of.strong,
                    ranks_per_host=of.ranks_per_host,
                    steps=of.steps,
                    output=of.output,
                )
            case ["status", *rest]:
                wanted = status_parser().parse(rest)
                return show(wanted.job, stacks=wanted.stacks, live=wanted.watch)
            case ["merge-traces", *rest]:
                merges = merge_parser()
                traces = merges.parse(rest).traces
                return merge(traces) if traces else merges.error("the following arguments are required: FILE")
            case ["version", *rest]:
                return main(["--version", *rest])
            case ["help", *command]:
                return main([*command, "--help"])
            case given:
                return _without_command(given)
    except SettingError as problem:
        say(str(problem))
        return USAGE_ERROR
    except LaunchError as problem:
        say(str(problem))
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def horovodrun() -> int:
    """The command `horovodrun`, which horovod-names installs: `horovodish run --as-horovod`, with the same flags."""
    if problem := conflict():
        say(problem)
        return 1
    return main(["run", "--as-horovod", *sys.argv[1:]])


def _open_standard_files() -> None:
    """Opens /dev/null as each of stdin, stdout and stderr that is closed: any file could get its number otherwise."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, mode))


def _run(arguments: Sequence[str]) -> int:
    runs = run_parser()
    parsed = runs.parse(arguments)
    if parsed.check:
        return check(os.environ)
    if parsed.config_file:
        runs.set_defaults(**config_file.read(parsed.config_file, runs))
        parsed = runs.parse(arguments)
    options = launch_options(parsed, os.environ)
    if not options.command:
        runs.error("COMMAND is missing, such as: " + EXAMPLE)
    if (starter := os.path.basename(options.command[0])) in STARTERS:
        runs.error(f"{starter} starts processes, and so does horovodish run: leave {starter} out, as in: {EXAMPLE}")
    for notice in notices_without_effect(parsed):
        say(notice)
    return run(options, os.environ)


def _calibrate(arguments: Sequence[str]) -> int:
    """Starts the program that measures a cluster, with the flags of `horovodish run`."""
    predicts = predict_parser()
    match arguments:
        case [output, *flags] if output and not output.startswith("-"):
            pass
        case _:
            predicts.error(f"--calibrate needs the name of a file first: {CALIBRATE}")
    folder = os.path.dirname(os.path.abspath(output))
    if os.path.isdir(output):
        predicts.error(f"--calibrate {output}: that is a folder; name a file in it")
    if not os.path.isdir(folder):
        predicts.error(f"--calibrate {output}: there is no folder {folder}")
    if command := run_parser().parse(flags).command:
        predicts.error(f"--calibrate starts a program of its own: leave out {' '.join(command)}")
    return _run([*flags, "--", *module_command("horovodish.predictions.calibrate", output)])


def _without_command(arguments: Sequence[str]) -> int:
    top = parser()
    match arguments:
        case []:
            top.error(f"a command is missing, such as in: {EXAMPLE}")
        case [word, *_] if not word.startswith("-"):
            top.error(f"there is no command {word}{did_you_mean(word, COMMANDS) or f', but for example: {EXAMPLE}'}")
        case [flag, *_] if flag not in top.flags:
            top.error(f"{flag} comes after a command: horovodish run {flag} ...")
    top.parse(arguments)  # prints the help or the version; what is left is --check-build
    return check(os.environ)


if __name__ == "__main__":
    sys.exit(main())
