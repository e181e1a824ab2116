"""Elastic jobs as a whole: slots that come and go, and what is said, kept and left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import horovodish as hvd
from horovodish.elastic import ObjectState
from horovodish.errors import SettingError
from horovodish.launcher.elastic import slots as slots_of_a_job
from horovodish.launcher.elastic.events import Event, Events
from horovodish.launcher.hosts.allocation import Allocation, Host
from horovodish.launcher.options import LaunchOptions
from horovodish.runtime import basics
from support.elastic import Scene, run_elastic, skip_without_survivors
from support.orphans import parent
from support.processes import wait_until
from support.sources import ROOT


def hosts_of(slots: Path) -> list[str]:
    """The flags of a job whose hosts are what a file says."""
    program = slots.with_name("hosts.sh")
    program.write_text(f"#!/bin/sh\ncat {slots}\n")
    program.chmod(0o755)
    return ["--host-discovery-script", str(program)]


@pytest.mark.soak
def test_hosts_that_are_not_known_at_first(tmp_path: Path) -> None:
    """The program fails, then it names hosts, then it fails again: each time the job says what it does now."""
    slots, output = tmp_path / "slots", tmp_path / "said"
    flags = [*hosts_of(slots), "--min-np", "2", "--output-filename", str(tmp_path / "kept")]

    def name_hosts() -> None:
        wait_until(lambda: output.exists() and "waiting for slots" in output.read_text())
        replace(slots, "localhost:2\n")

    skip_without_survivors()
    naming = threading.Thread(target=name_hosts)
    naming.start()
    ended = run_elastic(lose_hosts, tmp_path, None, str(slots), flags=flags)
    naming.join()
    assert ended.status == 0, ended.said
    program = f"--host-discovery-script {tmp_path}/hosts.sh failed with exit status 1: "
    said = [line.removeprefix("horovodish: ") for line in ended.said.splitlines()]
    lines = [line for line in said if not line.endswith("processes are ready")]  # on a slow machine
    assert len(lines) == 5, ended.said
    assert lines[0].startswith(program)
    assert lines[0].endswith(". The job looks again every second; until then there are no hosts")
    assert lines[1] == "waiting for slots: there are 0 and --min-np is 2; the job ends after 600 s (--elastic-timeout)"
    assert lines[2] == lines[4] == "the hosts are known now: 2 slots on 1 host"
    assert lines[3].startswith(program)
    assert lines[3].endswith(". The job looks again every second; until then the hosts stay as they were")
    events = [json.loads(line) for line in (tmp_path / "kept/events.jsonl").read_text().splitlines()]
    assert [event["text"] for event in events] == lines
    kinds = [event["event"] for event in events]
    assert kinds == ["hosts unknown", "waiting", "hosts known", "hosts unknown", "hosts known"]


def lose_hosts(scene: Scene, slots: str) -> None:
    hvd.init()
    if hvd.rank() == 0:
        Path(slots).unlink()
        scene.await_word("until then the hosts stay as they were")
        replace(Path(slots), "localhost:2\n")
        scene.await_word("the hosts are known now", 2)


def train_while_slots_change(scene: Scene, slots: str, changes: list[tuple[int, int]], until_size: int) -> Any:
    """The number of slots changes after some steps of so many ranks. The last steps are of `until_size` ranks."""
    sizes: list[int] = []
    resets: list[int] = []

    @hvd.elastic.run
    def train(state: ObjectState) -> None:
        while state.after < 3:
            hvd.allreduce(np.ones(3), name="gradient")
            state.step += 1
            state.after = state.after + 1 if hvd.size() == until_size else 0
            sizes.append(hvd.size())
            for size, number in changes:
                if hvd.rank() == 0 and hvd.size() == size and sizes.count(size) == 5:
                    replace(Path(slots), f"localhost:{number}\n")
            state.sizes = sorted({*state.sizes, hvd.size()})
            time.sleep(0.02)  # a step takes a while
            state.commit()

    state = ObjectState(step=0, after=0, sizes=[])
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    train(state)
    own = {"start": scene.start, "own": len(sizes), "resets": resets}
    return {**own, "size": hvd.size(), "sizes": state.sizes, "step": state.step}


def replace(file: Path, text: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(text)
    new.rename(file)


def test_a_job_grows_and_shrinks(tmp_path: Path) -> None:
    slots = tmp_path / "slots"
    slots.write_text("localhost:2\n")
    flags = [*hosts_of(slots), "--min-np", "1", "--max-np", "3"]
    ended = run_elastic(train_while_slots_change, tmp_path, None, str(slots), [(2, 5), (3, 1)], 1, flags=flags)
    assert ended.status == 0, ended.said
    assert "starting new processes on 3 slots, while 2 train" in ended.said, "no more than --max-np"
    assert "there are fewer slots on localhost: 2 ranks will leave" in ended.said
    (result,) = ended.results
    assert (result["start"], result["size"], result["sizes"]) == (1, 1, [1, 2, 3])
    assert result["resets"] == [3, 1], "also in new processes"
    assert result["own"] < result["step"], "the new processes began where the earlier ones had been"


def lose_ranks(scene: Scene, slots: str) -> Any:
    """Process 1 dies, if slots are given with its own slot."""

    @hvd.elastic.run
    def train(state: ObjectState) -> None:
        while state.step < 8:
            if scene.me == 1 and state.step == 4 and scene.first_time("dies"):
                if slots:
                    replace(Path(slots), "localhost:1\n")
                    scene.await_word("there are fewer slots on localhost: 1 rank will leave")
                scene.die("dies")
            hvd.allreduce(np.ones(3), name="gradient")
            state.step += 1
            print(f"step {state.step} of start {scene.start}", flush=True)
            state.commit()

    state = ObjectState(step=0)
    train(state)
    return scene.start, hvd.size(), state.step


def test_a_job_waits_for_slots(tmp_path: Path) -> None:
    slots, said = tmp_path / "slots", tmp_path / "said"
    slots.write_text("localhost:2\n")

    def add_slots() -> None:
        wait_until(lambda: said.exists() and "waiting for slots: there are 1 and --min-np is 2" in said.read_text())
        replace(slots, "localhost:3\n")

    skip_without_survivors()
    adder = threading.Thread(target=add_slots)
    adder.start()
    flags = [*hosts_of(slots), "--min-np", "2", "--max-np", "2"]
    ended = run_elastic(lose_ranks, tmp_path, None, str(slots), flags=flags)
    adder.join()
    assert ended.status == 0, ended.said
    assert ended.fired == {"dies 1"}
    assert ended.results == [(1, 2, 8)] * 2, ended.said
    assert "ended after" in ended.said and "1 rank lost; continued 1 time in new processes" in ended.said


def test_a_job_that_finds_no_slots_ends(tmp_path: Path) -> None:
    slots = tmp_path / "slots"
    slots.write_text("localhost:2\n")
    flags = [*hosts_of(slots), "--min-np", "2", "--elastic-timeout", "2"]
    ended = run_elastic(lose_ranks, tmp_path, None, str(slots), flags=flags)
    assert ended.status == 128 + signal.SIGKILL, ended.said
    assert "there were too few slots for 2 s; --elastic-timeout waits longer" in ended.said
    assert not ended.results


def die_each_time(scene: Scene) -> None:
    with hvd.elastic.attempt(ObjectState()):
        hvd.allreduce(np.ones(3), name="together")
        if scene.me == 1:
            scene.die("again")
        hvd.allreduce(np.ones(3), name="gradient")


@pytest.mark.parametrize(("limit", "times"), [("0", "0 times"), ("1", "1 time")])
def test_a_job_is_reset_so_often_and_no_more(limit: str, times: str, tmp_path: Path) -> None:
    ended = run_elastic(die_each_time, tmp_path, None, flags=["--min-np", "2", "--reset-limit", limit])
    assert ended.said.count(", in new processes") == int(limit), ended.said
    assert ended.said.count("these processes end: 1 rank left, and --min-np is 2") == int(limit) + 1, ended.said
    assert ended.said.count("starting new processes on 2 slots") == int(limit), ended.said
    assert f"new processes were started {times}, and --reset-limit allows no more: the job ends" in ended.said
    assert ended.status == 128 + signal.SIGKILL, ended.said
    assert f"rank 1 on {socket.gethostname()} was killed by signal 9 (SIGKILL)" in ended.said.splitlines()[-2]


def test_what_is_kept_of_a_job(tmp_path: Path) -> None:
    """Output of earlier processes is not lost, each world has a timeline, and programs can read what happened."""
    kept = tmp_path / "kept"
    trace = tmp_path / "trace.json"
    flags = ["--min-np", "2", "--output-filename", str(kept), "--timeline-filename", str(trace)]
    ended = run_elastic(lose_ranks, tmp_path, 2, "", flags=flags)
    assert ended.status == 0, ended.said
    lines = (kept / "rank.0/stdout").read_text().splitlines()
    expected = [f"step {step} of start {int(step > 4)}" for step in range(1, 9)]
    assert lines in (expected, [line for line in expected if "step 4" not in line]), (
        "process 1 alone may have come to 4"
    )
    traces = {file.name for file in tmp_path.glob("trace*")}
    assert traces == {f"trace{number}.rank-{rank}.json" for number in ("", ".2") for rank in (0, 1)}
    events = [json.loads(line) for line in (kept / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["lost", "ending", "starting", "going on", "ended"]
    lost, _, _, on, end = events
    assert (lost["rank"], lost["left"]) == (1, 1) and "SIGKILL" in lost["why"]
    assert (on["ranks"], on["processes"]) == (2, "new") and 0 < on["seconds"] < 60
    assert (end["status"], end["lost"], end["paused"]) == (0, 1, on["seconds"])
    assert all(event["text"] in ended.said for event in events)


def die_in_shutdown(scene: Scene) -> int:
    """All have trained when a rank dies; what its script does after that is missing."""

    @hvd.elastic.run
    def train(state: ObjectState) -> None:
        hvd.allreduce(np.ones(3), name="gradient")
        state.step += 1

    state = ObjectState(step=0)
    train(state)
    if scene.me == 1:
        scene.dies_in("shutdown", basics, "_stop")
    hvd.shutdown()
    return state.step


def test_the_others_finish_when_a_rank_dies_in_shutdown(tmp_path: Path) -> None:
    ended = run_elastic(die_in_shutdown, tmp_path, 3, flags=["--min-np", "2"])
    assert ended.status == 128 + signal.SIGKILL, ended.said
    assert ended.fired == {"shutdown 1"}
    assert ended.results == [1, 1]


def leave_early(scene: Scene) -> None:
    @hvd.elastic.run
    def train(state: ObjectState) -> None:
        while True:
            hvd.allreduce(np.ones(3), name="gradient")
            if scene.me == 1 and state.step == 3:
                scene.fired("exit")
                os._exit(0)
            state.step += 1

    train(ObjectState(step=0))


def test_a_rank_that_leaves_in_the_middle_without_an_error_fails_the_job(tmp_path: Path) -> None:
    ended = run_elastic(leave_early, tmp_path, 3, flags=["--min-np", "1"])
    assert ended.status == 1, ended.said
    assert ended.fired == {"exit 1"}
    assert "rank 1 on" in ended.said and "ended with exit status 0 while other ranks needed it" in ended.said


def end_as_open_mpi_does(scene: Scene) -> int:
    """Without fault tolerance, Open MPI may end a rank like this because another one was lost."""

    @hvd.elastic.run
    def train(state: ObjectState) -> None:
        while state.step < 5:
            if scene.me == 1 and state.step == 3 and scene.first_time("breaks"):
                scene.fired("breaks")
                os._exit(14)
            hvd.allreduce(np.ones(3), name="gradient")
            state.step += 1
            state.commit()

    state = ObjectState(step=0)
    train(state)
    return state.step


def test_the_others_go_on_without_a_rank_that_mpi_has_ended(tmp_path: Path) -> None:
    ended = run_elastic(end_as_open_mpi_does, tmp_path, 3, flags=["--min-np", "2"])
    assert ended.status == 0, ended.said
    assert ended.fired == {"breaks 1"}
    assert ended.results == [5, 5]
    assert "failed with exit status 14; Open MPI does that when the connection to another rank breaks" in ended.said


def train_in_two_phases(scene: Scene) -> list[tuple[str, int]]:
    """With a state each. Process 1 dies in the second, and new processes come to the first one again."""
    done = []
    for phase in ("first", "second"):

        @hvd.elastic.run
        def train(state: ObjectState, phase: str = phase) -> None:
            while state.step < 5:
                if scene.me == 1 and (phase, state.step) == ("second", 3) and scene.first_time("dies"):
                    scene.die("dies")
                hvd.allreduce(np.ones(3), name="gradient")
                state.step += 1
                state.commit()

        state = ObjectState(step=0, of=phase)
        train(state)
        done.append((state.of, state.step))
    return done


def test_each_state_has_its_own_memory(tmp_path: Path) -> None:
    ended = run_elastic(train_in_two_phases, tmp_path, 2, flags=["--min-np", "2"])
    assert ended.status == 0, ended.said
    assert ended.fired == {"dies 1"}
    assert ended.results == [[("first", 5), ("second", 5)]] * 2, ended.said


def lose_the_launcher(scene: Scene) -> None:
    @hvd.elastic.run
    def train(state: ObjectState) -> None:
        while True:
            hvd.allreduce(np.ones(3), name="gradient")
            state.step += 1
            state.commit()
            if state.step == 5 and scene.me == 0:
                scene.fired("launcher")
                supervisor = os.getppid()
                os.kill(parent(parent(supervisor)), signal.SIGKILL)  # it has started mpirun

    train(ObjectState(step=0))


def test_without_its_launcher_a_job_ends_and_leaves_nothing(tmp_path: Path) -> None:
    ended = run_elastic(lose_the_launcher, tmp_path, 2, flags=["--min-np", "1"])
    assert ended.status == -signal.SIGKILL, ended.said
    assert ended.fired == {"launcher 0"}


def test_slots_cool_down_longer_each_time() -> None:
    options = LaunchOptions(("true",), {}, Allocation((Host("a", 2), Host("b", 2)), "--hosts"), np=4, min_np=1)
    slots = slots_of_a_job.Slots(options, None)

    def there(now: float) -> dict[str, int]:
        found = slots.options(now).allocation
        assert found is not None
        return {host.name: host.slots for host in found.hosts}

    assert there(0.0) == {"a": 2, "b": 2}
    slots.cool_down("a", 1, 0.0)
    assert there(0.1) == {"a": 2, "b": 2}, "at once the first time"
    now = 3.0
    for pause in (5, 10, 20, 40, 80, 160, 300, 300):
        slots.cool_down("a", 1, now)
        assert there(now + pause - 0.1) == {"a": 1, "b": 2}
        assert there(now + pause + 0.1) == {"a": 2, "b": 2}
        now += pause + 3
    slots.cool_down("b", 2, now)
    slots.cool_down("b", 2, now + 3)
    assert there(now + 4) == {"a": 2}
    later = now + slots_of_a_job.REMEMBERED_SECONDS
    slots.cool_down("a", 1, later)
    assert there(later + 0.1) == {"a": 2, "b": 2}, "a loss is forgotten"
    for _ in range(2):
        slots.cool_down("a", 1, later + 0.2)
    assert there(later + 0.3) == {"a": 2, "b": 2}, "a host that is lost is one loss, not one for each rank"


def test_the_guide_names_every_event() -> None:
    sources = [ROOT / "launcher" / name for name in ("elastic/job.py", "elastic/members.py", "elastic/events.py")]
    kinds = {kind for file in sources for kind in re.findall(r'(?:_tell|Event)\("([a-z ]+)"', file.read_text())}
    rows = re.findall(r"^\| (`[a-z ]+`(?:, `[a-z ]+`)?) \|", (ROOT / "docs/elastic.md").read_text(), re.MULTILINE)
    assert len(kinds) > 8
    assert {kind for row in rows for kind in re.findall("`(.*?)`", row)} - {"event"} == kinds


def test_events_that_cannot_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match=r"--output-filename: .*events\.jsonl cannot be written: File exists"):
        Events(str(tmp_path / "file"))


def test_nothing_is_said_of_a_job_to_which_nothing_has_happened(capsys: pytest.CaptureFixture[str]) -> None:
    events = Events(None)
    events.conclude(0)
    assert capsys.readouterr().err == ""
    events.add(Event("lost", "rank 1 was killed"))
    events.conclude(1)
    assert capsys.readouterr().err == "horovodish: rank 1 was killed\nhorovodish: ended after 0 s: 1 rank lost\n"
