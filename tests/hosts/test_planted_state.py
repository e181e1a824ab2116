"""A second user of another host has made the folder where an elastic job would keep its state there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import horovodish as hvd
from horovodish.elastic import ObjectState
from support.elastic import Scene, run_elastic
from support.hosts import Hosts, hosts
from support.other_user import NAME, skip_without_another_user, uid

# As the agent of `hosts`. The hosts are one machine, so the second one gets memory of its own, where somebody has been.
AGENT = """#!/bin/sh
host={prefix}-${{1##*.}}; shift
plant="mount -t tmpfs -o mode=1777 tmpfs /dev/shm && umask 0 &&
  setpriv --reuid {user} --regid {user} --clear-groups mkdir -p $HOROVODISH_STATE_FOLDER/$host"
exec ip netns exec $host unshare --uts --mount sh -c "hostname $host; $plant; exec sh -c \\"\\$0\\"" "$*"
"""


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Hosts]:
    skip_without_another_user()
    with hosts(2) as made:
        yield made


@pytest.fixture
def agent(two_hosts: Hosts, tmp_path: Path) -> str:
    program = tmp_path / "agent"
    program.write_text(AGENT.format(prefix=two_hosts.prefix, user=uid()))
    program.chmod(0o755)
    return str(program)


def train_until_refused(scene: Scene, slots: str, all_hosts: str) -> Any:
    """Adds the second host, and ends when the job has said that it goes on without it."""
    Path(slots).write_text(all_hosts)

    @hvd.elastic.run
    def train(state: ObjectState) -> None:
        hvd.allreduce(np.ones(3), name="gradient")
        state.commit()
        scene.await_word("the job continues without them")
        state.step += 1

    state = ObjectState(step=0)
    train(state)
    return scene.start, hvd.size(), state.step


def refusal(on: Hosts) -> tuple[str, str]:
    """How the line begins and ends that says why the host cannot be used."""
    end = f" belongs to user {uid()}, and only a private folder of user 0 is used there: have it removed"
    return "horovodish: /dev/shm/hvd-state-", f"{end} (on {on.name(1)})"


def test_a_job_does_not_begin_there(two_hosts: Hosts, agent: str, tmp_path: Path) -> None:
    places = ",".join(f"{two_hosts.address(host)}:1" for host in range(2))
    flags = ["--hosts", places, "--min-np", "2", "--launch-agent", agent]
    ended = run_elastic(train_until_refused, tmp_path, None, "", "", flags=flags, inside=two_hosts.inside(0))
    begin, end = refusal(two_hosts)
    last = ended.said.splitlines()[-1]
    assert (ended.status, last.startswith(begin), last.endswith(end)) == (126, True, True), (NAME, ended.said)


def test_a_job_that_has_begun_goes_on_without_the_host(two_hosts: Hosts, agent: str, tmp_path: Path) -> None:
    slots, program = tmp_path / "slots", tmp_path / "hosts.sh"
    places = [f"{two_hosts.address(host)}:1\n" for host in range(2)]
    slots.write_text(places[0])
    program.write_text(f"#!/bin/sh\ncat {slots}\n")
    program.chmod(0o755)
    flags = ["--host-discovery-script", str(program), "--min-np", "1", "--launch-agent", agent]
    arguments = (str(slots), "".join(places))
    ended = run_elastic(train_until_refused, tmp_path, None, *arguments, flags=flags, inside=two_hosts.inside(0))
    begin, end = refusal(two_hosts)
    lines = ended.said.splitlines()
    assert any(line.startswith(begin) and line.endswith(end) for line in lines), ended.said
    assert (ended.status, ended.results) == (0, [(0, 1, 1)]), ended.said
