"""The hosts that a program or a hostfile names, and what is said when it names none that make sense."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from horovodish.errors import SettingError
from horovodish.launcher.elastic import discovery
from horovodish.launcher.elastic.discovery import Discovery, by_hostfile, by_program
from horovodish.launcher.hosts.allocation import Allocation, Host
from support.processes import wait_until, wait_until_ended

NEVER = threading.Event()


def program(folder: Path, text: str) -> str:
    path = folder / "hosts.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_program_names_hosts_in_any_form(tmp_path: Path) -> None:
    path = program(tmp_path, "echo a:2; echo b slots=4; echo; echo '# none'; echo c; echo d : 5")
    found = by_program(path, 3, os.environ)(NEVER)
    hosts = (Host("a", 2), Host("b", 4), Host("c", 3), Host("d", 5))
    assert found == Allocation(hosts, f"--host-discovery-script {path}")


def test_a_program_that_names_none(tmp_path: Path) -> None:
    assert by_program(program(tmp_path, "true"), 1, os.environ)(NEVER) is None


def test_a_program_has_the_users_variables(tmp_path: Path) -> None:
    found = by_program(program(tmp_path, "echo $ONE"), 1, {"ONE": "alpha", "PATH": os.defpath})(NEVER)
    assert found is not None and found.hosts == (Host("alpha", 1),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo no credentials >&2; exit 3", "failed with exit status 3: no credentials"),
        ("exit 1", "failed with exit status 1"),
        ("kill -9 $$", "failed with exit status -9"),
        ("echo '<html>'", "line 1: '<html>' is not a host"),
        ("echo a:2; echo a", "names a more than once"),
        ("echo a:many", "slots must be a whole number from 1, not 'many'"),
        ("echo a: many", "slots must be a whole number from 1, not 'many'"),
        ("sleep 60 & sleep 60", "took more than 1 s and was killed"),
        ("yes localhost", "printed more than 1 MiB and was killed"),
        ("yes localhost >&2", "took more than 1 s and was killed"),
        ("echo localhost:99999999999999999999", "slots can be 1048576 at most, not '99999999999999999999'"),
        (f"echo localhost slots={'9' * 900}", f"slots can be 1048576 at most, not '{'9' * 60}...'"),
        ("echo a:1000000; echo b:1000000", "names more than 1048576 slots"),
        ("printf a; head -c 300000 /dev/zero | tr '\\0' ' '; echo :2", "line 1 has more than 1000 characters"),
        ("head -c 900 /dev/zero | tr '\\0' '<'", f"line 1: '{'<' * 60}...' is not a host"),
    ],
)
def test_a_program_that_goes_wrong(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "PROGRAM_SECONDS", 1.0)
    path = program(tmp_path, text)
    with pytest.raises(SettingError, match=re.escape(f"--host-discovery-script {path}") + ".*" + re.escape(message)):
        by_program(path, 1, os.environ)(NEVER)


def test_a_program_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"failed with exit status 127: .*hosts\.sh: "):
        by_program(str(tmp_path / "hosts.sh"), 1, os.environ)(NEVER)


def test_what_cannot_be_read_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "LOOK_SECONDS", 0.01)
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=2\n")
    watch = Discovery(by_hostfile(str(hostfile)))
    watch.start()
    try:
        assert watch.has_looked(within=60)
        first = watch.found()
        assert first is not None and first.hosts == (Host("a", 2),)
        hostfile.write_text("a slots=two\n")
        wait_until(lambda: watch.problem)
        assert "slots must be a whole number from 1, not 'two'" in watch.problem
        assert watch.found() == first
        hostfile.write_text("a slots=2\nb\n")
        wait_until(lambda: not watch.problem)
        assert watch.found() != first
        hostfile.unlink()
        wait_until(lambda: "No such file" in watch.problem)
    finally:
        watch.stop()


def test_the_children_of_a_program_end_with_it(tmp_path: Path) -> None:
    path = program(tmp_path, f"sleep 600 & echo $! >{tmp_path}/child; echo a:2")
    found = by_program(path, 1, os.environ)(NEVER)
    assert found is not None and found.hosts == (Host("a", 2),), "a child that has its stdout does not delay it"
    wait_until_ended(int((tmp_path / "child").read_text()))


HANGS = """
import pathlib, sys, threading
from horovodish.launcher.elastic.discovery import Discovery, by_program
watch = Discovery(by_program(sys.argv[1], 1, {"PATH": sys.argv[2]}))
watch.start()
threading.Event().wait()
"""


def hanging_program(folder: Path) -> tuple[str, Path]:
    """A program that never ends, and the file with its number and its child's."""
    numbers = folder / "numbers"
    return program(folder, f"sleep 600 & echo $$ $! >{numbers}.new; mv {numbers}.new {numbers}; wait"), numbers


def test_a_program_ends_when_the_launcher_is_killed(tmp_path: Path) -> None:
    path, numbers = hanging_program(tmp_path)
    launcher = subprocess.Popen([sys.executable, "-c", HANGS, path, os.environ["PATH"]])
    try:
        wait_until(numbers.exists)
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    for number in numbers.read_text().split():
        wait_until_ended(int(number))


KILLED_AT_THE_START = """
import os, signal, subprocess, sys, threading
from horovodish.launcher.elastic import discovery
class Popen(subprocess.Popen):
    def __init__(self, command, **options):
        super().__init__(command, **options)
        if sys.argv[1] in command:
            print(self.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
subprocess.Popen = Popen
discovery.by_program(sys.argv[1], 1, {"PATH": sys.argv[2]})(threading.Event())
"""


def test_a_program_ends_when_the_launcher_is_killed_as_it_starts(tmp_path: Path) -> None:
    path, numbers = hanging_program(tmp_path)
    command = [sys.executable, "-c", KILLED_AT_THE_START, path, os.environ["PATH"]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout
        program = int(launcher.stdout.readline())
    assert launcher.returncode == -signal.SIGKILL
    wait_until_ended(program)
    assert not numbers.exists()


def test_a_program_that_hangs_does_not_delay_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "STOP_SECONDS", 60.0)
    monkeypatch.setattr(discovery, "PROGRAM_SECONDS", 3600.0)
    path, numbers = hanging_program(tmp_path)
    watch = Discovery(by_program(path, 1, os.environ))
    watch.start()
    try:
        wait_until(numbers.exists)
        assert watch.found() is None, "nobody waits for it"
        assert not watch.has_looked(within=0)
    finally:
        watch.stop()
    assert watch.has_looked(within=0), "the thread has ended"
    for number in numbers.read_text().split():
        wait_until_ended(int(number))


def test_a_hostfile_without_an_end() -> None:
    with pytest.raises(SettingError, match="hostfile /dev/zero has more than 1 MiB"):
        by_hostfile("/dev/zero")(NEVER)
