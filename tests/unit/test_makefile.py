"""The tests that each target of the Makefile chooses."""

from __future__ import annotations

import os
import shlex
import subprocess

import pytest

from support.sources import ROOT


@pytest.mark.parametrize(
    ("target", "chosen"),
    [
        ("test", "not soak"),
        ("test-quick", "not soak and not slow"),
        ("test-python-3.11", "not soak"),
        ("test-mpich", "not soak"),
        ("test-wheel", "not soak"),
        ("soak", "soak"),
    ],
)
def test_only_soak_runs_the_tests_that_take_long(target: str, chosen: str) -> None:
    # Without the variables of a make that has started the tests.
    dry_run, environ = ["make", "--dry-run", target], {"PATH": os.environ["PATH"]}
    done = subprocess.run(dry_run, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    (command,) = [line for line in done.stdout.splitlines() if "pytest --numprocesses" in line]
    words = shlex.split(command)
    assert [words[at + 1] for at, word in enumerate(words) if word == "-m"][-1] == chosen, command
