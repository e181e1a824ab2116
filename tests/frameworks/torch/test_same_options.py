"""Ranks that wrap an optimizer with different options get an error at their first reduction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import horovodish
import horovodish.torch as hvd
from support.on_ranks import on_ranks


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))]


def train(optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        trained = [each for group in optimizer.param_groups for each in group["params"]]
        torch.stack([each.sum() for each in trained]).sum().backward()
        optimizer.step()


def wrapped(trained: list[nn.Parameter] | None = None, **options: Any) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(torch.optim.SGD(trained or parameters(), lr=0.1), **options)


DIFFERENT: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"backward_passes_per_step": 2}, "backward_passes_per_step= is 1 on rank 0, and 2 on rank 1"),
    ({"sparse_as_dense": True}, {}, "sparse_as_dense= is True on rank 0, and False on rank 1"),
    ({}, {"op": hvd.Adasum}, "op= is Average on rank 0, and Adasum on rank 1"),
    ({"op": hvd.Sum}, {}, "op= is Sum on rank 0, and Average on rank 1"),
    ({"sync": hvd.LocalSGD(2)}, {}, "sync= is LocalSGD(every=2) on rank 0, and None on rank 1"),
    ({"sync": hvd.LocalSGD(3, after=1)}, {}, "sync= is LocalSGD(every=3, after=1) on rank 0"),
    ({"sync": hvd.Sync(2)}, {"sync": hvd.Hierarchical("host", 2)}, "and Hierarchical(every=2) with within=host on"),
    ({"sync": hvd.Sync(2)}, {"sync": hvd.Sync(2, compression=hvd.Compression.int8)}, "with compression=Compress"),
    ({"wait_for": 1}, {}, "wait_for= is 1 on rank 0, and None on rank 1"),
    ({"wait_for": 1}, {"wait_for": 2}, "wait_for= is 1 on rank 0, and 2 on rank 1"),
    ({"wait_for": 1, "stale": 4}, {"wait_for": 1, "stale": 5}, "stale= is 4 on rank 0, and 5 on rank 1"),
    ({"shard": "states"}, {}, "shard= is 'states' on rank 0, and '' on rank 1"),
    ({"groups": 2}, {}, "groups= is 2 on rank 0, and None on rank 1"),
    ({"compression": hvd.Compression.fp16}, {}, "compression= is FP16Compressor on rank 0, and Compression.none on"),
    (
        {"compression": hvd.Compression.int8(start=2)},
        {"compression": hvd.Compression.int8},
        "compression= is Compression.int8 with start=2 on rank 0, and Compression.int8 on rank 1",
    ),
]


@on_ranks(2)
def test_different_options() -> None:
    """Each rank says so at its first reduction, and again if a script goes on."""
    hvd.barrier()
    for of_ranks in DIFFERENT:
        *options, text = of_ranks
        errors = []
        hvd.shutdown()
        hvd.init()
        try:
            optimizer = wrapped(**options[hvd.rank()])
            for _ in range(2):
                with pytest.raises(horovodish.MismatchError) as raised:
                    train(optimizer)
                errors.append(str(raised.value))
        except horovodish.MismatchError as error:  # where wrapping is collective
            errors = [str(error)] * 2
        for error in errors:
            assert error.startswith("optimizer 1: the ranks have wrapped it with different options: "), error
            assert text in error, (error, text)
            assert error.endswith("Remedy: pass the same options on every rank"), error


@on_ranks(2)
def test_groups_of_parameters() -> None:
    trained = parameters()
    optimizer = wrapped(trained, groups=[trained] if hvd.rank() else [trained[:1]])
    with pytest.raises(horovodish.MismatchError, match=r"groups= is \[\[\(2, 2\)\]\] on rank 0, and \[\[\(2, 2\), \(2"):
        train(optimizer)


@on_ranks(3)
def test_the_second_optimizer_of_a_process_set() -> None:
    ranks = hvd.add_process_set([0, 2])
    first = wrapped(process_set=ranks)
    second = wrapped(process_set=ranks, backward_passes_per_step=1 + hvd.rank())
    train(first)
    if hvd.rank() == 1:
        train(second)
        return
    text = r"optimizer 2 of ranks \[0, 2\]: .* backward_passes_per_step= is 1 on rank 0, and 3 on rank 2\."
    with pytest.raises(horovodish.MismatchError, match=text):
        train(second, 3)


@on_ranks(2)
def test_after_a_new_start_the_ranks_compare_again() -> None:
    """One rank goes on with its optimizer, as after a recovery. The other is new."""
    first = wrapped()
    train(first)
    hvd.shutdown()
    hvd.init()
    with pytest.raises(horovodish.MismatchError, match="backward_passes_per_step= is 1 on rank 0, and 2 on rank 1"):
        train(wrapped(backward_passes_per_step=2) if hvd.rank() else first)


@on_ranks(2)
def test_a_rank_that_has_joined() -> None:
    """It has no batch in the first epoch, and compares in the second one with those that had."""
    for other in (1, 2):
        optimizer = wrapped(backward_passes_per_step=other if hvd.rank() else 1)
        if hvd.rank() == 0:
            train(optimizer, 2)
        hvd.join()
        if other == 1:
            train(optimizer, 2)
            continue
        with pytest.raises(horovodish.MismatchError, match=r"optimizer 2: .* is 1 on rank 0, and 2 on rank 1"):
            train(optimizer, 2)


@on_ranks(2)
def test_passes_that_were_set_later_count() -> None:
    optimizer: Any = wrapped(backward_passes_per_step=1 + hvd.rank())
    optimizer.set_backward_passes_per_step(2)
    train(optimizer, 4)
