"""Runs that cannot be started: one line says it, and nothing stays open."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from horovodish.errors import LaunchError, SettingError
from horovodish.launcher import run
from horovodish.launcher.hosts.allocation import from_hosts_flag
from horovodish.launcher.job.losses import EndOnLoss
from horovodish.launcher.mpirun.command import Mpirun
from horovodish.launcher.mpirun.installation import Library
from horovodish.launcher.options import LaunchOptions
from horovodish.settings import Settings

MPIRUN = Mpirun("/nowhere/mpirun", "Open MPI", "5.0.0")
LIBRARY = Library("4.0", "Open MPI v5.0.0", "/nowhere/libmpi.so", None)


def start(options: LaunchOptions) -> None:
    environ = {"PATH": os.defpath}
    with run._prepared(options, Settings(), MPIRUN, LIBRARY, environ, EndOnLoss()) as job, job.running():
        raise AssertionError("there is no such mpirun")


def open_files() -> set[str]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
        except FileNotFoundError:  # of the listing itself
            continue
    return found


@pytest.mark.parametrize("is_kept", [True, False])
def test_what_cannot_be_started_leaves_nothing_open(is_kept: bool, tmp_path: Path) -> None:
    file = tmp_path / "rank.1"
    file.touch()
    options = LaunchOptions(("true",), np=2, output_filename=str(tmp_path) if is_kept else None)
    before = open_files()
    with pytest.raises(SettingError if is_kept else LaunchError):
        start(options)
    assert open_files() == before


def test_a_run_whose_ranks_were_never_started_leaves_nothing_open() -> None:
    """mpirun ends at once, so no supervisor reports."""
    options = LaunchOptions(("true",), np=2)
    false = Mpirun("/bin/false", "Open MPI", "5.0.0")
    before = open_files()
    prepared = run._prepared(options, Settings(), false, LIBRARY, {"PATH": os.defpath}, EndOnLoss())
    with prepared as job, job.running():
        while job.turn():
            pass
    assert open_files() == before


def test_a_full_file_system_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LEAST_ROOM_BYTES", 1 << 60)
    before = open_files()
    with pytest.raises(LaunchError, match=r"the ranks cannot be started: .* is full, and MPI needs .* TMPDIR"):
        start(LaunchOptions(("true",), np=2))
    assert open_files() == before


def test_a_folder_for_temporary_files_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(LaunchError, match=r"the ranks cannot be started: .*No such file or directory"):
        start(LaunchOptions(("true",), np=2))


def test_other_hosts_need_ssh_or_another_agent(tmp_path: Path) -> None:
    options = LaunchOptions(("true",), np=1, allocation=from_hosts_flag("far"))
    environ = {"PATH": str(tmp_path)}
    for given in (options, replace(options, launch_agent="/bin/false")):
        message = "there is no ssh on this host: install openssh-client" if given is options else "cannot be started"
        with (
            pytest.raises(LaunchError, match=message),
            run._prepared(given, Settings(), MPIRUN, LIBRARY, dict(environ), EndOnLoss()) as job,
            job.running(),
        ):
            raise AssertionError("there is no such mpirun")


def test_two_names_of_one_machine_are_refused(launch: Callable[..., Any], tmp_path: Path) -> None:
    agent = tmp_path / "agent"  # in place of ssh
    agent.write_text('#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nshift\nexec sh -c "$*"\n')
    agent.chmod(0o755)
    job = launch("run", "-H", "alpha:1,beta:2", "--launch-agent", str(agent), "true")
    assert job.finish() == 2
    assert job.stderr.lines[-1] == (
        "horovodish: alpha and beta are two names of one machine: name it once, with all slots "
        f"(on {socket.gethostname()})"
    )
