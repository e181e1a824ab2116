"""The learning rate that the guide "From DDP" schedules for several ranks, step by step, and after resuming."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import horovodish.torch as hvd
from support.documents import python_blocks
from support.ranks import run_ranks

_, SCHEDULE, _, RESUME, *_ = python_blocks("docs/from-ddp.md")
RATE, EPOCHS, SAMPLES, BATCH = 0.1, 8, 40, 4
WARMUP_EPOCHS = 5  # as in the guide


def steps_per_epoch() -> int:
    return {2: 5, 3: 4}[hvd.size()]


def names() -> dict[str, Any]:
    """What the guide takes for granted."""
    schedulers = {"LinearLR": LinearLR, "CosineAnnealingLR": CosineAnnealingLR, "SequentialLR": SequentialLR}
    return {
        "hvd": hvd,
        "math": math,
        "SGD": SGD,
        "model": torch.nn.Linear(2, 1),
        "rate": RATE,
        "epochs": EPOCHS,
        "dataset": range(SAMPLES),
        "batch": BATCH,
    } | (schedulers)


def expected(steps_done: int) -> float:
    """The rate after some steps: a line from RATE to N times RATE, then half a cosine down to zero."""
    warmup, all_steps = WARMUP_EPOCHS * steps_per_epoch(), EPOCHS * steps_per_epoch()
    if steps_done <= warmup:
        return RATE * (1 + (hvd.size() - 1) * steps_done / warmup)
    return RATE * hvd.size() * (1 + math.cos(math.pi * (steps_done - warmup) / (all_steps - warmup))) / 2


def train(scope: dict[str, Any], steps_done: int, until: int) -> None:
    """Steps on, and looks at every rate before, at and after the end of the warm-up."""
    optimizer, scheduler = scope["optimizer"], scope["scheduler"]
    for step in range(steps_done, until + 1):
        (rate,) = (group["lr"] for group in optimizer.param_groups)
        assert rate == pytest.approx(expected(step), abs=1e-9), f"after {step} steps"
        assert scheduler.get_last_lr() == [rate]
        if step < until:
            optimizer.zero_grad()
            scope["model"](torch.ones(1, 2)).sum().backward()
            optimizer.step()
            scheduler.step()


def begin(epochs_done: list[int]) -> list[dict[str, Any]]:
    """Trains from the start, goes on from a checkpoint on the same ranks, and gives checkpoints for others."""
    hvd.init()
    scope = names()
    exec(SCHEDULE, scope)
    checkpoints, step = [], 0
    for epochs in epochs_done:
        train(scope, step, epochs * steps_per_epoch())
        step = epochs * steps_per_epoch()
        checkpoints.append({"optimizer": scope["optimizer"].state_dict(), "epochs_done": epochs})
        scheduler = scope["scheduler"].state_dict()
        scope = names()
        exec(SCHEDULE, scope)
        scope["optimizer"].load_state_dict(checkpoints[-1]["optimizer"])
        scope["scheduler"].load_state_dict(scheduler)
    train(scope, step, EPOCHS * steps_per_epoch())
    return checkpoints


def go_on(checkpoints: list[dict[str, Any]]) -> None:
    hvd.init()
    for checkpoint in checkpoints:
        scope = {**names(), "checkpoint": checkpoint}
        exec(SCHEDULE, scope)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            exec(RESUME, scope)
        train(scope, checkpoint["epochs_done"] * steps_per_epoch(), EPOCHS * steps_per_epoch())


def test_every_rate_of_the_schedule_also_after_resuming_on_more_ranks() -> None:
    checkpoints, _ = run_ranks(begin, 2, args=([2, 5, 6],))
    run_ranks(go_on, 3, args=(checkpoints,))
