"""Operations that were launched on a GPU and never come to their end: every rank learns of it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import horovodish as hvd
from horovodish import elastic
from horovodish.collectives.submission import Handle
from horovodish.runtime import basics
from support.elastic import COPIES_VARIABLE, Scene, run_elastic
from support.outcome import Outcome
from support.pretended_gpu import Gpu, variables
from support.processes import all_pids, meet, wait_for_output, wait_until, wait_until_ended
from support.ranks import run_ranks, run_ranks_to_their_ends

SLOW_SECONDS = 2.5
"""Longer than a plane waits for its GPU once a rank is lost."""
KINDS = ["allreduce", "broadcast", "allgather", "reducescatter"]


def knobs(*, warning: float = 1.0, shutdown: float = 0) -> dict[str, str]:
    return {
        "HOROVODISH_STALL_CHECK_WARNING_TIME_SECONDS": str(warning),
        "HOROVODISH_STALL_CHECK_SHUTDOWN_TIME_SECONDS": str(shutdown),
    }


def hang(gpu: Gpu) -> None:
    """From now on this rank's GPU does nothing of what it is given. The end of a communicator waits for it."""
    gpu.stream.hold(True)
    gpu.stream.add(np.zeros(1, np.float32), 0.0)


@contextlib.contextmanager
def a_slow_gpu(gpu: Gpu) -> Iterator[None]:
    """A GPU that needs SLOW_SECONDS for what it is given first."""
    hang(gpu)
    timer = threading.Timer(SLOW_SECONDS, gpu.stream.hold, [False])
    timer.start()
    yield
    timer.join()


def launch(gpu: Gpu, kind: str, name: str, process_set: hvd.ProcessSet = hvd.global_process_set) -> list[Any]:
    """Launches an operation on every rank's GPU. Returns its memory, which must stay."""
    source = np.ones(6)
    target = None if kind == "allgather" else np.empty(3 if kind == "reducescatter" else 6)
    options = {"op": hvd.Sum} if kind in ("allreduce", "reducescatter") else {}
    handle = gpu.submit(kind, [source], [target], name, process_set=process_set, **options)
    wait_until(handle.poll)
    return [source, target, handle]


def send_to_one(gpu: Gpu, name: str, sender: int, receiver: int) -> Handle[list[Any]]:
    """Launches an alltoall in which only one rank gets anything, so the GPUs of the others need not wait."""
    splits = [int(hvd.rank() == sender and rank == receiver) for rank in range(hvd.size())]
    return gpu.submit("alltoall", [np.full((sum(splits), 2), 7.0)], [None], name, splits=splits)


def outcome_of(settle: Any) -> str:
    with pytest.raises(hvd.RankLostError) as raised:
        settle()
    return str(raised.value)


def results(outcomes: list[Outcome], ended: dict[int, str] | None = None) -> dict[int, Any]:
    """By rank, what those have returned that were not to end in another way."""
    for outcome in outcomes:
        assert outcome.ended == (ended or {}).get(outcome.rank, "returned"), (outcome.error, outcome.output)
    return {outcome.rank: outcome.result for outcome in outcomes if outcome.ended == "returned"}


def lose_a_rank(kind: str) -> list[str]:
    hvd.init()
    pids, gpu = all_pids(), Gpu()
    gpu.reduce([np.ones(5)], "works")
    basics.engine().settle_launched()
    if hvd.rank() == 1:
        hang(gpu)
    memory = launch(gpu, kind, "interrupted")
    meet()
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_until_ended(pids[1])
    texts = [outcome_of(basics.engine().settle_launched), outcome_of(memory[2].wait), basics.loss()]
    hvd.shutdown()
    return [*texts, basics.loss()]


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_launched_is_lost_with_a_rank(kind: str) -> None:
    returned = results(run_ranks_to_their_ends(lose_a_rank, 3, args=(kind,), env=variables(3)), {1: "died"})
    for rank, texts in returned.items():
        assert (
            f"{kind} 'interrupted' failed on rank {rank} after it was launched on its GPU: rank 1 has died" in texts[0]
        )
        assert texts == [texts[0]] * 4


def lose_a_rank_of_two_sets() -> list[str]:
    hvd.init()
    pids, gpu = all_pids(), Gpu()
    pair = hvd.add_process_set([0, 1])
    gpu.reduce([np.ones(5)], "works")
    if hvd.rank() == 1:
        hang(gpu)
    memory = [launch(gpu, "allreduce", f"in all {number}") for number in range(3)]
    if pair.included():
        memory += [launch(gpu, "allreduce", f"in two {number}", pair) for number in range(3)]
    meet()
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_until_ended(pids[1])
    first = outcome_of(basics.engine().settle_launched)
    # The planes of the two sets end one after the other.
    return [first, *[outcome_of(lambda handle=handle: wait_for_loss(handle)) for *_, handle in memory]]


def wait_for_loss(handle: Handle[Any]) -> None:
    """Takes a handle of a launched operation for done only if it stays so until the engine has ended all planes."""
    ends_at = time.monotonic() + 30
    while time.monotonic() < ends_at:
        handle.wait()
        time.sleep(0.01)


def test_all_that_was_launched_is_lost_with_a_rank() -> None:
    returned = results(run_ranks_to_their_ends(lose_a_rank_of_two_sets, 3, env=variables(3)), {1: "died"})
    for rank, texts in returned.items():
        assert len(texts) == (7 if rank == 0 else 4)
        assert all(f"failed on rank {rank} after it was launched on its GPU: rank 1 has died" in text for text in texts)
        names = [text.split("'")[1] for text in texts[1:]]
        assert names == [f"in {which} {number}" for which in ["all", "two"][: len(names) // 3] for number in range(3)]


def meet_an_error_of_nccl() -> str:
    hvd.init()
    gpu = Gpu()
    memory = [launch(gpu, "allreduce", str(number)) for number in range(3)]
    hang(gpu)
    memory.append(launch(gpu, "allreduce", "fails"))
    gpu.stream.hold(False)
    return outcome_of(basics.engine().settle_launched)


def test_an_error_of_nccl_makes_what_it_ended_worthless() -> None:
    """The event of that operation comes, because the kernel has ended."""
    outcomes = run_ranks_to_their_ends(meet_an_error_of_nccl, 2, env=variables(2, PRETEND_NCCL_FAILS="4"))
    for rank, text in results(outcomes).items():
        assert f"allreduce 'fails' failed on rank {rank} after it was launched on its GPU" in text
        assert "NCCL failed while a collective was under way" in text


def break_a_gpu() -> str:
    hvd.init()
    gpu = Gpu()
    gpu.reduce([np.ones(5)], "works")
    if hvd.rank() == 1:
        hang(gpu)
    memory = launch(gpu, "allreduce", "interrupted")
    assert memory
    meet()
    if hvd.rank() == 1:
        ctypes.CDLL(os.environ["HOROVODISH_TEST_CUDA"]).pretend_break()
    text = outcome_of(basics.engine().settle_launched)
    gpu.stream.hold(False)
    return text


def test_the_event_of_a_gpu_that_has_failed_is_no_success() -> None:
    for text in results(run_ranks_to_their_ends(break_a_gpu, 2, env=variables(2))).values():
        assert "rank 1: CUDA failed while a collective was under way: CUDA_ERROR_ILLEGAL_ADDRESS" in text


def hang_until_all_raise(kind: str) -> tuple[str, str, str]:
    hvd.init()
    gpu = Gpu()
    gpu.reduce([np.ones(4)], "works")
    if hvd.rank() == 1:
        hang(gpu)
    memory = launch(gpu, kind, "hangs")
    with pytest.raises(hvd.StallError) as settled:
        basics.engine().settle_launched()
    if hvd.rank() != 1:
        gpu.stream.wait()  # it ends, since nothing holds this rank's GPU any more
    with pytest.raises(hvd.StallError):
        memory[2].wait()
    with pytest.raises(hvd.StallError) as raised:
        hvd.barrier()
    gpu.stream.hold(False)
    return str(settled.value), str(raised.value), wait_for_output(hvd.rank(), "")


@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_that_hangs_is_reported_and_then_every_rank_raises(kind: str) -> None:
    env = {**variables(2), **knobs(shutdown=4.0)}
    returned = results(run_ranks_to_their_ends(hang_until_all_raise, 2, args=(kind,), env=env))
    for rank, (settled, raised, _) in returned.items():
        assert f"{kind} 'hangs' failed on rank {rank} after it was launched on its GPU: ranks have waited" in settled
        assert "'hangs' was launched on the GPUs and has not ended" in raised
    report = returned[0][2]
    assert report.count("horovodish: warning: ranks have waited for others") == 1
    assert (
        "on the GPU of rank 0 1 s ago and has not ended: this GPU has started it, and waits for another rank's GPU"
        in report
    )
    assert (
        "on the GPU of rank 1 1 s ago and has not ended: this GPU has not started it, and still computes earlier work"
        in report
    )
    assert "warning" not in returned[1][2]


def hang_for_a_while() -> str:
    hvd.init()
    gpu = Gpu()
    gpu.reduce([np.ones(4)], "works")
    if hvd.rank() == 1:
        hang(gpu)
    array = np.ones(4)
    gpu.submit("allreduce", [array], [array], "slow", op=hvd.Sum).wait()
    if hvd.rank() == 1:
        wait_for_output(0, "'slow' was launched on the GPUs and has not ended")
        gpu.stream.hold(False)
    basics.engine().settle_launched()
    gpu.stream.wait()
    np.testing.assert_array_equal(array, np.full(4, 2.0))
    gpu.reduce([np.ones(4)], "afterwards")
    assert basics.loss() == ""
    return wait_for_output(hvd.rank(), "")


def test_without_a_shutdown_time_a_gpu_that_hangs_is_only_reported() -> None:
    outputs = run_ranks(hang_for_a_while, 2, env={**variables(2), **knobs()})
    assert outputs[0].count("horovodish: warning") == 1
    assert "warning" not in outputs[1]


def hang_where_the_root_has_done_its_part() -> tuple[str, str]:
    hvd.init()
    gpu = Gpu()
    gpu.reduce([np.ones(4)], "works")
    if hvd.rank() == 2:
        hang(gpu)
    send_to_one(gpu, "hangs", 0, 2).wait()
    if hvd.rank() != 2:
        basics.engine().settle_launched()
    wait_for_output(2, "'hangs' was launched")
    with pytest.raises(hvd.StallError) as raised:
        hvd.allreduce(np.ones(1), name="waits for rank 2") if hvd.rank() != 2 else basics.engine().settle_launched()
    gpu.stream.hold(False)
    return str(raised.value), wait_for_output(hvd.rank(), "")


@pytest.mark.soak
def test_a_gpu_that_hangs_alone_is_reported_by_its_rank() -> None:
    env = {**variables(3), **knobs(shutdown=8.0)}
    returned = results(run_ranks_to_their_ends(hang_where_the_root_has_done_its_part, 3, env=env))
    assert "horovodish: warning: 'hangs' was launched on the GPU of rank 2" in returned[2][1]
    assert "'hangs'" in returned[2][0]


def hang_in_one_of_two_sets(folder: str) -> str:
    hvd.init()
    gpu, ended = Gpu(hvd.rank()), Path(folder, "ended")
    sets = [hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])]
    [mine] = [each for each in sets if each.included()]
    gpu.reduce([np.ones(4)], "works", process_set=mine)
    if hvd.rank() == 1:
        hang(gpu)
    if hvd.rank() < 2:
        memory = launch(gpu, "allreduce", "hangs", mine)
        with pytest.raises(hvd.StallError, match="allreduce 'hangs' failed on rank"):
            basics.engine().settle_launched()
        with pytest.raises(hvd.StallError, match="'hangs' was launched"):
            gpu.reduce([np.ones(4)], "afterwards", process_set=mine)
        assert memory
        ended.touch()
        gpu.stream.hold(False)
    else:
        total, turns = 0.0, 0
        while total < 2:  # both have seen that the other set has ended
            [[total]] = gpu.reduce([np.full(1, float(ended.exists()))], f"turn {turns}", process_set=mine)
            basics.engine().settle_launched()
            turns += 1
        assert turns > 1
    hvd.barrier()
    return basics.loss()


@pytest.mark.soak
def test_a_gpu_that_hangs_in_one_set_leaves_the_others_alone(tmp_path: Path) -> None:
    env = {**variables(4), **knobs(shutdown=3.0)}
    returned = results(run_ranks_to_their_ends(hang_in_one_of_two_sets, 4, args=(str(tmp_path),), env=env))
    assert [bool(returned[rank]) for rank in range(4)] == [True, True, False, False]


def shut_down_with_a_slow_gpu() -> tuple[list[float], str]:
    hvd.init()
    gpu = Gpu()
    gpu.reduce([np.ones(4)], "works")
    array = np.ones(4)
    with a_slow_gpu(gpu) if hvd.rank() == 1 else contextlib.nullcontext():
        gpu.submit("allreduce", [array], [array], "slow", op=hvd.Sum).wait()
        hvd.shutdown()
    gpu.stream.wait()
    return array.tolist(), basics.loss()


def test_shutdown_waits_for_a_slow_gpu() -> None:
    returned = results(run_ranks_to_their_ends(shut_down_with_a_slow_gpu, 2, env=variables(2)))
    assert returned == {0: ([2.0] * 4, ""), 1: ([2.0] * 4, "")}


def be_left_with_a_slow_gpu() -> tuple[Any, str]:
    hvd.init()
    gpu = Gpu()
    gpu.reduce([np.ones(4)], "works")
    with a_slow_gpu(gpu) if hvd.rank() == 0 else contextlib.nullcontext():
        handle = send_to_one(gpu, "slow", 1, 0)
        [received] = handle.wait()
        if hvd.rank() == 1:
            hvd.shutdown()
        else:
            with pytest.raises(hvd.RankLostError):
                hvd.allreduce(np.ones(1), name="rank 1 has left")
            basics.engine().settle_launched()
    gpu.stream.wait()
    return received.tolist(), ""


def test_a_rank_that_has_left_in_order_takes_nothing_with_it() -> None:
    returned = results(run_ranks_to_their_ends(be_left_with_a_slow_gpu, 2, env=variables(2)))
    assert returned[0][0] == [[7.0, 7.0]]


def remove_a_set_with_a_slow_gpu() -> list[float]:
    hvd.init()
    gpu, pair, array = Gpu(), hvd.add_process_set([0, 1]), np.ones(4)
    which = {"op": hvd.Sum, "process_set": pair}
    if pair.included():
        gpu.reduce([np.ones(4)], "works", process_set=pair)
    with a_slow_gpu(gpu) if hvd.rank() == 1 else contextlib.nullcontext():
        if pair.included():
            gpu.submit("allreduce", [array], [array], "slow", **which).wait()
        hvd.remove_process_set(pair)
    basics.engine().settle_launched()
    gpu.stream.wait()
    return list(array.tolist())


def test_a_removed_set_waits_for_a_slow_gpu() -> None:
    assert run_ranks(remove_a_set_with_a_slow_gpu, 3, env=variables(3)) == [[2.0] * 4, [2.0] * 4, [1.0] * 4]


def interrupt_a_wait() -> None:
    hvd.init()
    gpu = Gpu()
    array = np.ones(4)
    gpu.reduce([array], "works")
    basics.engine().settle_launched()
    hang(gpu)
    handle = gpu.submit("allreduce", [array], [array], "slow", op=hvd.Sum)
    handle.wait()
    for _ in range(2):
        timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            basics.engine().settle_launched()
    gpu.stream.hold(False)
    basics.engine().settle_launched()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_wait_for_the_gpu_can_be_interrupted(ranks: int) -> None:
    run_ranks(interrupt_a_wait, ranks, env=variables(ranks), fresh=True)


def train_on_gpus(scene: Scene, folder: str) -> list[int]:
    hvd.init()

    @elastic.run
    def train(state: Any) -> None:
        gpu = Gpu(hvd.local_rank() if hvd.size() > 1 else 0)
        while state.step < 6:
            total = np.ones(4)
            dies = state.step == 3 and scene.me == 1 and scene.first_time("launched")
            if dies:
                hang(gpu)
            gpu.submit("allreduce", [total], [total], f"step {state.step}", op=hvd.Sum).wait()
            Path(folder, f"launched-{state.step}-{hvd.rank()}").touch()
            if dies:
                wait_until(lambda: len(list(Path(folder).glob("launched-3-*"))) == hvd.size())
                scene.die("launched")
            gpu.stream.wait()
            state.sizes.append(hvd.size())
            state.sum += total[0]
            state.step += 1
            state.commit()

    state = elastic.ObjectState(sum=0.0, step=0, sizes=[])
    train(state)
    assert state.sum == sum(state.sizes), (state.sum, state.sizes)
    return list(state.sizes)


@pytest.mark.parametrize("copies", ["always", "never"])
def test_an_elastic_job_repeats_what_was_launched_and_lost(copies: str, tmp_path: Path) -> None:
    env = {**variables(3), COPIES_VARIABLE: copies}
    ended = run_elastic(train_on_gpus, tmp_path, 3, str(tmp_path), flags=["--min-np", "1"], env=env)
    assert ended.status == 0, ended.said
    assert ended.fired == {"launched 1"}
    for sizes in ended.results:
        assert len(sizes) == 6
        assert sizes[:4] == [3, 3, 3, 2]  # new processes may come later
