"""What an elastic job continues from: one commit on all ranks, wherever the script writes to its state."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import horovodish as hvd
from horovodish.elastic import ObjectState, membership
from support.elastic import COPIES_VARIABLE, Ended, Scene, Weight, run_elastic
from support.midway import LargeReduction
from support.processes import wait_until

STEPS = 8


def reduce_in_place(scene: Scene) -> Any:
    """Two collectives write into the state. Process 2 dies between them."""

    @hvd.elastic.run
    def train(state: ObjectState) -> None:
        entered.append([state.step, state.a[0], state.b[0]])
        while state.step < STEPS:
            hvd.allreduce_(state.a, op=hvd.Max, name="a")
            if scene.me == 2 and state.step == 2 and scene.first_time("between"):
                scene.die("between")
            hvd.allreduce_(state.b, op=hvd.Max, name="b")
            state.a += 1
            state.b += 1
            state.step += 1
            state.commit()

    entered: list[list[float]] = []
    state = ObjectState(step=0, a=np.zeros(4), b=np.zeros(4))
    train(state)
    return [entered, state.step, state.a.tolist(), state.b.tolist()]


def average_now_and_then(scene: Scene) -> Any:
    """Local SGD: ranks write to parameters of their own. Process 1 dies in the middle of an average."""

    @hvd.elastic.run
    def train(state: ObjectState) -> None:
        entered.append([state.step, state.a[0], state.b[0]])
        while state.step < STEPS:
            state.a += 1 + hvd.rank() - np.arange(hvd.size()).mean()
            if state.step % 2:
                while state.step == 3 and hvd.size() == 3:
                    reduction = LargeReduction()
                    if scene.me == 1 and reduction.catch():
                        scene.die("between")
                    reduction.finish()
                hvd.allreduce_(state.a, op=hvd.Average, name="a")
            state.b += 1
            state.step += 1
            if state.step % 2 == 0:  # in between, ranks differ
                state.commit()

    entered: list[list[float]] = []
    state = ObjectState(step=0, a=np.zeros(4), b=np.zeros(4))
    train(state)
    return [entered, state.step, state.a.tolist(), state.b.tolist()]


@pytest.mark.parametrize("copies", ["always", "never"])
@pytest.mark.parametrize("train", [reduce_in_place, average_now_and_then])
def test_what_was_written_after_the_commit_is_undone(train: Any, copies: str, tmp_path: Path) -> None:
    ended = run_elastic(train, tmp_path, 3, flags=["--min-np", "2"], env={COPIES_VARIABLE: copies})
    assert ended.status == 0, ended.said
    assert len(ended.fired) == 1
    assert len(ended.results) == 2
    for entered, *at_end in ended.results:
        assert entered == [[0, 0, 0], [2, 2, 2]], "the last commit, on all ranks"
        assert at_end == [STEPS, [STEPS] * 4, [STEPS] * 4]
    assert "in the same processes, from commit " in ended.said


def train_in_phases(scene: Scene, commits: bool) -> Any:
    """A state for each phase. When process 2 dies, process 0 has come to the second phase and process 1 has not."""
    first, second = ObjectState(x=0), ObjectState(y=100)
    while True:
        with hvd.elastic.attempt(first):
            if first.x == 3:
                break
            hvd.allreduce(np.ones(1), name="first")
            if first.x == 2 and scene.me == 2:
                scene.die("at the end")
            if first.x == 2 and scene.me == 1 and scene.first_time("waits"):
                scene.await_end_of(2)
                hvd.allreduce(np.ones(1), name="only this rank comes to it")
            first.x += 1
            if commits:
                first.commit()
    while True:
        with hvd.elastic.attempt(second):
            if second.y == 103:
                break
            hvd.allreduce(np.ones(1), name="second")
            second.y += 1
            if commits:
                second.commit()
    return [vars_of(first), vars_of(second)]


def vars_of(state: ObjectState) -> dict[str, Any]:
    return {name: value for name, value in vars(state).items() if not name.startswith("_")}


@pytest.mark.parametrize("commits", [False, True])
@pytest.mark.parametrize("copies", ["always", "never", ""])
def test_states_of_two_phases_are_not_mixed_up(copies: str, commits: bool, tmp_path: Path) -> None:
    ended = run_elastic(train_in_phases, tmp_path, 3, commits, flags=["--min-np", "2"], env={COPIES_VARIABLE: copies})
    assert ended.status == 0, ended.said
    assert len(ended.results) >= 2
    assert ended.results == [[{"x": 3}, {"y": 103}]] * len(ended.results)


def lose_a_rank_as_the_second_phase_begins(scene: Scene) -> list[int]:
    """The second state has no commit yet, and no step of the first phase is done again."""
    states = ObjectState(step=0), ObjectState(step=0)
    for state in states:
        while True:
            with hvd.elastic.attempt(state):
                if state.step == 3:
                    break
                if state is states[1] and scene.me == 2:
                    scene.die("begins")
                hvd.allreduce(np.ones(1), name="gradient")
                state.step += 1
    return [state.step for state in states]


def test_a_phase_that_begins_again_is_not_the_beginning_of_the_job(tmp_path: Path) -> None:
    ended = run_elastic(lose_a_rank_as_the_second_phase_begins, tmp_path, 3, flags=["--min-np", "2"])
    assert ended.status == 0, ended.said
    assert ended.results == [[3, 3]] * 2
    assert "from commit " in ended.said, ended.said
    assert "from the beginning" not in ended.said, ended.said


def catch_everything(scene: Scene, kind: str) -> Any:
    """A script that leaves out what fails."""
    skipped: list[int] = []
    state = ObjectState(step=0, total=0.0)

    def step() -> None:
        try:
            if scene.me == 1 and state.step == 4 and scene.first_time("dies"):
                scene.die("dies")
            state.total += hvd.allreduce(np.full(1, float(state.step)), name="gradient").item()
        except Exception:
            skipped.append(state.step)
        state.step += 1

    @hvd.elastic.run
    def train(state: ObjectState) -> None:
        while state.step < STEPS:
            step()
            if kind == "commits":
                state.commit()

    if kind == "blocks":
        while True:
            with hvd.elastic.attempt(state):
                if state.step >= STEPS:
                    break
                step()
    else:
        train(state)
    return [state.step, state.total, len(skipped) > 0]


@pytest.mark.parametrize("kind", ["commits", "returns", "blocks"])
def test_a_loss_that_was_caught_leaves_no_step_out(kind: str, tmp_path: Path) -> None:
    ended = run_elastic(catch_everything, tmp_path, 2, kind, flags=["--min-np", "1"])
    assert ended.status == 0, ended.said
    assert ended.results == [[STEPS, sum(range(STEPS)), True]]
    warning = "a collective has failed, but its block went on to its end"
    assert (warning in ended.said) == (kind == "blocks")


def catch_a_stall(scene: Scene, mark: str) -> float:
    """The ranks wait for one that is late, and the script leaves out what fails."""

    @hvd.elastic.run
    def train(state: ObjectState) -> None:
        while state.step < 3:
            if state.step == 1 and scene.me == 1:
                wait_until(Path(mark).exists)
            try:
                state.total += hvd.allreduce(np.ones(1), name="gradient").item()
            except Exception:
                Path(mark).touch()
            state.step += 1
            state.commit()

    state = ObjectState(step=0, total=0.0)
    train(state)
    return state.total


def test_a_stall_that_was_caught_leaves_no_step_out(tmp_path: Path) -> None:
    flags = ["--min-np", "2", "--stall-check-warning-time-seconds", "1", "--stall-check-shutdown-time-seconds", "2"]
    ended = run_elastic(catch_a_stall, tmp_path, 2, str(tmp_path / "caught"), flags=flags)
    assert ended.status == 0, ended.said
    assert ended.results == [3.0] * 2


def skip_batches_that_fail(scene: Scene, slots: str) -> Any:
    """A script that leaves out the rest of an epoch when a batch fails. In the first one new slots come."""

    def train_epoch(state: ObjectState) -> None:
        while state.batch < 4:
            if state.batch == 1 and scene.first_time("grows"):
                Path(slots).write_text("localhost:2\n")
            if state.batch == 1 and scene.start == 0:
                wait_until(membership.hosts_updated)
            state.batch += 1
            state.total += hvd.allreduce(np.ones(1), name="gradient").item()
            state.commit()

    @hvd.elastic.run
    def train(state: ObjectState) -> None:
        while state.epoch < 2:
            with contextlib.suppress(Exception):
                train_epoch(state)
            state.batch = 0
            state.epoch += 1

    state = ObjectState(epoch=0, batch=0, total=0.0)
    train(state)
    return [hvd.size(), state.total]


def test_new_slots_leave_out_nothing_of_a_script_that_skips_what_fails(tmp_path: Path) -> None:
    slots, flags = growing_from(1, 2, tmp_path)
    ended = run_elastic(skip_batches_that_fail, tmp_path, None, str(slots), flags=flags)
    assert ended.status == 0, ended.said
    assert ended.results == [[2, 8.0]] * 2, ended.said


def growing_from(slots: int, most: int, folder: Path) -> tuple[Path, list[str]]:
    """A file in which a script says how many slots there are, and the flags of a job that follows it."""
    hosts, program = folder / "slots", folder / "hosts.sh"
    hosts.write_text(f"localhost:{slots}\n")
    program.write_text(f"#!/bin/sh\ncat {hosts}\n")
    program.chmod(0o755)
    return hosts, ["--host-discovery-script", str(program), "--min-np", str(slots), "--max-np", str(most)]


def call_too_much(scene: Scene, when: str) -> Any:
    """One rank calls one collective more: always, once, or in one step of many."""

    @hvd.elastic.run
    def train(state: ObjectState) -> None:
        while state.step < STEPS:
            hvd.allreduce(np.ones(3), name="gradient")
            if hvd.rank() == 0 and (when == "always" or (state.step == 4 and scene.first_time("stalls"))):
                hvd.allreduce(np.ones(1), name="metric")
            state.step += 1
            state.commit()

    state = ObjectState(step=0)
    train(state)
    return state.step


def test_a_bug_ends_the_job_as_without_elastic(tmp_path: Path) -> None:
    ended = run_elastic(call_too_much, tmp_path, 2, "always", flags=["--min-np", "2"])
    assert ended.status == 1, ended.said
    assert "StallError: allreduce 'metric' failed on rank 0" in ended.said
    assert "a collective is called under `if rank == 0:`" in ended.said
    assert ended.said.count("in the same processes") <= 2, "it is tried again once"


@pytest.mark.soak
def test_a_stall_that_does_not_come_again_is_survived(tmp_path: Path) -> None:
    ended = run_elastic(call_too_much, tmp_path, 2, "once", flags=["--min-np", "2"])
    assert ended.status == 0, ended.said
    assert ended.results == [STEPS, STEPS]


class Stubborn:
    """An object that does not take back what it has given."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if hvd.size() == 2:
            raise KeyError("a group that was added")


def lose_what_cannot_go_back(scene: Scene) -> None:
    @hvd.elastic.run
    def train(state: ObjectState) -> None:
        while state.step < STEPS:
            if scene.me == 2 and state.step == 4:
                scene.die("dies")
            hvd.allreduce(np.ones(3), name="gradient")
            state.step += 1
            state.commit()

    train(ObjectState(step=0, stubborn=[Stubborn()]))


def test_a_state_that_cannot_go_back_ends_the_job(tmp_path: Path) -> None:
    ended = run_elastic(lose_what_cannot_go_back, tmp_path, 3, flags=["--min-np", "2"])
    assert ended.status == 1, ended.said
    assert "ValueError: state.stubborn cannot go back to a commit: 'a group that was added'" in ended.said


def train_and_evaluate_in_turns(scene: Scene) -> Any:
    """Each in a block of a state of its own, and both states hold the model."""
    weight = Weight()
    training, evaluation = ObjectState(model=weight, step=0), ObjectState(model=weight, evaluations=0)
    for evaluations in (1, 2, 3):
        while True:
            with hvd.elastic.attempt(training):
                if training.step == 4 * evaluations:
                    break
                weight.value += int(hvd.allreduce(np.ones(1), name="gradient").item())
                training.step += 1
        while True:
            with hvd.elastic.attempt(evaluation):
                if evaluation.evaluations == evaluations:
                    break
                if scene.me == 2 and evaluations == 2:
                    scene.die("evaluates")
                hvd.allreduce(np.ones(1), name="error")
                evaluation.evaluations += 1
    return [weight.value, training.step, evaluation.evaluations]


def return_to_a_state(scene: Scene) -> list[list[float]]:
    """Each phase ends with `join()`. Process 2 dies when process 0 is in the next phase and process 1 is not."""
    states = ObjectState(step=0, seen=0.0), ObjectState(step=0, seen=0.0)

    @hvd.elastic.run
    def train(state: ObjectState, until: int) -> None:
        if scene.me == 0 and until == 4 and state is states[0]:
            print("process 0 is ahead", flush=True)
        while state.step < until:
            state.seen += hvd.allreduce(np.ones(1), op=hvd.Sum, name="seen").item() / hvd.size()
            state.step += 1
            state.commit()
        hvd.join()
        if scene.me > 0 and until == 2 and state is states[1] and scene.first_time("dies"):
            if scene.me == 2:
                scene.await_word("process 0 is ahead")
                scene.die("dies")
            scene.await_end_of(2)
            hvd.barrier()

    for until in (2, 4):
        for state in states:
            train(state, until)
    return [[state.step, state.seen] for state in states]


def test_ranks_in_phases_of_different_states_begin_again_together(tmp_path: Path) -> None:
    """The rank that is ahead does not train while another one is in the `join()` of the phase before."""
    ended = run_elastic(return_to_a_state, tmp_path, 3, flags=["--min-np", "2"])
    assert ended.status == 0, ended.said
    assert ended.fired == {"dies 2"}
    assert ended.results == [[[4, 4.0]] * 2] * len(ended.results)
    assert "these processes end: not all ranks can repeat what has to be repeated" in ended.said


def step_in_the_last_block(scene: Scene) -> list[int]:
    """Process 2 dies when the others have made the last step, and they catch the error of the collective after it."""
    states = ObjectState(step=0), ObjectState(step=0)
    for state in states:
        done = False
        while not done:
            with hvd.elastic.attempt(state):
                if state.step < 3:
                    hvd.allreduce(np.ones(1), name="gradient")
                    state.step += 1
                done = state.step == 3
                if done and state is states[0] and scene.first_time("dies"):
                    hvd.barrier()
                    if scene.me == 2:
                        scene.die("dies")
                    with contextlib.suppress(hvd.RankLostError):
                        hvd.barrier()
    return [state.step for state in states]


def test_the_step_of_a_last_block_that_failed_is_repeated(tmp_path: Path) -> None:
    ended = run_elastic(step_in_the_last_block, tmp_path, 3, flags=["--min-np", "2"])
    assert ended.status == 0, ended.said
    assert ended.fired == {"dies 2"}
    assert ended.results == [[3, 3]] * len(ended.results)


@pytest.mark.parametrize("copies", ["always", "never"])
def test_a_model_in_two_states_keeps_its_progress(copies: str, tmp_path: Path) -> None:
    env = {COPIES_VARIABLE: copies}
    ended = run_elastic(train_and_evaluate_in_turns, tmp_path, 3, flags=["--min-np", "2"], env=env)
    assert ended.status == 0, ended.said
    assert ended.results == [[12, 12, 3]] * 2


SAMPLES, BATCH = 96, 4


def accumulate(scene: Scene, slots: str) -> Any:
    """Windows of two batches. In one of them process 2 dies, or there is room for more ranks."""
    import torch

    import horovodish.torch as hvd

    hvd.init()
    model = torch.nn.Embedding(SAMPLES, 1)  # the weight of a sample counts how often it was used
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), op=hvd.Sum, backward_passes_per_step=2
    )
    sampler = hvd.elastic.ElasticSampler(range(SAMPLES), shuffle=False)
    loader = torch.utils.data.DataLoader(list(range(SAMPLES)), batch_size=BATCH, sampler=sampler)
    batches = 0

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        nonlocal batches
        while state.epoch < 1:
            sampler.set_epoch(state.epoch)
            for number, batch in enumerate(loader):
                (-model(batch).sum()).backward()
                if number % 2 == 1:
                    optimizer.step()
                    optimizer.zero_grad()
                batches += 1
                if scene.start == 0 and batches == 5 and slots:
                    Path(slots).write_text("localhost:3\n")
                    wait_until(membership.hosts_updated)
                    scene.fired("grows")
                elif scene.start == 0 and batches == 5 and scene.me == 2:
                    scene.die("in a window")
                sampler.record(len(batch))
                state.commit()
            optimizer.step()
            optimizer.zero_grad()
            hvd.join()
            state.epoch += 1

    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
    train(state)
    return [hvd.size(), model.weight.detach().round().int().flatten().tolist()]


def check_samples(ended: Ended, ranks: int) -> None:
    assert ended.status == 0, ended.said
    assert ended.results == [[ranks, [1] * SAMPLES]] * ranks, ended.said


@pytest.mark.soak
@pytest.mark.parametrize("copies", ["always", "never"])
def test_windows_of_accumulation_lose_no_sample(copies: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    env = {COPIES_VARIABLE: copies}
    check_samples(run_elastic(accumulate, tmp_path, 3, "", flags=["--min-np", "2"], env=env), 2)


@pytest.mark.soak
def test_a_job_that_grows_within_a_window_loses_no_sample(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    slots, flags = growing_from(2, 3, tmp_path)
    ended = run_elastic(accumulate, tmp_path, None, str(slots), flags=flags)
    assert ended.fired == {"grows 0", "grows 1"}
    check_samples(ended, 3)
