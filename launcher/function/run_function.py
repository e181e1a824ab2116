"""`horovodish.run()`: calls a Python function on N ranks and brings back what it returns."""

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from horovodish.errors import LaunchError
from horovodish.launcher.flags import did_you_mean, run_parser
from horovodish.launcher.function.call import Call
from horovodish.launcher.function.ranks import Ranks
from horovodish.launcher.options import LaunchOptions, launch_options
from horovodish.settings import NP_VARIABLE

T = TypeVar("T")

HOROVODS_ARGUMENTS = {"use_gloo": "gloo", "use_mpi": "mpi"}


def run(
    func: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    env: Mapping[str, str],
    flags: Mapping[str, Any],
) -> list[T]:
    """`horovodish.run`, which documents it, with `num_proc`, `hosts` and `hostfile` among the flags."""
    environ = environment(env)
    options = options_of(flags, environ)
    if options.is_elastic:
        raise LaunchError(
            "horovodish.run() returns the result of every rank, so it cannot lose ranks. For elastic training "
            "start a script: horovodish run --min-np N ..."
        )
    call = Call.of(func, args, kwargs)
    with Ranks(options, environ) as ranks:
        return ranks.call(call, is_last=True)


def options_of(flags: Mapping[str, Any], environ: Mapping[str, str]) -> LaunchOptions:
    """The options of the launcher for arguments of Python.

    Raises:
        TypeError: there is no such argument.
        SettingError: an argument has a value that is not accepted.
    """
    return launch_options(run_parser().parse(_arguments(flags)), environ)


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of this process, with the variables of `env` added.

    Raises:
        TypeError: a variable is no text.
        LaunchError: this process is a rank.
    """
    if NP_VARIABLE in os.environ:
        raise LaunchError("horovodish.run() was called by a rank; start the script with python, without a launcher")
    for name, value in env.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise TypeError(f"horovodish.run(): env has {name!r}: {value!r}, but variables are text")
    return {**os.environ, **env}


def _arguments(given: Mapping[str, Any]) -> list[str]:
    """The keyword arguments, converted to arguments of the command line."""
    known = {name.replace("-", "_"): action for name, action in run_parser().named.items()}
    words = []
    for given_name, value in given.items():
        name = HOROVODS_ARGUMENTS.get(given_name, given_name)
        if value is None or (name != given_name and not value):
            continue
        if name not in known:
            if name == "config_file":
                raise TypeError("horovodish.run() takes no config_file; pass its settings as arguments")
            raise TypeError(f"horovodish.run() has no argument {name}{did_you_mean(name, known)}")
        action = known[name]
        flag = next(flag for flag in action.option_strings if flag.startswith("--"))
        if action.nargs != 0:
            words.append(f"{flag}={value}")
        elif not isinstance(value, int if name == "verbose" else bool):  # Horovod has degrees of verbosity
            raise TypeError(f"horovodish.run(): {given_name} is True or False, not {value!r}")
        elif value:
            words.append(flag)
        elif isinstance(action, argparse.BooleanOptionalAction):
            words.append(f"--no-{flag.removeprefix('--')}")
    return words
