"""Hosts about which nothing is known: what a command that is run there tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovodish.launcher.mpirun.reach import BLOCKED, reasons_of_absence

# In place of ssh: `agent -p 22 HOST true`.
AGENT = """#!/bin/sh
case "$3 $4" in
"good true") echo hello;;
"bad true") echo first >&2; echo "no route" >&2; exit 3;;
"key true") echo "Host key verification failed." >&2; exit 255;;
"stuck true") exec sleep 300;;
*) exit 99;;
esac
"""


@pytest.fixture
def agent(tmp_path: Path) -> list[str]:
    program = tmp_path / "agent"
    program.write_text(AGENT)
    program.chmod(0o755)
    return [str(program), "-p", "22"]


def test_what_each_host_tells(agent: list[str]) -> None:
    hosts = ["good", "bad", "key", "silent"]
    reasons = reasons_of_absence(hosts, agent, {"PATH": "/bin"}, was_late=True, is_over=lambda: False)
    assert reasons["good"] == f"`agent good true` works, but MPI's daemon there did not connect back: {BLOCKED}"
    assert reasons["bad"] == "`agent bad true` fails with exit status 3: no route"
    assert reasons["key"].startswith("ssh does not know the host key")
    assert reasons["silent"] == "`agent silent true` fails with exit status 99"
    assert reasons_of_absence(["good"], agent, {}, was_late=False, is_over=lambda: False) == {"good": ""}


def test_a_host_that_does_not_answer(agent: list[str]) -> None:
    looks = iter([False, False, True])
    reasons = reasons_of_absence(["stuck"], agent, {"PATH": "/bin"}, was_late=True, is_over=lambda: next(looks))
    assert reasons == {"stuck": "`agent stuck true` did not end within 12 s"}


def test_an_agent_that_is_gone(agent: list[str]) -> None:
    Path(agent[0]).unlink()
    assert reasons_of_absence(["good"], agent, {}, was_late=True, is_over=lambda: False) == {}
