"""A rank that fails in the middle of a backward: training on the other raises, with its reason, and does not hang."""

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
