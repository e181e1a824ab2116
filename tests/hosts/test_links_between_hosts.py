"""`horovodish check --hosts` measures the links between hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from horovodish.launcher.report.links import Link, in_words
from support.hosts import Hosts, hosts
from support.sources import ROOT


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Hosts]:
    with hosts(2) as made:
        yield made


def checked(on: Hosts, *flags: str) -> subprocess.CompletedProcess[str]:
    places = f"{on.address(0)},{on.address(1)}"
    command = [sys.executable, "-m", "horovodish.launcher", "check", "--hosts", places, "--launch-agent", str(on.agent)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([*on.inside(0), *command, *flags], env=environ, capture_output=True, text=True, timeout=120)


def test_links_both_ways(two_hosts: Hosts) -> None:
    ended = checked(two_hosts)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    names = [two_hosts.name(host) for host in (0, 1)]
    for of, to in ((0, 1), (1, 0)):
        line = rf"link +{names[of]} to {names[to]} at {two_hosts.address(to)} \(e0\): \d+ us, \d+\.\d\d Gbit/s"
        assert re.search(line, ended.stdout), ended.stdout


def test_slow_and_broken_links_are_named() -> None:
    lines, problems = in_words(
        [
            Link("a", "b", "e0", "10.0.0.2", "", 20.0, 9.4),
            Link("b", "a", "e0", "10.0.0.1", "No route to host"),
            Link("a", "b", "e1", "10.9.0.2", "timed out"),
            Link("a", "c", "e0", "10.0.0.3", "", 21.0, 9.3),
            Link("c", "a", "e0", "10.0.0.1", "", 21.0, 0.9),
        ]
    )
    assert lines == [
        "a to b at 10.0.0.2 (e0): 20 us, 9.40 Gbit/s",
        "b to a at 10.0.0.1 (e0): No route to host",
        "a to b at 10.9.0.2 (e1): timed out",
        "a to c at 10.0.0.3 (e0): 21 us, 9.30 Gbit/s",
        "c to a at 10.0.0.1 (e0): 21 us, 0.90 Gbit/s, slow",
    ]
    assert problems == ["b cannot reach a at 10.0.0.1 (e0): No route to host"]


def test_a_host_that_does_not_come_up(two_hosts: Hosts) -> None:
    ended = checked(two_hosts, "--hosts", f"{two_hosts.address(0)},nowhere")
    assert ended.returncode == 1
    assert "nowhere did not come up" in ended.stdout
