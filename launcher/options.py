"""The flags of `horovodish run` that are no settings, in one table: each is a field of `LaunchOptions`.

A row gives the flag, the key of the config file, the argument of `horovodish.run()`, the line of the help, and the
attribute that the launcher reads. Flags of the engine's settings come from the table of `horovodish/settings.py`.
"""

import argparse
import functools
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from horovodish.errors import SettingError
from horovodish.launcher.hosts.allocation import (
    MOST_RANKS_OF_HOST,
    MOST_SLOTS,
    Allocation,
    HostRanks,
    assign_ranks,
    counted,
    from_hostfile,
    from_hosts_flag,
    is_here,
)
from horovodish.launcher.hosts.schedulers import given_allocation
from horovodish.settings import COMPATIBILITY, OUTPUT, table

EXAMPLE = "horovodish run -np 2 python train.py"
LONGEST_NUMBER = 18
WHAT, WHERE, ELASTIC = "what runs", "where it runs", "elastic training"
"""Titles among the flags, besides the titles of the settings."""


def count(text: str, what: str = "a whole number from 1", least: int = 1) -> int:
    # Python refuses to read very long numbers.
    if not (text.isascii() and text.isdecimal() and len(text) <= LONGEST_NUMBER) or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return int(text)


def _count_from_0(text: str) -> int:
    return count(text, "a whole number from 0", 0)


def _ranks(text: str) -> int:
    ranks = count(text, "a number of ranks")
    if ranks > MOST_SLOTS:
        raise argparse.ArgumentTypeError(f"there can be {MOST_SLOTS} ranks at most")
    return ranks


def slots(text: str) -> int:
    if count(text) > MOST_RANKS_OF_HOST:
        raise argparse.ArgumentTypeError(f"a host can have {MOST_RANKS_OF_HOST} ranks at most")
    return int(text)


def _port(text: str) -> int:
    if count(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port: they end at 65535")
    return int(text)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]") or "127.0.0.1", _port(port)


def _key(text: str) -> str:
    if not os.access(text, os.R_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be read")
    if len(text.split()) != 1:
        raise argparse.ArgumentTypeError(f"{text!r} has a space in it, and MPI would cut it there")
    return os.path.abspath(text)


def _program(text: str) -> str:
    path = shutil.which(text)
    if path is None and os.path.isfile(text):
        raise argparse.ArgumentTypeError(f"{text} is not executable. Remedy: chmod +x {shlex.quote(text)}")
    if path is None:
        raise argparse.ArgumentTypeError(f"there is no program {text}")
    return os.path.abspath(path)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of names such as eth0,eth1")
    return names


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as problem:
        raise argparse.ArgumentTypeError(f"{text!r}: {problem}") from problem


def _flag(group: str, flags: str, sentence: str, metavar: str = "", parse: Any = str, **argument: Any) -> Any:
    """A row of the table.

    Args:
        group: the title under which the help lists it.
        flags: its names, separated by spaces.
        sentence: what it does.
        metavar: the name of its value in the help; none for a switch.
        parse: makes the value of the text.
        argument: what else `add_argument()` is to be told.
    """
    kind: dict[str, Any] = {"metavar": metavar, "type": parse} if metavar else {"action": "store_true"}
    argument = {"default": None if metavar else False, "help": sentence, **kind, **argument}
    return field(default=argument["default"], metadata={"group": group, "flags": flags.split(), "argument": argument})


_what, _where, _elastic, _output = (functools.partial(_flag, group) for group in (WHAT, WHERE, ELASTIC, OUTPUT))


@dataclass(frozen=True)
class LaunchOptions:
    """The program that the user wants to run, and how. `launch_options()` makes one.

    Attributes:
        command: what each rank runs.
        settings: the settings that were given as flags: text by name.
        allocation: the hosts that the ranks may use; None for this host.
        np: the number of ranks; 0 for an elastic job that has as many as there are slots.
        network_interfaces: what MPI's daemons and ranks use between hosts; without any MPI chooses.
        meeting: the name of the socket at which mpirun asks for the agents that have joined; empty if there are none.
        binding_args: replace our arguments to bind and map ranks. Ours bind no rank, because a bound rank believes that
            the machine has only one core.
    """

    command: Sequence[str] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    allocation: Allocation | None = None
    meeting: str = ""

    np: int = _what(
        "-np --num-proc",
        "number of ranks (default: one for each slot of the hosts)",
        "N",
        _ranks,
        default=0,
    )
    hosts: str | None = _where("-H --hosts", "hosts, and how many ranks each takes", "HOST:SLOTS,...")
    hostfile: str | None = _where(
        "--hostfile -hostfile", "file with a line for each host: HOST slots=N, or HOST:N", "FILE"
    )
    oversubscribe: bool = _where("--oversubscribe", "allow more ranks than slots; needed only where hosts are named")
    ssh_port: int | None = _where("-p --ssh-port", "port of ssh on the other hosts", "PORT", _port)
    ssh_identity_file: str | None = _where("-i --ssh-identity-file", "private key for ssh", "FILE", _key)
    launch_agent: str | None = _where(
        "--launch-agent", "program to use instead of ssh; called as PROGRAM HOST COMMAND", "PROGRAM", _program
    )
    agents: int | None = _where(
        "--agents", "wait for N processes of `horovodish agent`, and run on their hosts, without ssh", "N", count
    )
    agent_port: int = _where(
        "--agent-port", "port at which agents join (default: a free port)", "PORT", _port, default=0
    )
    network_interfaces: tuple[str, ...] = _where(
        "--network-interfaces --network-interface",
        "network interfaces between hosts, such as eth0 (default: MPI's choice)",
        "NAME,...",
        _names,
        default=(),
    )
    tcp: bool = _where("--tcp", "use TCP between hosts, even if there is a faster network")
    gpus_per_rank: int | None = _where(
        "--gpus-per-rank",
        "how many GPUs of its host each rank sees (default: all)",
        "N",
        count,
    )
    binding_args: tuple[str, ...] | None = _where(
        "--binding-args", "mpirun arguments that bind and map ranks to cores", '="ARGS"', _words
    )
    mpi_args: tuple[str, ...] = _where("--mpi-args", "more mpirun arguments", '="ARGS"', _words, default=())

    min_np: int | None = _elastic(
        "--min-np --min-num-proc", "continue without lost ranks while N are left", "N", _ranks
    )
    max_np: int | None = _elastic("--max-np --max-num-proc", "grow onto new slots, up to N ranks", "N", _ranks)
    host_discovery_script: str | None = _elastic(
        "--host-discovery-script",
        "program that prints a hostfile of the current hosts; it runs every second",
        "PROGRAM",
        _program,
    )
    slots_per_host: int | None = _elastic(
        "--slots-per-host --slots", "slots of a host if the program prints no number for it (default: 1)", "N", slots
    )
    reset_limit: int | None = _elastic(
        "--reset-limit", "how many times new processes may be started (0: never; default: no limit)", "N", _count_from_0
    )
    elastic_timeout: int = _elastic(
        "--elastic-timeout",
        "how long to wait for hosts before the job ends, or for a busy rank before it counts as lost "
        "(default: %(default)s)",
        "SECONDS",
        count,
        default=600,
    )

    host_timeout: int = _elastic(
        "--host-timeout",
        "treat a rank as lost after this many seconds without a sign from it or its host (default: %(default)s)",
        "SECONDS",
        count,
        default=5,
    )

    prefix_output: bool = _output(
        "--prefix-output", "begin each line of output with its rank", action=argparse.BooleanOptionalAction
    )
    prefix_output_with_timestamp: bool = _output(
        "--prefix-output-with-timestamp -prefix-timestamp", "begin each line of output with the time and its rank"
    )
    output_filename: str | None = _output(
        "--output-filename", "also save the output of each rank, as DIR/rank.N/stdout and stderr", "DIR"
    )
    report: str | None = _output(
        "--report", "record the run, and write a page that says where its time went", "PAGE.html"
    )
    metrics_port: tuple[str, int] | None = _output(
        "--metrics-port",
        "serve metrics of each rank to Prometheus at this port (default address: 127.0.0.1)",
        "[ADDRESS:]PORT",
        _address,
    )
    verbose: bool = _output("--verbose", "print how the ranks are started, and all output of mpirun")
    as_horovod: bool = _flag(COMPATIBILITY, "--as-horovod", "run a Horovod script: `import horovod` imports horovodish")

    @property
    def host_ranks(self) -> tuple[HostRanks, ...]:
        """Which ranks run where.

        Raises:
            SettingError: the ranks do not fit on the hosts.
        """
        return assign_ranks(self.np, self.allocation, oversubscribe=self.oversubscribe)

    @property
    def is_elastic(self) -> bool:
        """Whether the job goes on when ranks are lost, or with more when there are new hosts."""
        return any(given is not None for given in (self.min_np, self.max_np, self.host_discovery_script))

    @property
    def least(self) -> int:
        """With how many ranks an elastic job goes on."""
        return self.min_np or self.np or 1

    @property
    def most(self) -> int | None:
        """How many ranks an elastic job has at most; None: as many as there are slots."""
        return self.max_np or self.np or None

    @property
    def is_far(self) -> bool:
        """Whether another host than this one takes part."""
        return not all(is_here(each.host) for each in self.host_ranks)

    @property
    def by_scheduler(self) -> bool:
        """Whether MPI's daemons are started by the means of the scheduler in whose allocation we are."""
        return self.allocation is not None and self.allocation.by_scheduler


def add_flags(to: argparse._ArgumentGroup, group: str, only: Sequence[str] | None = None) -> None:
    """Adds the flags of one group of the table to a group of a parser.

    Args:
        to: the group of the parser.
        group: of the table.
        only: the names of their attributes; None: all.
    """
    for row in fields(LaunchOptions):
        if row.metadata.get("group") == group and (only is None or row.name in only):
            to.add_argument(*row.metadata["flags"], dest=row.name, **row.metadata["argument"])


def launch_options(parsed: argparse.Namespace, environ: Mapping[str, str]) -> LaunchOptions:
    """The options that the flags ask for.

    Args:
        parsed: the flags.
        environ: the variables, where a scheduler may have named hosts.

    Raises:
        SettingError: a flag has a value that is not accepted, the flags or the scheduler name hosts in a way that makes
            no sense, or nothing says how many ranks to start.
    """
    given = {row.name: getattr(parsed, row.name) for row in fields(LaunchOptions) if row.metadata}
    settings = _settings(parsed)
    allocation = _allocation(parsed, environ)
    options = LaunchOptions(parsed.command, settings, allocation, **given)
    if options.agents:
        return options
    _check_bounds(options)
    if options.np or options.is_elastic:
        return options
    if not allocation:
        where = " before the command" * ("-np" in parsed.command)
        raise SettingError(f"-np is missing{where}, the number of ranks, such as: {EXAMPLE}")
    return replace(options, np=allocation.slots)


def _check_bounds(given: LaunchOptions) -> None:
    least, np, most = given.min_np, given.np, given.max_np
    begins_with = least or (np if given.is_elastic else 0)
    if least and np and least > np:
        raise SettingError(f"--min-np {least} is more than -np {np}: the job could not begin")
    if most and most < max(np, least or 0):
        raise SettingError(f"--max-np {most} is less than {f'-np {np}' if np > most else f'--min-np {least}'}")
    may_be_more = given.hostfile or given.oversubscribe
    if given.allocation and begins_with > given.allocation.slots and not may_be_more:
        slots = f"{counted(given.allocation.slots, 'slot')} of {given.allocation.source}"
        flag = "--min-np" if least else "-np"
        raise SettingError(f"{flag} {begins_with} is more than the {slots}: the job could not begin")
    if given.slots_per_host and not given.host_discovery_script:
        raise SettingError("--slots-per-host is for --host-discovery-script; elsewhere write HOST:SLOTS")


def _settings(parsed: argparse.Namespace) -> dict[str, str]:
    settings = {}
    for row in table():
        given = getattr(parsed, row.name)
        if given is not None:
            text = str(int(given)) if row.is_switch else given
            row.parse(text, row.flag)
            settings[row.name] = text
    return settings


def _allocation(parsed: argparse.Namespace, environ: Mapping[str, str]) -> Allocation | None:
    if parsed.agents is not None:
        for flag in ("hosts", "hostfile", "host_discovery_script", "launch_agent"):
            if getattr(parsed, flag) is not None:
                raise SettingError(f"--agents names the hosts: leave --{flag.replace('_', '-')} out")
        return None
    if parsed.host_discovery_script is not None:
        if parsed.hosts is not None or parsed.hostfile is not None:
            raise SettingError("--host-discovery-script names the hosts: leave --hosts and --hostfile out")
        return None
    if parsed.hosts is not None and parsed.hostfile is not None:
        raise SettingError("--hosts and --hostfile both name the hosts: use one of them")
    if parsed.hosts is not None:
        if parsed.command and re.fullmatch(r"[^/\s]+:\d+", parsed.command[0]):
            together = f"{parsed.hosts},{parsed.command[0]}"
            raise SettingError(f"hosts are separated by commas, without spaces: --hosts {together}")
        return from_hosts_flag(parsed.hosts)
    return given_allocation(environ) if parsed.hostfile is None else from_hostfile(parsed.hostfile)
