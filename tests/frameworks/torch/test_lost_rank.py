"""A rank that fails in training or does something else: on the other, training raises and says why. It never hangs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import horovodish.torch as hvd
from support.ranks import run_ranks_to_their_ends


def train_until_a_rank_fails() -> str:
    hvd.init()
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    loss = model(torch.ones(2, 3)).sum()
    if hvd.rank() == 1:
        # By then it has handed over the gradients of the last layer.
        model[0].weight.register_hook(lambda gradient: 1 / 0)
        loss.backward()
    with pytest.raises(hvd.RankLostError) as raised:
        loss.backward()
    with pytest.raises(hvd.RankLostError, match="rank 1"):
        optimizer.step()
    return str(raised.value)


def test_the_other_is_told_in_backward() -> None:
    outcomes = run_ranks_to_their_ends(train_until_a_rank_fails, 2)
    assert (outcomes[1].ended, outcomes[1].error_class) == ("raised", "ZeroDivisionError"), outcomes[1].output
    assert outcomes[0].ended == "returned", outcomes[0].output
    assert "rank 1 raised ZeroDivisionError: division by zero" in outcomes[0].result


def part_before_layouts_are_compared(optimizers: int) -> str:
    hvd.init()
    models = [nn.Linear(3, 2) for _ in range(optimizers)]
    made = [hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    loss = sum(model(torch.ones(2, 3)).sum() for model in models)
    with pytest.raises(hvd.StallError) as raised:
        loss.backward() if hvd.rank() == 0 else hvd.allreduce(loss.detach(), name="metric")
    assert len(made) == optimizers
    return str(raised.value)


@pytest.mark.soak
@pytest.mark.parametrize("optimizers", [1, 2])
def test_ranks_that_part_before_layouts_are_compared_raise(optimizers: int) -> None:
    """Because every rank waits, and not only after the shutdown time, which is 0 unless the user gives one."""
    env = {"HOROVODISH_STALL_CHECK_SHUTDOWN_TIME_SECONDS": "40"}
    for outcome in run_ranks_to_their_ends(part_before_layouts_are_compared, 2, args=(optimizers,), env=env):
        assert outcome.ended == "returned", outcome.output
        assert "every rank waits, but not for the same tensors" in outcome.result
        assert "'metric' was submitted by rank 1 but not by rank 0" in outcome.result
