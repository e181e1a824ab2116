"""The flags of `horovodish`, grouped for people; those that are settings come from the table of settings."""

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import NoReturn

from horovodish.errors import SettingError
from horovodish.launcher import host_flags, without_effect
from horovodish.settings import AUTOTUNE, OUTPUT, STALLS, START, TIMELINE, TUNING, Setting, table
from horovodish.version import __version__

__all__ = ["Parser", "check_parser", "did_you_mean", "parser", "run_parser"]

ON_THE_COMMAND_LINE_ALONE = ("check", "config_file", "help", "version")
OVERRIDES = "Each can also be set as a variable. The file of --config-file counts more than it, and a flag most."


class Parser(argparse.ArgumentParser):
    """Tells a user's mistake in one line, with what was probably meant, as a `SettingError`."""

    @property
    def flags(self) -> list[str]:
        """All flags, with their dashes."""
        return [flag for action in self._actions for flag in action.option_strings]

    @property
    def named(self) -> dict[str, argparse.Action]:
        """What a config file or a caller in Python can set, by the names of the flags, without their dashes."""
        return {
            flag.lstrip("-"): action
            for action in self._actions
            for flag in action.option_strings
            if len(flag) > 2 and not flag.startswith("--no-") and action.dest not in ON_THE_COMMAND_LINE_ALONE
        }

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """As `parse_args()`, with the nearest known flag for one that does not exist."""
        options, unknown = self.parse_known_args(arguments)
        if unknown and unknown[0].startswith("-"):
            flag = unknown[0].split("=")[0]
            if flag in without_effect.OF_ELASTIC_TRAINING:
                self.error(f"{flag} is for elastic training, which is not there yet")
            self.error(f"there is no flag {flag}{did_you_mean(flag, self.flags)}")
        if unknown:
            self.error(f"{unknown[0]} is one argument too many")
        return options

    def error(self, message: str) -> NoReturn:
        """Raises."""
        raise SettingError(f"{message} (see {self.prog} --help)")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: asks for the known one that is like it, if there is one."""
    nearest = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def parser() -> Parser:
    """The parser of what stands before a subcommand, or in place of one."""
    top = Parser(
        prog="horovodish",
        usage="horovodish run|check [flags] ...",
        description="Data-parallel training on N ranks.",
        epilog="`horovodish run -np N COMMAND ...` starts N ranks of COMMAND; `horovodish check` prints what is "
        "installed. Each has a --help of its own.",
        allow_abbrev=False,
    )
    _add_reports(top)
    return top


def check_parser() -> Parser:
    """The parser of `horovodish check`."""
    checks = Parser(
        prog="horovodish check",
        description="Prints what is installed and what is missing, and lets two ranks talk to each other. "
        "The exit status is 0 if ranks can be started here, and 1 if not.",
        allow_abbrev=False,
    )
    checks.add_argument("--json", action="store_true", help="print it as JSON")
    return checks


def run_parser() -> Parser:
    """The parser of `horovodish run`. The flags that are settings come from the table of settings."""
    runs = Parser(
        prog="horovodish run",
        usage="horovodish run -np N [flags] COMMAND ...",
        description="Starts N ranks of COMMAND, on this host unless others are named, and waits for them.",
        allow_abbrev=False,
        add_help=False,
    )
    what = runs.add_argument_group("what runs")
    what.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND ...", help="what each rank runs")
    what.add_argument(
        "-np", "--num-proc", dest="np", type=_ranks, metavar="N", help="number of ranks; all slots if hosts are named"
    )
    what.add_argument(
        "--config-file", metavar="FILE", help="flags by their names, in YAML; the command line overrides it"
    )

    where = runs.add_argument_group("where it runs")
    host_flags.add_to(where)
    _add_settings(where, START)

    output = runs.add_argument_group("output")
    output.add_argument(
        "--prefix-output",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="begin each line that a rank writes with its rank",
    )
    output.add_argument("--prefix-output-with-timestamp", action="store_true", help="and with the time")
    output.add_argument(
        "--output-filename",
        metavar="DIR",
        help="keep what each rank writes in DIR/rank.N/stdout and DIR/rank.N/stderr, too",
    )
    output.add_argument("--verbose", action="store_true", help="say what is done, and all that mpirun says")
    _add_settings(output, OUTPUT)

    tuning = runs.add_argument_group("tuning", OVERRIDES)
    _add_settings(tuning, TUNING)
    tuning.add_argument(
        "--disable-cache",
        dest="cache_capacity",
        action="store_const",
        const="0",
        help="the same as --cache-capacity 0",
    )
    _add_settings(runs.add_argument_group("autotune"), AUTOTUNE)
    _add_settings(runs.add_argument_group("timeline"), TIMELINE)
    _add_settings(runs.add_argument_group("stalls"), STALLS)

    without_effect.add_to(runs.add_argument_group("accepted from Horovod's command lines, without effect"))
    reports = runs.add_argument_group("instead of a run")
    reports.add_argument("-h", "--help", action="help", help="print this")
    _add_reports(reports)
    return runs


def _add_reports(group: argparse._ActionsContainer) -> None:
    group.add_argument("-cb", "--check-build", action="store_true", dest="check", help="the same as horovodish check")
    group.add_argument(
        "-v", "--version", action="version", version=f"horovodish {__version__}", help="print the version"
    )


def _add_settings(group: argparse._ArgumentGroup, title: str) -> None:
    for row in table():
        if row.group == title:
            _add_setting(group, row)


def _add_setting(group: argparse._ArgumentGroup, row: Setting) -> None:
    """A switch has the flags --name and --no-name, any other setting a flag with a value."""
    flags = list(filter(None, (row.flag, row.horovodrun_flag)))
    sentence = f"{row.sentence} Default: {row.usual}. Variable: {row.variable}".replace("%", "%%")
    if row.is_switch:
        group.add_argument(*flags, dest=row.name, help=sentence, action=argparse.BooleanOptionalAction)
    else:
        metavar = "|".join(row.choices) or ("TEXT" if isinstance(row.default, str) else "NUMBER")
        group.add_argument(*flags, dest=row.name, help=sentence, metavar=metavar)


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks")
    return int(text)
