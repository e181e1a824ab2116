"""The hosts that a program or a hostfile names, and what is said when it names none that make sense."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from horovodish.errors import SettingError
from horovodish.launcher.hosts import discovery
from horovodish.launcher.hosts.allocation import Allocation, Host
from horovodish.launcher.hosts.discovery import Discovery, by_hostfile, by_program
from support.processes import wait_until


def program(folder: Path, text: str) -> str:
    path = folder / "hosts.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_program_names_hosts_in_any_form(tmp_path: Path) -> None:
    path = program(tmp_path, "echo a:2; echo b slots=4; echo; echo '# none'; echo c; echo d : 5")
    found = by_program(path, 3, os.environ)()
    hosts = (Host("a", 2), Host("b", 4), Host("c", 3), Host("d", 5))
    assert found == Allocation(hosts, f"--host-discovery-script {path}")


def test_a_program_that_names_none(tmp_path: Path) -> None:
    assert by_program(program(tmp_path, "true"), 1, os.environ)() is None


def test_a_program_has_the_users_variables(tmp_path: Path) -> None:
    found = by_program(program(tmp_path, "echo $ONE"), 1, {"ONE": "alpha", "PATH": os.defpath})()
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
    ],
)
def test_a_program_that_goes_wrong(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "PROGRAM_SECONDS", 1.0)
    path = program(tmp_path, text)
    with pytest.raises(SettingError, match=re.escape(f"--host-discovery-script {path}") + ".*" + re.escape(message)):
        by_program(path, 1, os.environ)()


def test_a_program_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="cannot be run: No such file or directory"):
        by_program(str(tmp_path / "hosts.sh"), 1, os.environ)()


def test_what_cannot_be_read_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "LOOK_SECONDS", 0.01)
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=2\n")
    watch = Discovery(by_hostfile(str(hostfile)))
    watch.start()
    try:
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
