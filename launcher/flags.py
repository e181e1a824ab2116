"""The parsers of `horovodish`. The flags come from the tables of settings and of launch options, grouped for people."""

import argparse
import copy
import difflib
import os
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from horovodish.errors import SettingError
from horovodish.launcher.options import ELASTIC, WHAT, WHERE, add_flags, count, slots
from horovodish.launcher.report.libraries import versions
from horovodish.settings import AUTOTUNE, COMPATIBILITY, OUTPUT, STALLS, START, TIMELINE, TUNING, WITHOUT_EFFECT, table

ON_THE_COMMAND_LINE_ALONE = ("check", "config_file", "help", "help_all", "version")
OF_OTHER_LAUNCHERS = {
    "--nproc-per-node": "did you mean -np, the number of all ranks?",
    "--nnodes": "did you mean --hosts?",
    "--gpus": "did you mean -np? Each rank has one GPU",
    "--elastic": "did you mean --min-np, the smallest number of ranks that the job continues with?",
    "-x": "ranks get all of your environment without it",
    "--mca": 'did you mean --mpi-args="--mca ..."?',
}
"""Flags of torchrun, mpirun and other launchers, and what to do here: the flag most like it would mislead."""
OVERRIDES = "A variable sets each, too. The config file overrides the variable;\na flag overrides both."
COMMANDS = {
    "run": "start N ranks of a command: horovodish run -np N COMMAND ...",
    "check": "print the installed software, and whether ranks can be started here",
    "report": "make a page of the records of a run: where the time of its steps went",
    "predict": "say what more ranks, other links and other strategies would give",
    "status": "show what a running job does, and which rank the others wait for",
    "agent": "let a launcher start ranks on this host without ssh",
    "merge-traces": "merge the timelines of several ranks into one",
    "version": "print the installed versions",
    "help": "print the help of a command: horovodish help run",
}
EXAMPLES = """examples:
  horovodish run -np 4 python train.py               4 ranks on this machine
  horovodish run -H alpha:4,beta:4 python train.py   8 ranks on two hosts
  horovodish run python train.py                     in a job of Slurm or PBS
  horovodish run -np 4 --min-np 2 python train.py    continue if ranks are lost"""
SHORT = (
    *("np", "config_file", "hosts", "hostfile", "network_interfaces", "gpus_per_rank"),
    *("min_np", "max_np", "host_discovery_script", "prefix_output", "output_filename", "report"),
    *("verbose", "as_horovod", "help", "help_all", "version"),
)
"""The flags that `horovodish run --help` explains, by attribute name. `--help-all` explains every flag."""
SHORT_WIDTH = 36
"""How much of a line of it the names of the flags take."""

TITLES = {COMPATIBILITY: "compatibility with Horovod"}
"""Where the help has another title than the table."""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Names the value of a flag once, and not after each of its names."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        return f"{', '.join(action.option_strings)} {self._format_args(action, action.dest.upper())}"


class _ShortHelp(_Help):
    """Gives a flag its first name and its first sentence alone."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        first = copy.copy(action)
        first.option_strings = action.option_strings[:1]
        return super()._format_action_invocation(first)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        first, end, _ = (action.help or "").partition(". ")
        return first[0].lower() + first[1:] if end else action.help


class Parser(argparse.ArgumentParser):
    """Raises a `SettingError` for a user's mistake: one line, with what the user probably meant."""

    def __init__(self, prog: str, **how: Any) -> None:
        super().__init__(prog, allow_abbrev=False, formatter_class=_Help, **how)

    @property
    def flags(self) -> list[str]:
        """All flags, with their dashes."""
        return [flag for action in self._actions for flag in action.option_strings]

    @property
    def named(self) -> dict[str, argparse.Action]:
        """The flags that a config file or a caller in Python can set, by name without dashes."""
        return {
            flag.lstrip("-"): action
            for action in self._actions
            for flag in action.option_strings
            if len(flag) > 2 and not flag.startswith("--no-") and action.dest not in ON_THE_COMMAND_LINE_ALONE
        }

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's, but our flags end where the command begins, whatever the words of the command look like."""
        if all(action.nargs != argparse.REMAINDER for action in self._actions):
            return super().parse_known_args(args, namespace)
        words = list(args)
        end = self._end_of_flags(words)
        if 2 <= end < len(words) and os.path.basename(words[end - 1]).startswith("python"):
            flag, value = words[end - 2 : end]
            self.error(f"{flag} has taken {value} for its value: give it one before {' '.join(words[end - 1 :])}")
        options, unknown = super().parse_known_args(words[:end], namespace)
        options.command += words[end + 1 :] if words[end : end + 1] == ["--"] else words[end:]
        return options, unknown

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """As `parse_args()`, with the nearest known flag for one that does not exist."""
        options: argparse.Namespace
        options, unknown = self.parse_known_args(arguments)
        if unknown and unknown[0].startswith("-"):
            flag = unknown[0].split("=")[0]
            remedy = OF_OTHER_LAUNCHERS.get(flag.replace("_", "-"))
            self.error(f"there is no flag {flag}" + (f"; {remedy}" if remedy else did_you_mean(flag, self.flags)))
        if unknown:
            self.error(f"{unknown[0]} is one argument too many")
        return options

    def _end_of_flags(self, words: Sequence[str]) -> int:
        """Returns how many words belong to flags: a flag may have values, and one with a single dash may be cut."""
        known = {flag: action for action in self._actions for flag in action.option_strings}
        at = 0
        while at < len(words) and words[at].startswith("-") and words[at] not in ("-", "--"):
            flag, has_value, _ = words[at].partition("=")
            cut = [] if flag.startswith("--") else [each for each in known if each.startswith(flag)]
            action = known.get(flag) or known.get(cut[0] if cut else "")
            at += 1
            if action and not has_value:
                at += action.nargs if isinstance(action.nargs, int) else 1
        return at

    def error(self, message: str) -> NoReturn:
        """Raises."""
        raise SettingError(f"{message} (see {self.prog} --help)")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: asks for the known one that is like it, if there is one."""
    by_name = {each.lstrip("-"): each for each in known}  # flags are not alike because of their dashes
    nearest = difflib.get_close_matches(word.lstrip("-"), by_name, n=1)
    return f"; did you mean {by_name[nearest[0]]}?" if nearest else ""


def parser() -> Parser:
    """The parser of what stands in place of a command."""
    rows = [f"  {command:<14}{what}" for command, what in COMMANDS.items()]
    top = Parser(
        prog="horovodish",
        usage="horovodish COMMAND ...",
        description="\n".join(["Data-parallel training on N ranks.", "", "commands:", *rows]),
    )
    _add_reports(top)
    return top


def check_parser() -> Parser:
    """The parser of `horovodish check`."""
    checks = Parser(
        prog="horovodish check",
        description="Prints what is installed and what is missing, and lets two ranks exchange data. "
        "The exit status is 0 if ranks can be started here, and 1 if not.",
    )
    checks.add_argument("--json", action="store_true", help="print it as JSON")
    where = "hosts whose links are measured: every host connects to each other one"
    of_hosts = ("hosts", "hostfile", "ssh_port", "ssh_identity_file", "launch_agent", "network_interfaces")
    add_flags(checks.add_argument_group(where), WHERE, of_hosts)
    return checks


def agent_parser() -> Parser:
    """The parser of `horovodish agent`."""
    agents = Parser(
        prog="horovodish agent",
        description="Lets `horovodish run --agents N` start ranks on this host, without ssh. Ends when the job ends.\n"
        "The variable HOROVODISH_AGENT_SECRET holds the secret that the launcher prints, or has in the same variable.",
    )
    agents.add_argument("--join", required=True, metavar="ADDRESS:PORT", help="where the launcher waits")
    in_all = "ranks that run here (default: as many as there are GPUs, or else cores)"
    agents.add_argument("--slots", type=slots, metavar="N", help=in_all)
    return agents


def merge_parser() -> Parser:
    """The parser of `horovodish merge-traces`."""
    merges = Parser(
        prog="horovodish merge-traces",
        description="Merges the timelines of several ranks into one:\n"
        "horovodish merge-traces trace.rank-*.json > trace.json",
    )
    merges.add_argument("traces", nargs="*", metavar="FILE", help="the timeline of a rank")
    return merges


def report_parser() -> Parser:
    """The parser of `horovodish report`."""
    reports = Parser(
        prog="horovodish report",
        description="Makes a page that says where the time of a run went, and needs no network. The records come from\n"
        'horovodish run --report page.html ..., or from hvd.start_timeline("x.records"):\n'
        "  horovodish report x.rank-*.records -o page.html\n"
        "  horovodish report before.html after.html -o both.html    two pages beside each other",
    )
    reports.add_argument("files", nargs="*", metavar="FILE", help="the records of a rank, or a page to compare")
    reports.add_argument("-o", "--output", metavar="PAGE", default="report.html", help="default: %(default)s")
    hides = "leave out names of hosts, the command, settings, marks and errors"
    reports.add_argument("--without-names", action="store_true", help=hides)
    return reports


def predict_parser() -> Parser:
    """The parser of `horovodish predict`."""
    predicts = Parser(
        prog="horovodish predict",
        description="Says what a step would take with more ranks, simulated with the engine's own schedules:\n"
        "  horovodish predict page.html --cluster CLUSTER.yaml     from a report of a run\n"
        "  horovodish predict MODEL.yaml --cluster CLUSTER.yaml    from a description\n"
        "  horovodish predict --calibrate CLUSTER.yaml -np 8 -H alpha:4,beta:4    measure the machines",
    )
    predicts.add_argument("models", nargs="*", metavar="FILE", help="a page of horovodish report, or MODEL.yaml")
    charts = "write a page with sliders and charts of the predictions"
    predicts.add_argument("-o", "--output", metavar="PAGE", help=charts)
    predicts.add_argument("--cluster", metavar="FILE", help="YAML file that describes the machines and their links")
    measures = (
        "write FILE from what this cluster takes; flags of horovodish run follow, such as -np 8 -H alpha:4,beta:4"
    )
    predicts.add_argument("--calibrate", metavar="FILE", help=measures)
    predicts.add_argument("--ranks", type=_most_ranks, default=4096, metavar="N", help="up to N; default: %(default)s")
    predicts.add_argument("--ranks-per-host", type=_most_ranks, metavar="N", help="overrides the number in --cluster")
    shares = "all ranks together have the batch that the run had (strong scaling)"
    trains = "also print the time to train: N steps with as many ranks as the run had"
    predicts.add_argument("--steps", type=count, metavar="N", help=trains)
    predicts.add_argument("--strong", action="store_true", help=shares)
    return predicts


def _most_ranks(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks from 1 to {1 << 20}")
    return int(text)


def status_parser() -> Parser:
    """The parser of `horovodish status`."""
    statuses = Parser(
        prog="horovodish status",
        description="Shows what each rank of a running job does, and which rank the others wait for.\n"
        "Call it on the host where `horovodish run` was started, as the same user.",
    )
    statuses.add_argument(
        "job", nargs="?", default="", metavar="JOB", help="the process of the launcher, or the script"
    )
    statuses.add_argument("--stacks", action="store_true", help="show the Python stacks of each rank, too")
    statuses.add_argument("--watch", action="store_true", help="show it live, with rates; needs rich")
    return statuses


def run_parser() -> Parser:
    """The parser of `horovodish run`."""
    runs = Parser(
        prog="horovodish run",
        usage="horovodish run -np N [flags] COMMAND ...",
        description="Starts N ranks of COMMAND on this host, or on hosts that you name, and waits.\n\n" + EXAMPLES,
        add_help=False,
    )
    what = runs.add_argument_group(WHAT)
    what.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND ...", help="what each rank runs")
    add_flags(what, WHAT)
    in_yaml = "YAML file with flags by name; the command line overrides it"
    what.add_argument("--config-file", metavar="FILE", help=in_yaml)
    where = runs.add_argument_group(WHERE)
    add_flags(where, WHERE)
    _add_settings(where, START)
    add_flags(runs.add_argument_group(ELASTIC), ELASTIC)
    for title in (OUTPUT, TUNING, AUTOTUNE, TIMELINE, STALLS, COMPATIBILITY):
        group = runs.add_argument_group(TITLES.get(title, title), OVERRIDES if title == TUNING else None)
        add_flags(group, title)
        _add_settings(group, title)
        if title == TUNING:
            same = "the same as --cache-capacity 0"
            group.add_argument("--disable-cache", dest="cache_capacity", action="store_const", const="0", help=same)
    ignored = runs.add_argument_group("accepted from Horovod's command lines, without effect")
    for knob in WITHOUT_EFFECT:
        kind = _switch_or_value(knob.is_switch, "VALUE") | ({"nargs": knob.values} if knob.values > 1 else {})
        ignored.add_argument(knob.flag, help=knob.reason, **kind)
    reports = runs.add_argument_group("instead of a run")
    reports.add_argument("-h", "--help", action=_PrintShortHelp, nargs=0, help="print the most common flags")
    reports.add_argument("--help-all", action="help", help="print all flags, also Horovod's flags without effect")
    _add_reports(reports)
    return runs


def notices_without_effect(parsed: argparse.Namespace) -> list[str]:
    """One line for each flag of Horovod's that was given and changes nothing here."""
    given = [knob for knob in WITHOUT_EFFECT if getattr(parsed, knob.name) is not None]
    return [f"{knob.flag} is accepted, but has no effect: {knob.reason}" for knob in given]


def _add_reports(group: argparse._ActionsContainer) -> None:
    group.add_argument("-cb", "--check-build", action="store_true", dest="check", help="the same as horovodish check")
    help_text = "print the installed versions"
    group.add_argument("-v", "--version", action=_PrintVersions, nargs=0, help=help_text)


class _PrintShortHelp(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        parser.formatter_class = lambda prog: _ShortHelp(prog, max_help_position=SHORT_WIDTH)
        short = parser._get_formatter()
        short.add_usage(parser.usage, [], [])
        short.add_text(parser.description)
        short.start_section("flags")
        short.add_arguments(action for action in parser._actions if action.dest in SHORT)
        short.end_section()
        print(short.format_help(), end="")
        parser.exit()


class _PrintVersions(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print("\n".join(versions(os.environ)))
        parser.exit()


def _add_settings(group: argparse._ArgumentGroup, title: str) -> None:
    for row in table():
        if row.group == title:
            flags = filter(None, (row.flag, row.horovodrun_flag))
            sentence = f"{row.sentence} Default: {row.usual}. Variable: {row.variable}".replace("%", "%%")
            text = "FILE" if row.is_file else "TEXT"
            metavar = "|".join(row.choices) or (text if isinstance(row.default, str) else "NUMBER")
            kind = _switch_or_value(row.is_switch, metavar)
            group.add_argument(*flags, dest=row.name, help=sentence, **kind)


def _switch_or_value(is_switch: bool, metavar: str) -> dict[str, Any]:
    """A switch has the flags --name and --no-name, anything else a flag with a value."""
    return {"action": argparse.BooleanOptionalAction} if is_switch else {"metavar": metavar}
