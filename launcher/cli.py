"""The command `horovodish`: from its arguments to its exit status."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from horovodish.errors import LaunchError, SettingError
from horovodish.launcher import config_file, host_flags, without_effect
from horovodish.launcher.check import check
from horovodish.launcher.flags import check_parser, parser, run_parser
from horovodish.launcher.run import Request, run, say
from horovodish.settings import table

__all__ = ["main", "request"]

USAGE_ERROR = 2
INTERRUPTED = 130
EXAMPLE = "horovodish run -np 2 python train.py"


def request(options: argparse.Namespace, environ: Mapping[str, str]) -> Request:
    """What `run` shall do.

    Args:
        options: the flags.
        environ: in which a scheduler may have named hosts.

    Raises:
        SettingError: a flag has a value that is not accepted, or nothing says how many ranks to start.
    """
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    settings = {}
    for row in table():
        given = getattr(options, row.name)
        if given is not None:
            text = str(int(given)) if row.is_switch else given
            row.parse(text, row.flag)
            settings[row.name] = text
    hosts = host_flags.hosts(options, environ)
    np = options.np if hosts is None or options.np is not None else hosts.slots
    if np is None:
        raise SettingError(f"-np is missing, the number of ranks, such as: {EXAMPLE}")
    return Request(
        np,
        command,
        settings,
        hosts=hosts,
        oversubscribe=options.oversubscribe,
        wishes=host_flags.wishes(options),
        gpus_per_rank=options.gpus_per_rank,
        prefix_output=options.prefix_output,
        prefix_timestamp=options.prefix_output_with_timestamp,
        output_folder=options.output_filename,
        verbose=options.verbose,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, without the program's name, and returns the exit status; 2: it makes no sense.

    Raises:
        SystemExit: with status 0, for --help and --version.
    """
    _open_standard_files()
    try:
        match list(sys.argv[1:] if arguments is None else arguments):
            case ["run", *rest]:
                return _run(rest)
            case ["check", *rest]:
                return check(os.environ, as_json=check_parser().parse(rest).json)
            case given:
                return _without_subcommand(given)
    except SettingError as problem:
        say(str(problem))
        return USAGE_ERROR
    except LaunchError as problem:
        say(str(problem))
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


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
    options = runs.parse(arguments)
    if options.check:
        return check(os.environ)
    if options.config_file:
        runs.set_defaults(**config_file.read(options.config_file, runs))
        options = runs.parse(arguments)
    wanted = request(options, os.environ)
    if not wanted.command:
        runs.error("COMMAND is missing, such as: " + EXAMPLE)
    for notice in without_effect.notices(options):
        say(notice)
    return run(wanted, os.environ)


def _without_subcommand(arguments: Sequence[str]) -> int:
    top = parser()
    match arguments:
        case []:
            top.error("a subcommand is missing: run or check")
        case [word, *_] if not word.startswith("-"):
            top.error(f"there is no subcommand {word}: it is run or check, such as in: {EXAMPLE}")
        case [flag, *_] if flag not in top.flags:
            top.error(f"{flag} comes after a subcommand: horovodish run {flag} ...")
    top.parse(arguments)  # prints the help or the version; what is left is --check-build
    return check(os.environ)


if __name__ == "__main__":
    sys.exit(main())
