"""The command `horovodish`: what its arguments mean."""

import argparse
import os
import sys
from collections.abc import Sequence

from horovodish.errors import LaunchError, SettingError
from horovodish.launcher.check import check
from horovodish.launcher.run import Request, run, say
from horovodish.settings import Setting, table
from horovodish.version import __version__

__all__ = ["main", "parser", "request"]

USAGE_ERROR = 2
INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    """The parser of the command line. The flags of `run` that are settings come from the table of settings."""
    top = argparse.ArgumentParser(
        prog="horovodish", description="Data-parallel training on N ranks.", allow_abbrev=False
    )
    top.add_argument("--version", action="version", version=f"horovodish {__version__}")
    commands = top.add_subparsers(dest="subcommand", required=True, metavar="run|check")

    runs = commands.add_parser(
        "run",
        help="start N ranks of a command on this host",
        description="Starts N ranks of COMMAND on this host and waits for them.",
        usage="horovodish run -np N [flags] COMMAND ...",
        allow_abbrev=False,
    )
    runs.add_argument("-np", "--num-proc", dest="np", type=_ranks, required=True, metavar="N", help="number of ranks")
    runs.add_argument(
        "--prefix-output",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="begin each line that a rank writes with its rank",
    )
    runs.add_argument("--verbose", action="store_true", help="say what is done, and all that mpirun says")
    knobs = runs.add_argument_group("settings", "Each can also be set as a variable, which the flag overrides.")
    for row in table():
        _add_setting(knobs, row)
    runs.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND ...", help="what each rank runs")

    commands.add_parser("check", help="print what is installed, and what is missing", allow_abbrev=False)
    return top


def request(options: argparse.Namespace) -> Request:
    """What `run` shall do.

    Raises:
        SettingError: a flag has a value that is not accepted.
    """
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    settings = {}
    for row in table():
        given = getattr(options, row.name)
        if given is not None:
            text = str(int(given)) if row.is_switch else given
            row.parse(text, row.flag)
            settings[row.name] = text
    return Request(options.np, command, settings, options.prefix_output, options.verbose)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, without the program's name, and returns the exit status.

    Raises:
        SystemExit: with status 2 for arguments that make no sense, with 0 for --help and --version.
    """
    commands = parser()
    options = commands.parse_args(arguments)
    try:
        if options.subcommand == "check":
            return check(os.environ)
        wanted = request(options)
        if not wanted.command:
            commands.error("run: COMMAND is missing, such as: horovodish run -np 2 python train.py")
        return run(wanted, os.environ)
    except SettingError as problem:
        say(str(problem))
        return USAGE_ERROR
    except LaunchError as problem:
        say(str(problem))
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def _add_setting(knobs: argparse._ArgumentGroup, row: Setting) -> None:
    """A switch has the flags --name and --no-name, any other setting a flag with a value."""
    flags = list(filter(None, (row.flag, row.horovodrun_flag)))
    sentence = f"{row.sentence} Default: {row.usual}. Variable: {row.variable}".replace("%", "%%")
    if row.is_switch:
        knobs.add_argument(*flags, dest=row.name, help=sentence, action=argparse.BooleanOptionalAction)
    else:
        metavar = "|".join(row.choices) or ("TEXT" if isinstance(row.default, str) else "NUMBER")
        knobs.add_argument(*flags, dest=row.name, help=sentence, metavar=metavar)


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
