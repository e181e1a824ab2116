"""What sharded optimizers refuse, and that nothing is lost by it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import horovodish.torch as hvd
from horovodish.errors import MismatchError, UnsupportedTensorError
from support.on_ranks import on_ranks
from support.sharded import (
    OPTIMIZERS,
    Model,
    batches,
    pair,
    pairs_of_ranks,
    plain_adam,
    train,
)


@pytest.mark.soak
@on_ranks(4)
def test_what_fails_in_one_set_fails_in_all() -> None:
    own = pairs_of_ranks()
    model = nn.Linear(5, 7 if hvd.rank() == 2 else 5)
    optimizer = hvd.DistributedOptimizer(plain_adam(model.parameters()), shard="states", shard_set=own)
    with pytest.raises(MismatchError, match=r"the ranks build|disagree about its shape|cannot take part"):
        model(torch.ones(2, 5)).sum().backward()
    assert optimizer._reducer._outdated
    hvd.barrier()


@pytest.mark.soak
@on_ranks(4)
def test_sets_that_cannot_share() -> None:
    own, everybody = pairs_of_ranks(), hvd.global_process_set
    three = hvd.add_process_set([0, 1, 2])

    def wrapped(shard_set: hvd.ProcessSet) -> None:
        hvd.DistributedOptimizer(plain_adam(Model().parameters()), shard="states", shard_set=shard_set)

    with pytest.raises(ValueError, match=r"shard_set: rank 3 is not in its set of ranks \[0, 1, 2\]"):
        wrapped(three)
    with pytest.raises(ValueError, match=r"rank 0 has 3 ranks in its set, and rank 3 has 2. Remedy: sets of the same"):
        wrapped(three if hvd.rank() < 3 else own)
    crossing = hvd.add_process_set([0, 1])
    with pytest.raises(ValueError, match=r"rank 0 shares with rank 1, which does not share with the same ranks"):
        wrapped(crossing if hvd.rank() == 0 else own)
    with pytest.raises(ValueError, match=r"the set of rank 0 is not in use\. Remedy: add it with hvd.add_process_set"):
        wrapped(hvd.ProcessSet([hvd.rank(), (hvd.rank() + 1) % 4]))
    with pytest.raises(ValueError, match=r'shard_set= needs shard="states"'):
        hvd.DistributedOptimizer(plain_adam(Model().parameters()), shard_set=own)
    model = Model()
    optimizer = hvd.DistributedOptimizer(plain_adam(model.parameters()), shard="states", shard_set=own)
    with pytest.raises(ValueError, match=r"no sharded optimizer of a process set.*Remedy: leave process_set="):
        hvd.elastic.TorchState(model, optimizer)
    wrapped(everybody)


@on_ranks(2)
def test_what_reads_a_whole_gradient_raises() -> None:
    _, _, model, _optimizer = pair(OPTIMIZERS["SGD"], "states")
    model(batches(1)[0]).backward()
    gradient = model.inner.weight.grad
    assert gradient.shape == model.inner.weight.shape and "105 elements" in repr(gradient)
    for read in (
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda: gradient.norm(),
        lambda: gradient.numpy(),
        lambda: gradient.mul_(2),
        lambda: torch.cat([each.grad.flatten() for each in model.inner.parameters()]),
    ):
        with pytest.raises((UnsupportedTensorError, RuntimeError), match=r"with shard=|numpy"):
            read()


@on_ranks(2)
def test_a_step_that_raises_leaves_the_parameters() -> None:
    _, _, model, optimizer = pair(OPTIMIZERS["SGD"], "states")
    train(model, optimizer, 1)
    whole = [id(each) for each in optimizer.param_groups[0]["params"]]
    optimizer.param_groups[0]["momentum"] = "none"
    model(batches(1)[0]).backward()
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.9
    train(model, optimizer, 2)
    assert [id(each) for each in optimizer.param_groups[0]["params"]] == whole


@on_ranks(2)
def test_converted_models_are_an_error() -> None:
    for convert in (lambda model: model.to(memory_format=torch.channels_last), lambda model: model.bfloat16()):
        model = nn.Conv2d(3, 4, 2)
        optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), shard="states")
        convert(model)
        for parameter in model.parameters():
            parameter.grad = None
        if model.weight.dtype is torch.float32:
            model(torch.ones(1, 3, 4, 4)).sum().backward()
        with pytest.raises(ValueError, match="Remedy: convert the model"):
            optimizer.step()


@on_ranks(2)
def test_what_is_refused() -> None:
    model = Model()
    with pytest.raises(ValueError, match=r"shard='all' is not known. Remedy: \"states\", \"gradients\""):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), shard="all")
    with pytest.raises(ValueError, match=r'Adafactor looks at whole tensors.*Remedy: shard_by="parameter"'):
        hvd.DistributedOptimizer(torch.optim.Adafactor(model.parameters()), shard="states")
    with pytest.raises(ValueError, match="SparseAdam looks at all parameters"):
        hvd.DistributedOptimizer(torch.optim.SparseAdam(model.parameters()), shard="states", shard_by="parameter")
    with pytest.raises(ValueError, match=r"shard_by='tensor' is not known. Remedy: \"element\""):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), shard="states", shard_by="tensor")
    with pytest.raises(ValueError, match=r'shard_by= needs shard="states"'):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), shard_by="parameter")
    with pytest.raises(ValueError, match="op=Adasum"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), op=hvd.Adasum, shard="states")
    averaging = type("Averaging", (torch.optim.SGD,), {"train": lambda self: None, "eval": lambda self: None})
    with pytest.raises(ValueError, match=r"train\(\) and eval\(\) of Averaging look for the state of whole"):
        hvd.DistributedOptimizer(averaging(model.parameters(), 0.1), shard="states")
    complex_one = [nn.Parameter(torch.ones(3, dtype=torch.complex64))]
    with pytest.raises(UnsupportedTensorError, match="no complex parameters"):
        hvd.DistributedOptimizer(torch.optim.SGD(complex_one, 0.1), shard="states")
    old = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(4, 5)).backward()
    old.step()
    with pytest.raises(ValueError, match="that has made steps cannot become sharded"):
        hvd.DistributedOptimizer(old, model.named_parameters(), shard="states")
    _, _, model, optimizer = pair(OPTIMIZERS["AdamW"], "states")
    train(model, optimizer, 1)
    with pytest.raises(ValueError, match=r"call full_state_dict\(root=0\) on every rank"):
        optimizer.state_dict()
    for make_copy in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ValueError, match="sharded optimizer cannot be copied"):
            make_copy(optimizer)
    with pytest.raises(ValueError, match=r"(?s)sharded.*load_state_dict"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    model(batches(1)[0]).backward()
    model.inner.weight.grad = torch.ones_like(model.inner.weight)
    with optimizer.skip_synchronize(), pytest.raises(ValueError, match="was not reduced"):
        optimizer.step()


@on_ranks(2)
def test_parts_that_would_move_are_an_error() -> None:
    _, _, model, optimizer = pair(OPTIMIZERS["AdamW"], "states")
    train(model, optimizer, 2)
    with pytest.raises(
        ValueError, match=r"full_state_dict\(root=2\): the ranks that share the state are \[0, 1\]\. Remedy: root=0"
    ):
        optimizer.full_state_dict(root=2)
    left = optimizer.param_groups[0]["params"].pop()
    with pytest.raises(ValueError, match="a parameter has left a sharded optimizer"):
        optimizer.zero_grad()
    optimizer.param_groups[0]["params"].append(left)
    train(model, optimizer, 2)
    hvd.shutdown()
    hvd.init(comm=[1, 0])
    with pytest.raises(ValueError, match="has parts for 2 ranks"):
        train(model, optimizer, 1)


@on_ranks(2, 4)
def test_a_rank_that_joins_is_an_error() -> None:
    """With sets that have the whole state each, it is one for the ranks of its set, and for those with its part."""
    options = {"shard_set": pairs_of_ranks()} if hvd.size() == 4 else {}
    _, _, model, optimizer = pair(OPTIMIZERS["SGD"], "states", **options)
    train(model, optimizer, 2)
    if hvd.rank() == 1:
        hvd.join()
        return
    if hvd.rank() == 2:
        model(batches(1)[0]).backward()
        hvd.join()
        return
    with pytest.raises(MismatchError, match=r"join\(\), and its part of the parameters"):
        model(batches(1)[0]).backward()
    hvd.join()
