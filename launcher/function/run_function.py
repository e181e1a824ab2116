"""`horovodish.run()`: calls a Python function on N ranks and brings back what it returns."""

import argparse
import codecs
import contextlib
import os
import pickle
import re
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from horovodish.errors import LaunchError, RankLostError, SettingError
from horovodish.launcher.flags import did_you_mean, run_parser
from horovodish.launcher.function.files import (
    CALL,
    OPTIONS,
    PROBLEM,
    UNSAFE,
    UNSEEN,
    Call,
    Report,
    name_of,
    pickled,
    read,
    write,
)
from horovodish.launcher.job.environment import HOROVOD_FOLDER
from horovodish.launcher.options import launch_options
from horovodish.launcher.own_python import module_command
from horovodish.settings import NP_VARIABLE

T = TypeVar("T")

LAUNCHERS_LINE = "horovodish: "
HOROVODS_ARGUMENTS = {"use_gloo": "gloo", "use_mpi": "mpi"}


class RankTraceback(Exception):
    """The cause of an exception that `run()` raises: the traceback that it has on its rank, as text."""


def run(
    func: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    env: Mapping[str, str],
    shared_folder: str | os.PathLike[str] | None,
    flags: Mapping[str, Any],
) -> list[T]:
    """`horovodish.run`, which documents it, with `num_proc`, `hosts` and `hostfile` among the flags."""
    if NP_VARIABLE in os.environ:
        raise LaunchError("horovodish.run() was called by a rank; start the script with python, without a launcher")
    environ = _environment(env)
    rank = module_command("horovodish.launcher.function.rank")
    options = launch_options(run_parser().parse([*_arguments(flags), "--", *rank]), environ)
    if options.is_elastic:
        raise LaunchError(
            "horovodish.run() returns what every rank returns, so it cannot go on without ranks. For elastic training "
            "start a script: horovodish run --min-np N ..."
        )
    call = Call.of_this_process(_pickled_call(func, args, kwargs))
    if options.as_horovod:
        call.path.insert(0, HOROVOD_FOLDER)
    with _exchange(shared_folder) as place:
        folder = Path(place)
        try:
            write(folder, CALL, call)
            write(folder, OPTIONS, replace(options, command=[*rank, place]))
        except PermissionError as problem:  # a file system need not know owners and modes
            raise SettingError(f"shared_folder: {problem}, or pass one where files have owners and modes") from problem
        launcher = module_command("horovodish.launcher.function.launcher", str(os.getpid()), place)
        return _results(folder, options.np, *_watched(launcher, environ))


def _arguments(given: Mapping[str, Any]) -> list[str]:
    """The arguments of Python as those of the command line."""
    known = {name.replace("-", "_"): action for name, action in run_parser().named.items()}
    words = []
    for given_name, value in given.items():
        name = HOROVODS_ARGUMENTS.get(given_name, given_name)
        if value is None or (name != given_name and not value):
            continue
        if name not in known:
            if name == "config_file":
                raise TypeError("horovodish.run() takes no config_file; pass what it sets as arguments")
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


def _exchange(parent: str | os.PathLike[str] | None) -> tempfile.TemporaryDirectory[str]:
    """A new folder for function and results."""
    try:
        return tempfile.TemporaryDirectory(prefix="horovodish-call-", dir=parent, ignore_cleanup_errors=True)
    except OSError as problem:
        raise SettingError(
            f"shared_folder: no folder can be made in {parent or 'the place for temporary files'}: {problem.strerror}. "
            "Pass one that exists and in which you may write"
        ) from problem


def _pickled_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    if not callable(func):
        raise TypeError(f"horovodish.run() takes a function, not {func!r}")
    try:
        return pickled((func, args, kwargs))
    except LaunchError:
        raise
    except Exception as problem:
        name = getattr(func, "__qualname__", repr(func))
        raise TypeError(
            f"{name} and its arguments cannot be pickled for the ranks: {problem}. "
            "Make inside the function what cannot travel, such as locks, connections and generators"
        ) from problem


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise TypeError(f"horovodish.run(): env has {name!r}: {value!r}, but variables are text")
    return {**os.environ, **env}


def _watched(command: list[str], environ: dict[str, str]) -> tuple[int, list[str]]:
    """Runs the launcher and passes on what comes out of it; returns its exit status and its own words.

    Raises:
        KeyboardInterrupt: the user interrupted the ranks; they have ended.
    """
    interrupt: KeyboardInterrupt | None = None
    with subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # signals from the terminal reach the launcher through us alone
    ) as launcher:
        try:
            relay = Relay(launcher)
            while not relay.is_done:
                try:
                    relay.pass_on()
                except KeyboardInterrupt as pressed:
                    interrupt = pressed
                    launcher.send_signal(signal.SIGINT)
        finally:
            if not relay.is_done:
                launcher.terminate()
    if interrupt:
        raise interrupt
    return launcher.returncode, relay.words


class Relay:
    """Pass on the output of the launcher to this process's `sys.stdout` and `sys.stderr`, as it comes.

    Attributes:
        words: the lines that the launcher itself has written.
    """

    def __init__(self, launcher: subprocess.Popen[bytes]) -> None:
        self.words: list[str] = []
        self._line = ""
        self._stderr = launcher.stderr
        self._selector = selectors.DefaultSelector()
        for source, target in ((launcher.stdout, sys.stdout), (launcher.stderr, sys.stderr)):
            assert source is not None
            decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
            self._selector.register(source, selectors.EVENT_READ, (decoder, target))

    @property
    def is_done(self) -> bool:
        """Whether the launcher has closed both."""
        return not self._selector.get_map()

    def pass_on(self) -> None:
        """Waits for something to come, and passes it on."""
        for key, _ in self._selector.select():
            data = os.read(key.fd, 1 << 16)
            decoder, target = key.data
            text = decoder.decode(data, final=not data)
            if not data:
                self._selector.unregister(key.fileobj)
            if key.fileobj is self._stderr:
                self._listen(text)
            _show(text, target)

    def _listen(self, text: str) -> None:
        *lines, self._line = (self._line + text).split("\n")
        self.words += [line.removeprefix(LAUNCHERS_LINE) for line in lines if line.startswith(LAUNCHERS_LINE)]


def _show(text: str, target: Any) -> None:
    """Writes to what stands for stdout or stderr here: None, anything with `write()`, or a file of few characters."""
    if target is None:
        return
    try:
        target.write(text)
    except UnicodeEncodeError:
        target.write(text.encode(target.encoding, errors="replace").decode(target.encoding))
    if hasattr(target, "flush"):
        target.flush()


def _results(folder: Path, np: int, status: int, words: list[str]) -> list[Any]:
    if (folder / PROBLEM).exists():
        raise read(folder, PROBLEM)
    reports: list[Report] = [read(folder, name_of(rank)) for rank in range(np) if (folder / name_of(rank)).exists()]
    # The launcher knows the cause from its consequences.
    root = re.match(r"ranks? (\d+)", words[-1]) if words else None
    causes = [report for report in reports if report.error]
    if words and status != 0:
        causes = [report for report in causes if root and report.rank == int(root[1])]
    if causes:
        _raise(min(causes, key=lambda report: report.time))
    if status == 0 and len(reports) < np:
        missing = next(rank for rank in range(np) if not (folder / name_of(rank)).exists())
        raise RankLostError(f"rank {missing} ended before the function returned")
    if status != 0:
        last = words[-1] if words else f"the launcher ended with exit status {status}"
        unusable = next((word for word in words if UNSEEN in word or UNSAFE in word), None)
        raise RankLostError(last) if root and not unusable else LaunchError(unusable or last)
    return [_loaded(report) for report in reports]


def _raise(report: Report) -> None:
    error: Exception = RankLostError(f"rank {report.rank} on {report.host} raised {report.error}")
    if report.exception:
        with contextlib.suppress(Exception):  # a class of the ranks alone
            error = pickle.loads(report.exception)
    raise error from RankTraceback(f"rank {report.rank} on {report.host}:\n{report.traceback}")


def _loaded(report: Report) -> Any:
    try:
        return pickle.loads(report.result or b"")
    except Exception as problem:
        raise TypeError(f"what rank {report.rank} returned cannot be loaded here: {problem}") from problem
