"""The arguments of `DistributedOptimizer` that say who reduces what: process sets, groups, sparse gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import horovodish
import horovodish.torch as hvd
from horovodish.errors import UnsupportedTensorError
from support.leaves import backward, check, leaf, mean, own, total, wrapped
from support.on_ranks import on_ranks


@on_ranks(3, (2, "mpi_ring"))
def test_process_sets() -> None:
    ranks = [0, 2] if hvd.size() > 2 else [0]
    subset = horovodish.add_process_set(ranks)
    everybody, some = leaf(), leaf()
    optimizer, of_subset = wrapped([everybody]), wrapped([some], process_set=subset, op=hvd.Sum)
    for step in range(3):
        for one in (optimizer, of_subset):
            one.zero_grad()
        backward([everybody, some], own(step))
        check(everybody, mean(step))
        check(some, sum(2.0 ** (rank + 2 * step) for rank in ranks) if subset.included() else own(step))
        for one in (optimizer, of_subset):
            one.step()
    del of_subset
    alone = horovodish.add_process_set([1])
    p = leaf()
    of_one = wrapped([p], process_set=alone)
    backward([p], own())
    check(p, own())
    of_one.step()
    hvd.barrier()
    for process_set in (subset, alone):
        assert horovodish.remove_process_set(process_set)
    with pytest.raises(ValueError, match="is not in use"):
        wrapped([leaf()], process_set=alone)


def buckets_of(optimizer: Any) -> list[list[str]]:
    """The names of the tensors of each bucket."""
    recorded: list[Any] = []
    reducer = optimizer._reducer
    engine = reducer._engine

    class Recorder:
        def plan(self, name: str, op: Any, before: float, after: float, members: Any, *rest: Any, **sizes: int) -> Any:
            recorded.extend(members)
            return engine.plan(f"{name}.recorded", op, before, after, members, *rest, **sizes)

    reducer._engine = Recorder()
    reducer._make_plan()
    reducer._engine = engine
    numbers = sorted({number for *_, number in recorded})
    return [[name for name, *_, bucket in recorded if bucket == number] for number in numbers]


@on_ranks(3, (2, "mpi_ring"))
def test_groups_are_buckets() -> None:
    named = [(name, leaf()) for name in "abcdef"]
    a, _, c, d, _, f = (parameter for _, parameter in named)
    assert buckets_of(wrapped(named)) == [list("abcdef")]
    assert buckets_of(wrapped(named, groups=0)) == [list("abcdef")]
    assert buckets_of(wrapped(named, groups=3)) == [["e", "f"], ["c", "d"], ["a", "b"]]
    assert buckets_of(wrapped(named, groups=4)) == [["f"], ["d", "e"], ["c"], ["a", "b"]]
    assert buckets_of(wrapped(named, groups=9)) == [[name] for name in "fedcba"]
    assert buckets_of(wrapped(named, groups=[[f, a], (c, d)])) == [["c", "d"], ["b", "e"], ["a", "f"]]
    with pytest.warns(DeprecationWarning, match="pass groups="):
        assert buckets_of(wrapped(named, num_groups=3)) == [["e", "f"], ["c", "d"], ["a", "b"]]
    # A group travels as a unit even where its dtypes differ.
    mixed = [nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    optimizer = wrapped(mixed, groups=[mixed])
    assert buckets_of(optimizer) == [["group0.0", "group0.1", "group0.2"]]
    for _ in range(3):
        optimizer.zero_grad()
        sum((parameter * own()).sum().double() for parameter in mixed).backward()
        for parameter in mixed:
            torch.testing.assert_close(parameter.grad.double(), torch.full((2,), mean()).double(), rtol=1e-2, atol=0)


@on_ranks(3, (2, "mpi_ring"))
def test_groups_with_every_other_argument() -> None:
    for options in [
        {"gradient_predivide_factor": 4.0},
        {"compression": hvd.Compression.bf16},
        {"sparse_as_dense": True},
    ]:
        for groups in (2, 5):
            p, q, r = leaf(), leaf(), leaf()
            optimizer = wrapped([p, q, r], groups=groups, **options)
            for _ in range(3):
                optimizer.zero_grad()
                backward([p, q] if hvd.rank() else [p], 1.0)
                check(p, 1.0)
                torch.testing.assert_close(q.grad[0].item(), 1 - 1 / hvd.size(), rtol=1e-2, atol=0)
                assert r.grad is None
                optimizer.step()


@on_ranks(3, (2, "mpi_ring"))
def test_wrong_groups() -> None:
    p, q = leaf(), leaf()
    for groups, text in [
        (-1, "groups=-1 is not possible"),
        ([p, q], "list of lists of parameters, not of Parameter"),
        ([[p], [leaf()]], "groups: a Parameter of shape .* is not among the parameters that the optimizer trains"),
        ([[p, q], [p]], "a parameter in group 0 and in group 1"),
    ]:
        with pytest.raises(ValueError, match=text):
            wrapped([p, q], groups=groups)
    with pytest.raises(ValueError, match="num_groups= and groups= were both given"):
        wrapped([p, q], groups=1, num_groups=1)


@on_ranks(3, (2, "mpi_ring"))
def test_not_synchronized() -> None:
    for op, scale in [(hvd.Average, 1 / hvd.size()), (hvd.Sum, 1.0)]:
        p = leaf()
        optimizer = wrapped([p], op=op)
        for _ in range(2):
            optimizer.zero_grad()
            with optimizer.no_sync():
                backward([p], own(0))
                backward([p], own(1))
                check(p, own(0) + own(1))
            backward([p], own(2))
            check(p, scale * (total(0) + total(1) + total(2)))
            optimizer.step()
            # A step within it, or after it, reduces what there is.
            optimizer.zero_grad()
            with optimizer.no_sync():
                backward([p], own(1))
                optimizer.step()
                check(p, scale * total(1))
        optimizer.set_backward_passes_per_step(2)
        optimizer.zero_grad()
        with optimizer.no_sync():
            backward([p], own(0))
        backward([p], own(0))
        check(p, scale * 2 * total(0))


ROWS = 6


def embedded(weight: torch.Tensor, rows: list[int], factor: float) -> torch.Tensor:
    return nn.functional.embedding(torch.tensor(rows, dtype=torch.int64), weight, sparse=True).mul(factor).sum()


def embedding_gradient(weight: torch.Tensor, rows: list[int], factor: float) -> None:
    embedded(weight, rows, factor).backward()


def rows_of(*ranks_and_rows: tuple[float, list[int]]) -> torch.Tensor:
    """The dense sum of gradients that are a factor in some rows."""
    result = torch.zeros(ROWS, 2)
    for factor, rows in ranks_and_rows:
        for row in rows:
            result[row] += factor
    return result


def own_rows(rank: int) -> list[int]:
    return [rank, 4, 4, rank]


@on_ranks(3, (2, "mpi_ring"))
def test_sparse_gradients() -> None:
    """Rows that several ranks have, and rows that one rank has twice; with dense parameters beside them."""
    everybody = [(2.0**rank, own_rows(rank)) for rank in range(hvd.size())]
    for op, options, scale in [
        (hvd.Average, {}, 1 / hvd.size()),
        (hvd.Average, {"gradient_predivide_factor": 4.0}, 1 / hvd.size()),
        (hvd.Average, {"groups": 1}, 1 / hvd.size()),
        (hvd.Sum, {}, 1.0),
    ]:
        weight, dense = nn.Parameter(torch.zeros(ROWS, 2)), leaf()
        optimizer = wrapped([("weight", weight), ("dense", dense)], op=op, **options)
        for _ in range(3):
            optimizer.zero_grad()
            (dense * own()).sum().add(embedded(weight, own_rows(hvd.rank()), own())).backward()
            if op is hvd.Average:
                check(dense, mean())
            assert weight.grad.is_sparse
            assert weight.grad._nnz() == len({row for _, rows in everybody for row in rows})
            torch.testing.assert_close(weight.grad.to_dense(), scale * rows_of(*everybody))
            # Another backward adds its own.
            embedding_gradient(weight, [5], own())
            expected = rows_of(*everybody, *((2.0**rank, [5]) for rank in range(hvd.size())))
            torch.testing.assert_close(weight.grad.to_dense(), scale * expected)
            optimizer.step()


@on_ranks(3, (2, "mpi_ring"))
def test_sparse_on_some_ranks() -> None:
    """The first rank has no gradient, the last a dense one; later nobody has one."""
    last = hvd.size() - 1
    weight = nn.Parameter(torch.zeros(ROWS, 2))
    optimizer = wrapped([weight], op=hvd.Sum, backward_passes_per_step=2)
    if hvd.rank() == last:
        (weight * 1.0).sum().backward()
    elif hvd.rank():
        embedding_gradient(weight, [1], 1.0)
    else:
        embedding_gradient(weight, [2], 3.0) if last > 1 else embedding_gradient(weight, [1], 1.0)
    optimizer.step()
    expected = torch.ones(ROWS, 2) + (rows_of((1.0, [1]), (3.0, [2])) if last > 1 else rows_of((1.0, [1])))
    torch.testing.assert_close(weight.grad.to_dense(), expected)
    assert weight.grad.is_sparse
    optimizer.zero_grad()
    if hvd.rank() == last:
        embedding_gradient(weight, [3], 1.0)
    optimizer.step()
    torch.testing.assert_close(weight.grad.to_dense(), rows_of((1.0, [3])))
    optimizer.zero_grad()
    optimizer.step()
    assert weight.grad is None


@on_ranks(3, (2, "mpi_ring"))
def test_sparse_made_dense() -> None:
    """What travels is dense, and the gradient is sparse again: on every rank, also where it was None."""
    weight = nn.Parameter(torch.zeros(ROWS, 2))
    optimizer = torch.optim.SparseAdam([weight], lr=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, sparse_as_dense=True, compression=hvd.Compression.fp16)
    for _ in range(3):
        optimizer.zero_grad()
        if hvd.rank():
            embedding_gradient(weight, own_rows(hvd.rank()), own())
        optimizer.synchronize()
        expected = rows_of(*((2.0**rank, own_rows(rank)) for rank in range(1, hvd.size()))) / hvd.size()
        assert weight.grad.is_sparse
        torch.testing.assert_close(weight.grad.to_dense(), expected, rtol=1e-3, atol=0)
        optimizer.step()
    assert torch.equal(weight != 0, expected != 0), "only rows that have a gradient move"


@on_ranks(3, (2, "mpi_ring"))
def test_sparse_later() -> None:
    """What the first reduction has not shown is reduced all the same."""
    weight = nn.Parameter(torch.zeros(ROWS, 2))
    optimizer = wrapped([weight], op=hvd.Sum)
    for step in range(4):
        optimizer.zero_grad()
        if step % 2:
            embedding_gradient(weight, [1], own())
        else:
            (weight * own()).sum().backward()
        torch.testing.assert_close(weight.grad, rows_of((total(), [1])) if step % 2 else torch.full((ROWS, 2), total()))
        optimizer.step()
    # Not used at first: dense when it first comes, rows from then on.
    weight, dense = nn.Parameter(torch.zeros(ROWS, 2)), leaf()
    optimizer = wrapped([weight, dense])
    for step in range(4):
        optimizer.zero_grad()
        if step:
            embedding_gradient(weight, [1] if hvd.rank() else [], own())
            assert weight.grad.is_sparse == (step > 1)
            torch.testing.assert_close(weight.grad.to_dense(), rows_of((mean() - 1 / hvd.size(), [1])))
        backward([dense], own(step))
        check(dense, mean(step))


@on_ranks(3, (2, "mpi_ring"))
def test_two_sparse_optimizers_met_in_another_order() -> None:
    """The layouts are compared before anything is reduced, in whatever order the ranks meet the optimizers."""
    weights = [nn.Parameter(torch.zeros(ROWS, 2)) for _ in range(2)]
    optimizers = [wrapped([weight, leaf()]) for weight in weights]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x = torch.zeros(())
        for weight in weights if hvd.rank() else weights[::-1]:
            x = (nn.functional.embedding(torch.tensor([1]), weight, sparse=True) * own()).sum() + x
        x.backward()
        for weight in weights:
            torch.testing.assert_close(weight.grad.to_dense(), rows_of((mean(), [1])))


@pytest.mark.soak
@on_ranks(3, (2, "mpi_ring"))
def test_refused_sparse_gradients() -> None:
    weight = nn.Parameter(torch.zeros(ROWS, 2))
    optimizer = wrapped([("weight", weight)], op=hvd.Max)
    for _ in range(2):
        optimizer.zero_grad()
        with pytest.raises(
            UnsupportedTensorError, match=r"gradient of weight: it is sparse, and op=Max .*sparse_as_dense"
        ):
            embedding_gradient(weight, [hvd.rank()] if hvd.rank() == 0 else [], 1.0)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
