"""Autotune while an optimizer trains: the ranks stay alike, the search ends, and its log says what was tried."""

from __future__ import annotations

import csv
import os
import signal
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import horovodish.gradients.autotune
import horovodish.settings
import horovodish.torch as hvd
from horovodish.errors import SettingError
from horovodish.gradients.autotune import Tuner
from support.ranks import run_ranks, run_ranks_to_their_ends

STEPS = 400


def train(steps: int) -> tuple[list[float], bool]:
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, 64)).square().mean().backward()
        expected = model[0].weight.grad.clone()
        assert torch.equal(hvd.broadcast(expected, root_rank=0), expected)
        optimizer.step()
    return [float(parameter.double().sum()) for parameter in model.parameters()], hvd.rank() == 0


@pytest.mark.soak
@pytest.mark.parametrize("plane", ["auto", "mpi_ring"])
def test_the_search_ends_and_is_logged(tmp_path: Path, plane: str) -> None:
    log = tmp_path / "autotune.csv"
    env = {
        "HOROVODISH_PLANE": plane,
        "HOROVODISH_AUTOTUNE": "1",
        "HOROVODISH_AUTOTUNE_LOG": str(log),
        "HOROVODISH_AUTOTUNE_WARMUP_SAMPLES": "1",
        "HOROVODISH_AUTOTUNE_STEPS_PER_SAMPLE": "2",
    }
    results: list[Any] = run_ranks(train, 2, args=(STEPS,), env=env)
    assert results[0][0] == results[1][0]
    with log.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["what"] for row in rows].count("chosen") == 1
    assert [rows[0]["what"], rows[-1]["what"]] == ["warm-up", "chosen"]
    tried = {(row["fusion_threshold_mb"], row["chunk_kb"], row["ring_segment_kb"]) for row in rows}
    assert len(tried) >= 3
    assert len({row["chunk_kb" if plane == "mpi_ring" else "ring_segment_kb"] for row in rows}) == 1
    for row in rows[:-1]:
        # 6 layers of 64 * 64 + 64 float32 numbers.
        assert float(row["bytes_per_second"]) * float(row["seconds_per_step"]) == pytest.approx(99_840, rel=1e-4)


def train_twice() -> None:
    for _ in range(2):
        train(12)


@pytest.mark.soak
def test_the_searches_of_a_process_share_a_log(tmp_path: Path) -> None:
    log = tmp_path / "autotune.csv"
    log.write_text("of another job")
    env = {
        "HOROVODISH_AUTOTUNE": "1",
        "HOROVODISH_AUTOTUNE_LOG": str(log),
        "HOROVODISH_AUTOTUNE_STEPS_PER_SAMPLE": "2",
    }
    run_ranks(train_twice, 2, env=env)
    with log.open(newline="") as file:
        rows = list(csv.DictReader(file))
    first, second = rows[0]["gradients"], rows[-1]["gradients"]
    assert first != second
    assert [row["gradients"] for row in rows] == [first] * 2 + [second] * 2


def refuse_the_log() -> None:
    hvd.init()
    model = torch.nn.Linear(2, 2)
    if hvd.rank() == 0:
        with pytest.raises(SettingError, match=r"AUTOTUNE_LOG='/nowhere/log.csv': the log cannot be written"):
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_log_that_cannot_be_written() -> None:
    run_ranks(refuse_the_log, 2, env={"HOROVODISH_AUTOTUNE": "1", "HOROVODISH_AUTOTUNE_LOG": "/nowhere/log.csv"})


def start_with_warnings() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hvd.init()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("autotune", ["0", "1"])
def test_a_log_without_autotune_is_noticed_once(autotune: str) -> None:
    env = {"HOROVODISH_AUTOTUNE": autotune, "HOROVODISH_AUTOTUNE_LOG": "autotune.csv"}
    of_rank_0, *of_others = run_ranks(start_with_warnings, 2, env=env)
    assert of_others == [[]]
    assert ["no effect without HOROVODISH_AUTOTUNE=1" in notice for notice in of_rank_0] == [True] * (autotune == "0")


def train_with_a_full_disk() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(30)
    return [str(warning.message) for warning in caught if "autotune" in str(warning.message)]


def test_training_goes_on_when_the_log_cannot_be_written_any_more() -> None:
    env = {
        "HOROVODISH_AUTOTUNE": "1",
        "HOROVODISH_AUTOTUNE_LOG": "/dev/full",
        "HOROVODISH_AUTOTUNE_STEPS_PER_SAMPLE": "1",
    }
    of_rank_0, of_rank_1 = run_ranks(train_with_a_full_disk, 2, env=env)
    assert len(of_rank_0) == 1
    assert "/dev/full cannot be written any more ([Errno 28] No space left on device)" in of_rank_0[0]
    assert of_rank_1 == []


class Clock:
    """Stands in for the module `time`: this rank's steps take as long as the test says."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


SECONDS = {"first": (1.0, 3.0), "second": (10.0, 30.0)}
"""How long a step takes, for each search, by rank."""


def two_searches_in_another_order() -> None:
    """Both end their samples in the same steps, and the ranks meet them in opposite orders."""
    hvd.init()
    clock, knobs = Clock(), horovodish.settings.load()
    order = list(SECONDS) if hvd.rank() else list(SECONDS)[::-1]
    tuners = {name: Tuner(name, knobs, hvd.global_process_set) for name in order}
    with mock.patch.object(horovodish.gradients.autotune, "time", clock):
        for step in range(12):
            for act in ("report", "decide"):
                for name in order:
                    clock.now = step * SECONDS[name][hvd.rank()]
                    tuners[name].step_done(1000) if act == "report" else tuners[name].decide()


def two_optimizers_in_another_order() -> None:
    """As above, in a backward pass."""
    hvd.init()
    models = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)]
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    for _ in range(30):
        for optimizer in optimizers:
            optimizer.zero_grad()
        first, second = (model(torch.ones(3)).sum() for model in (models if hvd.rank() else models[::-1]))
        (first + second).backward()
        for optimizer in optimizers:
            optimizer.step()


def search_in_another_order() -> None:
    two_searches_in_another_order()
    two_optimizers_in_another_order()


def test_searches_that_end_their_samples_in_one_step_do_not_mix(tmp_path: Path) -> None:
    log = tmp_path / "autotune.csv"
    env = {
        "HOROVODISH_AUTOTUNE": "1",
        "HOROVODISH_AUTOTUNE_LOG": str(log),
        "HOROVODISH_AUTOTUNE_STEPS_PER_SAMPLE": "1",
    }
    run_ranks(search_in_another_order, 2, env=env)
    with log.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for name, seconds in SECONDS.items():
        assert {float(row["seconds_per_step"]) for row in rows if row["gradients"] == name} == {sum(seconds) / 2}
    assert len({row["gradients"] for row in rows}) == 4


def lose_a_rank_between_its_reduction_and_its_report() -> tuple[list[bool], int]:
    """Gives whether the old error came again, step by step, and of how many ranks the search is at last."""
    hvd.init()
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1))
    for _ in range(3):  # the fourth step ends a sample
        parameter.sum().backward()
    if hvd.rank() == 2:
        with mock.patch.object(Tuner, "step_done", side_effect=lambda _: os.kill(os.getpid(), signal.SIGKILL)):
            parameter.sum().backward()
    with pytest.raises(hvd.RankLostError, match="rank 2"):
        parameter.sum().backward()
    optimizer._reducer.tune()  # the error has been raised; nothing is left to decide
    hvd.shutdown()
    hvd.init(hvd.surviving_communicator())
    raised = []
    for _ in range(8):
        optimizer.zero_grad()
        try:
            parameter.sum().backward()
        except hvd.RankLostError:
            raised.append(True)
            continue
        raised.append(False)
        optimizer.step()
    return raised, optimizer._reducer._tuner._ranks


@pytest.mark.soak
def test_a_rank_that_is_lost_at_the_end_of_a_sample() -> None:
    env = {"HOROVODISH_AUTOTUNE": "1", "HOROVODISH_AUTOTUNE_STEPS_PER_SAMPLE": "1"}
    *survivors, lost = run_ranks_to_their_ends(lose_a_rank_between_its_reduction_and_its_report, 3, env=env)
    assert lost.ended == "died", lost.output
    for outcome in survivors:
        assert outcome.ended == "returned", outcome.output
        assert outcome.result == ([False] * 8, 2)
