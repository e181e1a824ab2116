"""The line about what the launcher waits for: when it comes, and that it goes away on a terminal alone."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horovodish.launcher.job import progress
from horovodish.launcher.job.output import say
from horovodish.launcher.job.progress import SILENT_SECONDS, Progress


def stderr_is(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> io.StringIO:
    """Puts a stream in place of stderr. pytest does so, too, before each test."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


@pytest.fixture
def pass_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets the clock go on."""
    now = [time.monotonic()]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def pass_by(seconds: float) -> None:
        now[0] += seconds

    return pass_by


def test_a_terminal_has_a_line_that_changes_and_goes_away(
    monkeypatch: pytest.MonkeyPatch, pass_by: Callable[[float], None]
) -> None:
    stderr = stderr_is(io.StringIO(), monkeypatch, terminal=True)
    line = Progress()
    line.show("0 of 2")
    pass_by(SILENT_SECONDS - 0.1)
    line.show("1 of 2")
    assert stderr.getvalue() == ""
    pass_by(0.2)
    line.show("1 of 2")
    line.show("1 of 2")
    line.show("2 of 2")
    said = "\r\x1b[Khorovodish: 1 of 2\r\r\x1b[Khorovodish: 2 of 2\r"
    assert stderr.getvalue() == said
    line.show("")
    line.show("")
    assert stderr.getvalue() == said + "\r\x1b[K"


def test_a_message_takes_the_place_of_the_line(
    monkeypatch: pytest.MonkeyPatch, pass_by: Callable[[float], None]
) -> None:
    stderr = stderr_is(io.StringIO(), monkeypatch, terminal=True)
    line = Progress()
    line.show("0 of 2")
    pass_by(SILENT_SECONDS)
    line.show("0 of 2")
    say("lost")
    assert stderr.getvalue() == "\r\x1b[Khorovodish: 0 of 2\r\r\x1b[Khorovodish: lost\n"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_elsewhere_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, pass_by: Callable[[float], None], is_terminal: bool
) -> None:
    """Also on a terminal to which others write."""
    stderr = stderr_is(io.StringIO(), monkeypatch, terminal=is_terminal)
    line = Progress()
    for text in ("0 of 2", "1 of 2", "2 of 2", ""):
        line.show(text, draws=not is_terminal)
        pass_by(SILENT_SECONDS)
    assert stderr.getvalue() == "horovodish: 1 of 2\n"
    for _ in range(2):
        line.show("0 of 2", draws=False, says=False)
        pass_by(SILENT_SECONDS)
    assert stderr.getvalue() == "horovodish: 1 of 2\n"


@pytest.mark.soak
def test_a_host_that_does_not_come_up_is_named_meanwhile(launch: Callable[..., Any], tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    agent.write_text("#!/bin/sh\nexec sleep 100\n")
    agent.chmod(0o755)
    job = launch("run", "-H", "far:2", "--launch-agent", str(agent), "--start-timeout", "5", "true")
    assert job.finish() == 1
    assert job.stderr.lines[:2] == [
        "horovodish: waiting for far: 0 of 2 ranks can start",
        "horovodish: trying to reach far",
    ]
