"""Autotune while an optimizer trains: the ranks stay alike, the search ends, and its log says what was tried."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import horovodish.torch as hvd
from horovodish.errors import SettingError
from support.ranks import run_ranks

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
