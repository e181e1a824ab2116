"""The flags that say where ranks run and how they are connected, and what follows from them."""

import argparse
import os
import shlex
import shutil
from collections.abc import Mapping

from horovodish.errors import SettingError
from horovodish.launcher.hosts import Allocation, from_hostfile, from_hosts_flag
from horovodish.launcher.mpirun import Wishes
from horovodish.launcher.schedulers import given_allocation

__all__ = ["add_to", "hosts", "wishes"]


def add_to(group: argparse._ArgumentGroup) -> None:
    """Adds the flags to a group of a parser; those that are not given are None or False."""
    group.add_argument(
        "-H", "--hosts", metavar="HOST:SLOTS,...", help="hosts, and how many ranks each takes, such as a:2,b:4"
    )
    group.add_argument(
        "--hostfile", "-hostfile", metavar="FILE", help="the same, a line for each: HOST slots=N, or HOST:N"
    )
    group.add_argument(
        "--oversubscribe", action="store_true", help="allow more ranks than slots; this host alone takes any number"
    )
    group.add_argument("-p", "--ssh-port", type=_port, metavar="PORT", help="the port of ssh on the other hosts")
    group.add_argument("-i", "--ssh-identity-file", type=_key, metavar="FILE", help="the private key for ssh")
    group.add_argument(
        "--launch-agent",
        type=_program,
        metavar="PROGRAM",
        help="what takes the place of ssh; called as PROGRAM HOST COMMAND",
    )
    group.add_argument(
        "--network-interfaces",
        "--network-interface",
        type=_names,
        metavar="NAME,...",
        help="what hosts talk over, such as eth0; MPI chooses otherwise",
    )
    group.add_argument("--tcp", action="store_true", help="between hosts use TCP, whatever else there is")
    group.add_argument(
        "--gpus-per-rank",
        type=_count,
        metavar="N",
        help="let each rank see N GPUs of its host, by CUDA_VISIBLE_DEVICES; otherwise it sees all",
    )
    group.add_argument(
        "--binding-args", type=_words, metavar='="ARGS"', help="arguments of mpirun that bind and map ranks to cores"
    )
    group.add_argument("--mpi-args", type=_words, metavar='="ARGS"', help="further arguments of mpirun")


def hosts(options: argparse.Namespace, environ: Mapping[str, str]) -> Allocation | None:
    """The hosts that the ranks may use: those of the flags, else those of the scheduler. None: this host.

    Raises:
        SettingError: both flags are given, or what they name makes no sense.
    """
    if options.hosts is not None and options.hostfile is not None:
        raise SettingError("--hosts and --hostfile both name the hosts: use one of them")
    if options.hosts is not None:
        return from_hosts_flag(options.hosts)
    return given_allocation(environ) if options.hostfile is None else from_hostfile(options.hostfile)


def wishes(options: argparse.Namespace) -> Wishes:
    """What mpirun is to be told."""
    return Wishes(
        launch_agent=options.launch_agent or "",
        ssh_port=options.ssh_port,
        ssh_identity_file=options.ssh_identity_file or "",
        network_interfaces=options.network_interfaces or (),
        tcp=options.tcp,
        binding_args=options.binding_args,
        mpi_args=options.mpi_args or (),
    )


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def _port(text: str) -> int:
    if _count(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port: they end at 65535")
    return int(text)


def _key(text: str) -> str:
    if not os.access(text, os.R_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be read")
    if len(text.split()) != 1:
        raise argparse.ArgumentTypeError(f"{text!r} has a space in it, at which MPI would cut it")
    return os.path.abspath(text)


def _program(text: str) -> str:
    path = shutil.which(text)
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
