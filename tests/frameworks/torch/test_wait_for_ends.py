"""`DistributedOptimizer(wait_for=...)`: ranks that begin differently, hang, end or are lost."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import horovodish.torch as hvd
from horovodish.gradients import late_steps
from horovodish.runtime import process
from support.elastic import Scene, run_elastic
from support.late_ranks import STEPS, late_at_random, steps_with
from support.leaves import leaf, wrapped
from support.on_ranks import on_ranks
from support.processes import wait_until
from support.ranks import RanksFailedError, run_ranks, run_ranks_to_their_ends
from support.rounds import digits_model, gradients_of, values_of


def ends_too_early() -> None:
    hvd.init()
    p = leaf()
    optimizer: Any = wrapped([p], wait_for=2)
    while optimizer.steps < (2 if hvd.rank() == 1 else 4):
        optimizer.zero_grad()
        p.sum().backward()
        optimizer.step()


def begins_elsewhere(ahead: int) -> None:
    hvd.init()
    p = leaf()
    optimizer: Any = wrapped([p], wait_for=1)
    steps_with(optimizer, p, 1)
    state = optimizer.state_dict() | {"steps": 5 * (hvd.rank() == ahead)}
    hvd.shutdown()
    optimizer.load_state_dict(state)
    hvd.init()
    steps_with(optimizer, p, 1)


def has_an_option_more() -> None:
    hvd.init()
    p = leaf()
    optimizer: Any = wrapped([p], wait_for=1)
    optimizer.param_groups[0] |= {"extra": 3.0} if hvd.rank() else {}
    steps_with(optimizer, p, 1)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (has_an_option_more, [], "such as learning rates, and rank 1 "),
        (ends_too_early, [], "fewer than wait_for=2 ranks take further steps. Remedy: end the loop at the same"),
        (begins_elsewhere, [0], "rank 0 has taken 5 steps, and rank 1 0. Remedy: load the same checkpoint"),
        (begins_elsewhere, [1], "rank 0 has taken 0 steps, and rank 1 5. Remedy: load the same checkpoint"),
    ],
)
def test_ranks_that_count_otherwise(function: Any, arguments: list[int], message: str) -> None:
    with pytest.raises(RanksFailedError) as raised:
        run_ranks(function, 2, args=tuple(arguments), fresh=True)
    assert message in str(raised.value)


def is_long_away() -> None:
    hvd.init()
    p = leaf()
    optimizer: Any = wrapped([p], wait_for=2)
    while optimizer.steps < 3:
        time.sleep(6.0 * (hvd.rank() == 1 and optimizer.steps == 1))
        optimizer.zero_grad()
        p.sum().backward()
        optimizer.step()


@pytest.mark.soak
def test_who_is_waited_for_is_said() -> None:
    """By the first rank, once; the threads of the others do not count as stalled."""
    env = {"HOROVODISH_STALL_CHECK_WARNING_TIME_SECONDS": "3"}
    outcomes = run_ranks_to_their_ends(is_long_away, 2, env=env)
    assert [outcome.ended for outcome in outcomes] == ["returned"] * 2
    said = "".join(outcome.output for outcome in outcomes)
    (line,) = [line for line in said.splitlines() if "horovodish" in line]
    assert "step 2 has waited 3 s for ranks [1]. A step goes on with 2 ranks, unless another rank lags 8 steps" in line


def hang(said: str) -> str:
    """Rank 1 takes no second step before rank 0 has raised an error."""
    hvd.init()
    p = leaf()
    optimizer: Any = wrapped([p], wait_for=2)
    try:
        while True:
            if hvd.rank() == 1 and optimizer.steps == 1:
                wait_until(Path(said).exists)
            optimizer.zero_grad()
            p.sum().backward()
            optimizer.step()
    except hvd.StallError as problem:
        Path(said).touch()
        return str(problem)


def test_a_step_that_waits_too_long_is_a_stall(tmp_path: Path) -> None:
    env = {"HOROVODISH_STALL_CHECK_SHUTDOWN_TIME_SECONDS": "3"}
    first, other = run_ranks(hang, 2, args=(str(tmp_path / "said"),), env=env)
    begin = "late steps of optimizer 1: step 2 has waited more than 3 s for ranks"
    assert first.startswith(f"{begin} [1]. Remedy: ")
    assert other.startswith(f"{begin} that rank 0 names. Remedy: ")


def go_on_after_a_grace() -> int:
    """Rank 0 is ready for the second step, and gives rank 1 more time than the limit of a stall."""
    hvd.init()
    p = leaf()
    optimizer: Any = wrapped([p], wait_for=1)
    while optimizer.steps < 1:
        steps_with(optimizer, p, 1)
    hvd.barrier()
    if hvd.rank() == 0:
        (steps,) = process.part(late_steps._Running).steps
        steps._grace = 4.0
    else:
        time.sleep(8.0)
    while optimizer.steps < 2:
        steps_with(optimizer, p, 1)
    return int(optimizer.steps)


@pytest.mark.soak
def test_a_step_that_could_go_on_is_no_stall() -> None:
    env = {"HOROVODISH_STALL_CHECK_SHUTDOWN_TIME_SECONDS": "2"}
    assert min(run_ranks(go_on_after_a_grace, 2, env=env)) >= 2


EXITS = """
import sys
import torch
import horovodish.torch as hvd

hvd.init()
p = torch.nn.Parameter(torch.zeros(3))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), wait_for=2)
while optimizer.steps < 8:
    if hvd.rank() == 2 and optimizer.steps >= 2:
        hvd.join()
    if hvd.rank() == 1 and optimizer.steps == 3:
        sys.exit(3)
    optimizer.zero_grad()
    p.sum().backward()
    optimizer.step()
hvd.barrier()
"""


ENDS = """
import sys
import torch
import horovodish.torch as hvd

hvd.init()
p = torch.nn.Parameter(torch.zeros(3))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), wait_for=1)
for _ in range(3):
    p.sum().backward()
    optimizer.step()
if hvd.rank() != int(sys.argv[1]):
    hvd.join()
"""


def said_by_three(tmp_path: Path, script: str, *arguments: str, status: int) -> str:
    """What a script prints to its standard error, which ends with that status."""
    place = tmp_path / "script.py"
    place.write_text(script)
    command = [sys.executable, "-m", "horovodish.launcher", "run", "-np", "3", sys.executable, str(place), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == status, ended.stderr
    return ended.stderr


def test_a_rank_that_exits_does_not_wait_for_the_others(tmp_path: Path) -> None:
    """One that has joined hears of it, too."""
    said = said_by_three(tmp_path, EXITS, status=3)
    assert "late steps of optimizer 1: step 4 failed on rank" in said
    last_line = said.splitlines()[-1]
    assert re.search(r"rank 1 on .* failed with exit status 3: it called sys.exit\(3\) in script.py:13", last_line)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_ends_while_the_others_have_joined(tmp_path: Path, rank: int) -> None:
    said = said_by_three(tmp_path, ENDS, str(rank), status=1)
    assert re.search(rf"a call of join failed on rank \d after \d+ steps: rank {rank} has ended its script", said), said
    assert "call hvd.join() after the last one" in said


ALONE = """
import torch
import horovodish.torch as hvd

hvd.init()
for number in range(2):
    model = torch.nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), wait_for=1)
    for step in range(number):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    hvd.join()
"""


@pytest.mark.parametrize("plane", ["auto", "nccl"])  # which reduces on a rank alone, too
def test_a_rank_alone_ends(plane: str) -> None:
    environment = {**os.environ, "HOROVODISH_PLANE": plane}
    subprocess.run([sys.executable, "-c", ALONE], check=True, timeout=120, env=environment)


def begins_with_other_parameters() -> None:
    hvd.init()
    p = leaf(float(hvd.rank()))
    optimizer: Any = wrapped([p], wait_for=1)
    warned = pytest.warns(RuntimeWarning, match="before step 1, the parameters of rank . and rank . differ. Remedy")
    with contextlib.nullcontext() if hvd.rank() else warned:
        while optimizer.steps < 3:
            optimizer.zero_grad()
            p.sum().backward()
            optimizer.step()
            hvd.barrier()


@pytest.mark.soak
def test_ranks_that_begin_with_other_parameters_are_warned() -> None:
    run_ranks(begins_with_other_parameters, 2, fresh=True)


def train_late(scene: Scene, victims: list[list[int]]) -> dict[str, Any]:
    """Trains with ranks that are late at random; some of them die."""
    hvd.init()
    model = digits_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer: Any = hvd.DistributedOptimizer(sgd, model.named_parameters(), wait_for=3)
    perhaps_sleep = late_at_random(7)

    @hvd.elastic.run
    def train(state: Any) -> None:
        scene.await_recovery()
        while optimizer.steps < STEPS or (scene.start == 0 and hvd.size() > 4 - len(victims)):
            for victim, step in victims:
                if scene.me == victim and optimizer.steps >= step and scene.first_time(f"late {victim}"):
                    scene.die("late")
            perhaps_sleep()
            optimizer.zero_grad()
            gradients_of(model, optimizer.steps, hvd.rank())
            optimizer.step()
            state.commit()

    state = hvd.elastic.TorchState(model, optimizer)
    state.register_reset_callbacks([scene.has_reset])
    train(state)
    return {"steps": optimizer.steps, "model": values_of(model)}


def test_survivors_go_on(tmp_path: Path) -> None:
    victims = [[0, 8], [2, 20]]
    ended = run_elastic(train_late, tmp_path, 4, victims, flags=["--min-np", "2"])
    assert ended.status == 0, ended.said
    assert len(ended.fired) == len(ended.results) == 2, ended.said
    steps = [result["steps"] for result in ended.results]
    if steps[0] == steps[1]:
        assert ended.results[0]["model"] == ended.results[1]["model"]


@on_ranks(2)
@pytest.mark.parametrize("first", ["step", "join"])
def test_an_optimizer_that_was_dropped_takes_no_part_on_any_rank(first: str) -> None:
    """One rank has freed it already. The other one has not, because it refers to itself."""
    gc.disable()
    try:
        p = leaf()
        dropped: Any = wrapped([p], wait_for=2)
        dropped.itself = dropped
        del dropped
        if hvd.rank() == 1:
            gc.collect()
        optimizer: Any = wrapped([p], wait_for=2)
        if first == "join":
            hvd.join()
        (p * 1.0).sum().backward()
        optimizer.step()
        hvd.join()
    finally:
        gc.enable()
