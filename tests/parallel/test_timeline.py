"""The timeline: what it shows of every rank, when it begins and ends, and what remains of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import horovodish as hvd
from horovodish.reports.figures import figures_of
from horovodish.reports.records import Track, read
from horovodish.runtime import basics
from support.model import PLANES
from support.on_ranks import on_ranks
from support.processes import wait_until
from support.ranks import run_ranks, run_ranks_to_their_ends
from support.threads import thread_names
from support.traces import Slice, is_complete, marks_of, steps_of, tracks_of, waits_of

STEPS = 4
LARGE = 300_000  # elements: several chunks
LATE_SECONDS = 0.3
CLOCKS_AGREE_WITHIN_NS = 20_000

CALLS: dict[str, Callable[[], Any]] = {
    "small": lambda: hvd.allreduce(np.ones(10), name="small"),
    "large": lambda: hvd.allreduce(np.ones(LARGE), name="large"),
    "rows": lambda: hvd.allgather(np.ones((hvd.rank() + 1, 3)), name="rows"),
    "from the root": lambda: hvd.broadcast(np.ones(LARGE), 0, name="from the root"),
    "exchanged": lambda: hvd.alltoall(np.ones(12), name="exchanged"),
    "shared out": lambda: hvd.reducescatter(np.ones(LARGE), name="shared out"),
    "group": lambda: hvd.grouped_allreduce([np.ones(5), np.ones(6), np.ones(7)], name="group"),
    "allreduce.noname": lambda: hvd.allreduce(np.ones(8)),
    "barrier.noname": hvd.barrier,
}
KINDS = {
    "rows": "allgather",
    "from the root": "broadcast",
    "exchanged": "alltoall",
    "shared out": "reducescatter",
    "barrier.noname": "barrier",
}


def record_everything(path: str, mark_cycles: bool) -> None:
    hvd.init()
    hvd.start_timeline(path, mark_cycles=mark_cycles)
    for _ in range(STEPS):
        for call in CALLS.values():
            call()
    handles = [hvd.allreduce_async(np.ones(9)) for _ in range(3)]
    for handle in handles:
        handle.wait()
    hvd.stop_timeline()
    wait_until(no_trace_is_open)


def no_trace_is_open() -> bool:
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd_is_open(fd)]
    return not any("trace" in link for link in links) and "horovodish-time" not in thread_names().values()


def fd_is_open(descriptor: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("np", [1, 3])
def test_it_shows_every_operation_of_every_rank(np: int, plane: str, tmp_path: Path) -> None:
    run_ranks(record_everything, np, args=(str(tmp_path / "trace.json"), True), env={"HOROVODISH_PLANE": plane})
    paths = [tmp_path / f"trace.rank-{rank}.json" for rank in range(np)]
    assert sorted(tmp_path.iterdir()) == paths
    ranks = [tracks_of(path, rank) for rank, path in enumerate(paths)]
    moved = {"auto": {"pack", "reduce"}, "mpi_ring": {"pack", "exchange"}}[plane] if np > 1 else {"reduce"}
    for path, tracks in zip(paths, ranks, strict=True):
        assert is_complete(path)
        assert set(tracks) - {"allreduce.noname (2)", "allreduce.noname (3)"} == set(CALLS)
        for name in CALLS:
            assert {one.name for one in tracks[name]} == {KINDS.get(name, "allreduce")}
            assert all(one.phases()[:2] == ["negotiate", "queue"] for one in tracks[name])
            assert len(tracks[name]) == STEPS or name == "allreduce.noname"
        unnamed = sum(len(slices) for name, slices in tracks.items() if name.startswith("allreduce.noname"))
        assert unnamed == STEPS + 3
        assert set(tracks["large"][0].phases()[2:]) - {"unpack"} == moved
        assert tracks["large"][0].arguments == {"bytes": LARGE * 8, "tensors": 1}
        assert tracks["group"][0].arguments == {
            "bytes": 18 * 8,
            "tensors": 3,
            "first": "group[0]",
            "last": "group[2]",
        }
        assert {mark["name"] for mark in marks_of(path)} == {"cycle"}
    nothing_is_decided_before_every_rank_has_submitted_it(ranks)


def nothing_is_decided_before_every_rank_has_submitted_it(ranks: list[dict[str, list[Slice]]]) -> None:
    """As long as the clocks of the traces agree."""
    for name in set(CALLS) - {"allreduce.noname"}:
        for together in zip(*(tracks[name] for tracks in ranks), strict=True):
            decided = min(one.within[0].end for one in together)
            assert max(one.begin for one in together) < decided + CLOCKS_AGREE_WITHIN_NS


def start_and_stop(folder: str) -> None:
    with pytest.raises(hvd.NotInitializedError, match=r"init\(\)"):
        hvd.start_timeline("trace.json")
    with pytest.raises(ValueError, match=r"init\(\)"):
        hvd.stop_timeline()
    hvd.init()
    with pytest.raises(ValueError, match="no timeline is being recorded"):
        hvd.stop_timeline()
    for name in ("first", "second", "second"):
        hvd.start_timeline(Path(folder, name))
        with pytest.raises(ValueError, match=rf"/{name}\.rank-{hvd.rank()} is being recorded; call stop_timeline\(\)"):
            hvd.start_timeline(Path(folder, "another"))
        hvd.allreduce(np.ones(3), name=name)
        hvd.stop_timeline()
        with pytest.raises(ValueError, match="no timeline is being recorded"):
            hvd.stop_timeline()
        hvd.allreduce(np.ones(3), name="between")
    hvd.start_timeline(Path(folder, "third"))
    if hvd.rank() == 1:
        wait_until(Path(folder, "rank 0 is done").exists)
        hvd.allreduce_async(np.ones(3), name="pending")
    else:
        Path(folder, "rank 0 is done").touch()
    hvd.shutdown()
    wait_until(no_trace_is_open)
    with pytest.raises(hvd.NotInitializedError):
        hvd.stop_timeline()


@pytest.mark.parametrize("np", [1, 2])
def test_it_starts_and_stops_while_the_job_runs(np: int, tmp_path: Path) -> None:
    run_ranks(start_and_stop, np, args=(str(tmp_path),))
    for rank in range(np):
        for name in ("first", "second"):
            tracks = tracks_of(tmp_path / f"{name}.rank-{rank}", rank)
            assert {track: len(slices) for track, slices in tracks.items()} == {name: 1}
        third = tmp_path / f"third.rank-{rank}"
        assert is_complete(third)
        ended = tracks_of(third, rank).get("pending", [])
        assert [one.arguments.get("failed") for one in ended] == [True] * (rank == 1)
    assert len(list(tmp_path.iterdir())) == 3 * np + 1


@on_ranks(1, 2)
def test_a_file_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such folder"):
        hvd.start_timeline(tmp_path / "no such folder" / "trace")
    for folder in (str(tmp_path), tmp_path, f"{tmp_path}/", f"{tmp_path}/missing/", f"{tmp_path}/..", "", ".", "/"):
        with pytest.raises(IsADirectoryError, match=f"rank {hvd.rank()}: that is a folder; name a file in it, such as"):
            hvd.start_timeline(folder)
    hvd.start_timeline(tmp_path / "trace")


@on_ranks(1)
def test_a_start_that_fails_leaves_no_file_open(tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError)):
        hvd.start_timeline(tmp_path / "trace.json", mark_cycles=np.ones(2))
    assert no_trace_is_open()


def join_unevenly(path: str) -> None:
    hvd.init()
    hvd.start_timeline(path)
    for _ in range(2 + hvd.rank()):
        hvd.allreduce(np.ones(3), name="gradient")
    hvd.join()


def test_a_rank_that_has_joined_still_takes_part(tmp_path: Path) -> None:
    run_ranks(join_unevenly, 2, args=(str(tmp_path / "trace.json"),))
    for rank in range(2):
        tracks = tracks_of(tmp_path / f"trace.rank-{rank}.json", rank)
        assert len(tracks["gradient"]) == 3
        assert [one.name for one in tracks["join.noname"]] == ["join", "allgather"]


def use_a_process_set(path: str) -> None:
    hvd.init()
    ends = hvd.add_process_set([0, 2])
    hvd.start_timeline(path)
    hvd.allreduce(np.ones(3), name="x")
    if ends.included():
        hvd.allreduce(np.ones(3), name="x", process_set=ends)


def test_process_sets_have_tracks_of_their_own(tmp_path: Path) -> None:
    run_ranks(use_a_process_set, 3, args=(str(tmp_path / "trace.json"),))
    shown = [set(tracks_of(tmp_path / f"trace.rank-{rank}.json", rank)) for rank in range(3)]
    assert shown == [{"x", "set 1: x"}, {"x"}, {"x", "set 1: x"}]


def die_while_recording(path: str) -> None:
    hvd.init()
    hvd.start_timeline(path)
    own = Path(path).with_name(f"trace.rank-{hvd.rank()}.json")
    for _ in range(20):
        hvd.allreduce(np.ones(3), name="before")
    wait_until(lambda: own.read_text().count('"ph":"E"') >= 20)
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(hvd.RankLostError):
        reduce_for_ever()


def reduce_for_ever() -> None:
    while True:
        hvd.allreduce(np.ones(3), name="after")


def test_the_trace_of_a_rank_that_was_killed_can_be_read(tmp_path: Path) -> None:
    outcomes = run_ranks_to_their_ends(die_while_recording, 2, args=(str(tmp_path / "trace.json"),))
    assert [outcome.ended for outcome in outcomes] == ["returned", "died"], outcomes
    survivor, victim = (tracks_of(tmp_path / f"trace.rank-{rank}.json", rank) for rank in range(2))
    assert len(survivor["before"]) == len(victim["before"]) == 20
    assert survivor["after"][-1].arguments["failed"]
    assert not is_complete(tmp_path / "trace.rank-1.json")


def use_the_setting() -> None:
    hvd.init()
    with pytest.raises(ValueError, match="is being recorded"):
        hvd.start_timeline("another.json")
    hvd.allreduce(np.ones(3), name="recorded")


def test_the_setting_records_from_the_start(tmp_path: Path) -> None:
    env = {"HOROVODISH_TIMELINE_FILENAME": str(tmp_path / "Trace.json"), "HOROVODISH_TIMELINE_MARK_CYCLES": "1"}
    run_ranks(use_the_setting, 2, env=env)
    for rank in range(2):
        path = tmp_path / f"Trace.rank-{rank}.json"
        assert is_complete(path)
        assert set(tracks_of(path, rank)) == {"recorded"}
        assert marks_of(path)


def name_files_by_rank(folder: str) -> None:
    from mpi4py import MPI

    own = MPI.COMM_WORLD.Get_rank()
    with pytest.MonkeyPatch.context() as environment:
        if own != 1:
            environment.setenv("HOROVODISH_TIMELINE_FILENAME", f"{folder}/{'ab'[own // 2]}.json")
        hvd.init()
        hvd.allreduce(np.ones(3), name="recorded")
        hvd.shutdown()


def test_ranks_may_name_different_files_or_none(tmp_path: Path) -> None:
    run_ranks(name_files_by_rank, 3, args=(str(tmp_path),))
    shown = {path.name: set(tracks_of(path, int(path.stem[-1]))) for path in tmp_path.iterdir()}
    assert shown == {"a.rank-0.json": {"recorded"}, "b.rank-2.json": {"recorded"}}


def start_again() -> None:
    """Rank 1 is outside the first world, so that it has started less often."""
    from mpi4py import MPI

    own = MPI.COMM_WORLD.Get_rank()
    for world, name in (([0, 2], "first"), ([0, 1, 2], "second"), ([0, 1, 2], "third")):
        if own in world:
            hvd.init(world)
            hvd.allreduce(np.ones(3), name=name)
            hvd.shutdown()


def test_every_start_has_traces_of_its_own_with_one_number_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(start_again, 3, env={"HOROVODISH_TIMELINE_FILENAME": str(tmp_path / "trace.json")})
    shown = {path.name: set(tracks_of(path, int(path.stem[-1]))) for path in tmp_path.iterdir()}
    assert shown == {
        **{f"trace.rank-{rank}.json": {"first"} for rank in range(2)},
        **{f"trace.2.rank-{rank}.json": {"second"} for rank in range(3)},
        **{f"trace.3.rank-{rank}.json": {"third"} for rank in range(3)},
    }


def lose_a_rank_and_go_on(path: str) -> None:
    hvd.init()
    own = Path(path).with_name(f"trace.rank-{hvd.rank()}.json")
    hvd.allreduce(np.ones(3), name="before")
    if hvd.rank() == 1:
        wait_until(lambda: '"ph":"E"' in own.read_text())
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(hvd.RankLostError):
        reduce_for_ever()
    hvd.shutdown()
    hvd.init(hvd.surviving_communicator())
    hvd.allreduce(np.ones(3), name="recovered")


def test_survivors_keep_the_trace_of_the_rank_that_died(tmp_path: Path) -> None:
    path = str(tmp_path / "trace.json")
    env = {"HOROVODISH_TIMELINE_FILENAME": path}
    outcomes = run_ranks_to_their_ends(lose_a_rank_and_go_on, 3, args=(path,), env=env)
    assert [outcome.ended for outcome in outcomes] == ["returned", "died", "returned"], outcomes
    for rank in range(3):
        assert "before" in tracks_of(tmp_path / f"trace.rank-{rank}.json", rank)
    for rank in range(2):
        assert set(tracks_of(tmp_path / f"trace.2.rank-{rank}.json", rank)) == {"recovered"}


ALONE = "import numpy, horovodish as hvd; hvd.init(); hvd.allreduce(numpy.ones(3), name='x'); {end}"


@pytest.mark.parametrize("end", ["pass", "raise ValueError", "raise SystemExit(3)"])
def test_the_end_of_the_script_ends_it(end: str, tmp_path: Path) -> None:
    env = {**os.environ, "HOROVODISH_TIMELINE_FILENAME": str(tmp_path / "trace.json")}
    subprocess.run([sys.executable, "-c", ALONE.format(end=end)], env=env, capture_output=True, timeout=300)
    assert is_complete(tmp_path / "trace.rank-0.json")
    assert set(tracks_of(tmp_path / "trace.rank-0.json", 0)) == {"x"}


@pytest.mark.parametrize(
    ("filename", "problem"), [("missing/trace.json", "No such file or directory"), ("", "that is a folder")]
)
def test_a_setting_that_cannot_be_followed_says_so(filename: str, problem: str, tmp_path: Path) -> None:
    env = {**os.environ, "HOROVODISH_TIMELINE_FILENAME": str(tmp_path / filename)}
    done = subprocess.run([sys.executable, "-c", ALONE.format(end="pass")], env=env, capture_output=True, timeout=300)
    said = done.stderr.decode().splitlines()[-1]
    assert said.startswith("horovodish.errors.SettingError: HOROVODISH_TIMELINE_FILENAME=")
    assert "on rank 0" in said and problem in said


def test_a_full_disk_ends_the_timeline_with_one_warning_and_not_the_job(tmp_path: Path) -> None:
    (tmp_path / "trace.rank-0.json").symlink_to("/dev/full")
    code = "import numpy, time, horovodish as hvd; hvd.init(); hvd.start_timeline('trace.json')\n"
    code += "for _ in range(3): hvd.allreduce(numpy.ones(3)); time.sleep(0.1)\n"
    code += "hvd.stop_timeline()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    said = "horovodish: warning: the timeline ends here, because it cannot be written: No space left on device\n"
    assert done.stderr == said


def record_steps(path: str) -> None:
    torch = pytest.importorskip("torch")
    import horovodish.torch as hvd

    hvd.init()
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("weights", parameter)])
    hvd.mark("not recorded")
    hvd.start_timeline(path)
    for step in range(STEPS):
        if step % 2 == 0:
            hvd.mark(f'epoch "{step // 2}"\n')
        optimizer.zero_grad()
        parameter.sum().backward()
        optimizer.step()
    hvd.mark("no text: \ud800")
    for _ in range(10_000):
        hvd.mark("too many")
    hvd.stop_timeline()


def test_it_shows_steps_and_marks_of_the_script(tmp_path: Path) -> None:
    run_ranks(record_steps, 2, args=(str(tmp_path / "trace.json"),))
    for rank in range(2):
        path = tmp_path / f"trace.rank-{rank}.json"
        steps, marks = steps_of(path, rank), marks_of(path)
        assert len({one.name for one in steps}) == STEPS
        gradients = tracks_of(path, rank)["gradients of optimizer 1, bucket 0"]
        for step, gradient in zip(steps, gradients, strict=True):
            assert step.begin <= gradient.begin < gradient.end <= step.end
        epochs = [round(mark["ts"] * 1000) for mark in marks if mark["name"].startswith("epoch")]
        assert [mark["name"] for mark in marks[:2]] == ['epoch "0"\n', 'epoch "1"\n']
        assert epochs[0] <= steps[0].begin and gradients[1].end <= epochs[1] <= steps[2].begin
        assert marks[2]["name"] == "no text: \\ud800"
        dropped = [mark["args"]["total"] for mark in marks if mark["name"] == "records dropped"]
        assert len(marks) - 3 - len(dropped) + dropped[-1] == 10_000


def record_epochs_with_a_join(path: str) -> None:
    hvd.init()
    hvd.start_timeline(path)
    for _ in range(2):
        for _ in range(3 if hvd.rank() == 1 else 5):
            basics.engine().begin_step()
            hvd.allreduce(np.ones(3), name="gradient")
        hvd.join()
    hvd.stop_timeline()


def test_after_a_join_steps_have_the_same_numbers_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(record_epochs_with_a_join, 2, args=(str(tmp_path / "x.records"),))
    first, second = ranks = [read(tmp_path / f"x.rank-{rank}.records") for rank in range(2)]
    assert first.step_numbers.tolist() == list(range(1, 11))
    assert second.step_numbers.tolist() == [1, 2, 3, 6, 7, 8]
    assert figures_of(ranks).steps.tolist() == [1, 2, 6, 7]


def record_what_a_report_needs(path: str) -> None:
    hvd.init()
    hvd.start_timeline(path)
    for step in range(STEPS):
        basics.engine().begin_step()
        hvd.mark(f"epoch {step}")
        if hvd.rank() == 1:
            time.sleep(LATE_SECONDS)
        hvd.allreduce(np.ones((LARGE, 2), np.float32), name="large")
        hvd.grouped_allreduce([np.ones(5), np.ones(6)], name="group")
    with pytest.raises(hvd.MismatchError):
        hvd.allreduce(np.ones(3 + hvd.rank()), name="unequal")
    hvd.stop_timeline()


@pytest.mark.parametrize("plane", PLANES)
def test_records_say_what_the_trace_says(tmp_path: Path, plane: str) -> None:
    run_ranks(record_what_a_report_needs, 2, args=(str(tmp_path / "x.records"),), env={"HOROVODISH_PLANE": plane})
    first, second = ranks = [read(tmp_path / f"x.rank-{rank}.records") for rank in range(2)]
    for rank, records in enumerate(ranks):
        assert (records.rank, records.about["hosts"], records.is_cut, records.dropped) == (rank, [[0, 1]], False, 0)
        named = {track.name: track for track in records.tracks.values()}
        assert named["large"] == Track("large", "allreduce", LARGE * 2 * 4, "float32")
        assert named["group"] == Track("group", "allreduce", 11 * 8, "float64", tensors=2)
        marks = [text for _, text in records.marks]
        assert marks[:STEPS] == [f"epoch {step}" for step in range(STEPS)] and "'unequal'" in marks[STEPS]
        assert records.failed.tolist() == [False] * 2 * STEPS + [True] and not records.in_program.any()
        assert (records.submitted <= records.decided).all() and (records.decided <= records.settled).all()
        assert records.step_numbers.tolist() == [1, 2, 3, 4]
    waited = (first.wait_ends - first.wait_begins).sum() / 1e9
    assert waited >= STEPS * LATE_SECONDS > (second.wait_ends - second.wait_begins).sum() / 1e9
    known = figures_of(ranks)
    assert (known.late[0] > LATE_SECONDS / 2).all() and (known.late[1] < LATE_SECONDS / 2).all()
    done = merge(*(tmp_path / f"x.rank-{rank}.records" for rank in range(2)))
    names = [event["name"] for event in json.loads(done.stdout)]
    assert names.count("allreduce") == 2 * (2 * STEPS + 1) and names.count("epoch 1") == 2


def test_the_trace_shows_how_long_the_script_waits(tmp_path: Path) -> None:
    run_ranks(record_what_a_report_needs, 2, args=(str(tmp_path / "trace.json"),))
    first, second = (waits_of(tmp_path / f"trace.rank-{rank}.json", rank) for rank in range(2))
    assert sum(one.end - one.begin for one in first) >= STEPS * LATE_SECONDS * 1e9
    assert sum(one.end - one.begin for one in second) < STEPS * LATE_SECONDS * 1e9


def merge(*paths: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "horovodish.launcher", "merge-traces", *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def record_steps_without_late_ranks(path: str) -> None:
    torch = pytest.importorskip("torch")
    import horovodish.torch as hvd

    hvd.init()
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), wait_for=2)
    hvd.start_timeline(path)
    for _ in range(STEPS):
        optimizer.zero_grad()
        parameter.sum().backward()
        optimizer.step()
    hvd.stop_timeline()


def test_it_shows_steps_that_go_on_without_late_ranks(tmp_path: Path) -> None:
    run_ranks(record_steps_without_late_ranks, 2, args=(str(tmp_path / "trace.json"),))
    for rank in range(2):
        steps = steps_of(tmp_path / f"trace.rank-{rank}.json", rank)
        assert len({one.name for one in steps}) == STEPS


def record_names_that_are_new_each_time(path: str) -> None:
    hvd.init()
    hvd.start_timeline(path)
    for number in range(6000):
        hvd.allreduce(np.ones(1), name=f"step {number}")
    hvd.stop_timeline()


def test_names_that_are_new_each_time_do_not_grow_for_ever(tmp_path: Path) -> None:
    run_ranks(record_names_that_are_new_each_time, 1, args=(str(tmp_path / "trace.json"),))
    tracks = tracks_of(tmp_path / "trace.rank-0.json", 0)
    assert 4000 < len(tracks) < 4200
    assert len(tracks["step 0"]) == 1
    assert sum(map(len, tracks.values())) > 5000  # some records may be dropped
    assert len(tracks["other names"]) > 1000
