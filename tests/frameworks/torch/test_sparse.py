"""sparse_allreduce_async: the sum of sparse tensors is that of the dense ones, on all ranks and on process sets."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import horovodish.torch as hvd
from horovodish.errors import DuplicateNameError, MismatchError, UnsupportedTensorError
from support.on_ranks import on_ranks
from support.tensors import sets_with_this_rank

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def entries(rank: int, count: int, shape: tuple[int, ...], sparse: int, dtype: torch.dtype) -> Tensor:
    """Some indices more than once, others on several ranks or on none."""
    generator = torch.Generator().manual_seed(rank)
    indices = torch.stack([torch.randint(0, length, (count,), generator=generator) for length in shape[:sparse]])
    low = 0 if dtype == torch.uint8 else -4
    values = torch.randint(low, 5, (count, *shape[sparse:]), generator=generator).to(dtype)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


def check(tensors: list[Tensor], process_set: hvd.ProcessSet) -> None:
    own, size = process_set.rank(), process_set.size()
    dense = [tensor.to(torch.float64).to_dense() for tensor in tensors]
    total = torch.stack(dense).sum(0)
    for op in (hvd.Sum, hvd.Average):
        result = hvd.sparse_allreduce_async(tensors[own], "sparse", op, process_set)()
        expected = total if op is hvd.Sum else total / size
        expected = expected if result.dtype.is_floating_point else expected.trunc()
        assert result.is_sparse and result.is_coalesced() and result.dtype == tensors[own].dtype
        torch.testing.assert_close(result.to_dense(), expected.to(result.dtype))


def every_dtype(process_set: hvd.ProcessSet) -> None:
    for dtype in FLOATS + INTEGERS:
        check([entries(rank, 5 + rank, (7, 3), 1, dtype) for rank in range(process_set.size())], process_set)


def every_shape(process_set: hvd.ProcessSet) -> None:
    for shape, sparse in [((9,), 1), ((4, 5), 2), ((4, 5, 2), 1), ((4, 5, 2), 2), ((3, 0), 1)]:
        check(
            [entries(rank, 4 * rank + 1, shape, sparse, torch.float32) for rank in range(process_set.size())],
            process_set,
        )


def nothing_on_some_ranks_or_on_all(process_set: hvd.ProcessSet) -> None:
    for counts in ([0, 3, 0], [0, 0, 0]):
        tensors = [entries(rank, counts[rank], (6, 2), 1, torch.float32) for rank in range(process_set.size())]
        check(tensors, process_set)


@on_ranks(1, 3)
def test_on_process_sets() -> None:
    with sets_with_this_rank() as sets:
        for process_set in sets:
            every_dtype(process_set)
            every_shape(process_set)
            nothing_on_some_ranks_or_on_all(process_set)


@on_ranks(1, 3)
def test_the_same_index_travels_once() -> None:
    """What a rank has of one index is added up before it is sent."""
    repeated = torch.sparse_coo_tensor(torch.zeros(1, 1000, dtype=torch.int64), torch.ones(1000), (2,))
    sent: list[int] = []
    original = Tensor.coalesce
    Tensor.coalesce = lambda self: sent.append(self._nnz()) or original(self)  # type: ignore[func-returns-value]
    try:
        result = hvd.sparse_allreduce_async(repeated, "once", hvd.Sum)()
    finally:
        Tensor.coalesce = original  # type: ignore[method-assign]
    assert sent == [1000, hvd.size()]
    assert result.to_dense()[0] == 1000 * hvd.size()


@on_ranks(1, 3)
def test_small_numbers_are_not_lost() -> None:
    """In float16, 2048 + 1 is 2048."""
    values = [2048.0, 1.0, 1.0][: hvd.size()]
    own = torch.sparse_coo_tensor([[0]], torch.tensor([values[hvd.rank()]]).half(), (1,))
    result = hvd.sparse_allreduce_async(own, "half", hvd.Sum)()
    assert result.values()[0] == torch.tensor(sum(values)).half()


@on_ranks(1, 3)
def test_gradients_of_an_embedding() -> None:
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    words = [torch.tensor([rank, rank, 3, 9 - rank]) for rank in range(hvd.size())]
    embedding(torch.cat(words)).square().mean().backward()
    expected = embedding.weight.grad.to_dense()
    embedding.weight.grad = None
    embedding(words[hvd.rank()]).square().mean().backward()
    finish = hvd.sparse_allreduce_async(embedding.weight.grad, "embedding", op=hvd.Average)
    embedding.weight.grad = finish()
    torch.testing.assert_close(embedding.weight.grad.to_dense(), expected)
    torch.optim.SparseAdam(embedding.parameters()).step()
    bits = hvd.allgather(embedding.weight.detach().reshape(1, -1))
    assert (bits == bits[0]).all()


@on_ranks(1, 3)
def test_in_any_order() -> None:
    turns = list(range(10)) if hvd.rank() % 2 else list(reversed(range(10)))
    finish = {
        turn: hvd.sparse_allreduce_async(torch.eye(turn + 1).to_sparse(), f"turn {turn}", hvd.Sum) for turn in turns
    }
    for turn in range(10):
        first = finish[turn]()
        torch.testing.assert_close(first.to_dense(), torch.eye(turn + 1) * hvd.size())
        assert finish[turn]() is first


@on_ranks(1, 3)
def test_wrong_arguments() -> None:
    sparse = torch.eye(2).to_sparse()
    calls: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (UnsupportedTensorError, "got a dense one", lambda: hvd.sparse_allreduce_async(torch.eye(2), "x", hvd.Sum)),
        (UnsupportedTensorError, "got list", lambda: hvd.sparse_allreduce_async([1.0], "x", hvd.Sum)),
        (UnsupportedTensorError, "bool tensors", lambda: hvd.sparse_allreduce_async(sparse.bool(), "x", hvd.Sum)),
        (
            UnsupportedTensorError,
            "pass tensor.to_sparse_coo()",
            lambda: hvd.sparse_allreduce_async(torch.eye(2).to_sparse_csr(), "x", hvd.Sum),
        ),
        (
            UnsupportedTensorError,
            "device meta",
            lambda: hvd.sparse_allreduce_async(sparse.to("meta"), "x", hvd.Sum),
        ),
        (ValueError, "is not for sparse tensors", lambda: hvd.sparse_allreduce_async(sparse, "x", hvd.Adasum)),
    ]
    for error, text, call in calls:
        with pytest.raises(error, match=re.escape(text)):
            call()
    hvd.barrier()
    if hvd.rank() > 0:  # rank 0 comes later, so that the name is in use
        finish = hvd.sparse_allreduce_async(sparse, "twice", hvd.Sum)
        with pytest.raises(DuplicateNameError, match="twice"):
            hvd.sparse_allreduce_async(sparse, "twice", hvd.Sum)
    hvd.barrier()
    if hvd.rank() == 0:
        finish = hvd.sparse_allreduce_async(sparse, "twice", hvd.Sum)
    assert finish().values()[0] == hvd.size()


@on_ranks(1, 3)
def test_disagreement() -> None:
    """Also where the sizes of gathered rows are the same."""
    size, last = hvd.size(), hvd.size() - 1
    if size == 1:
        return
    other = [
        (torch.zeros(3, 2).to_sparse(1), f"rank 0 has (2, 2) with 1 sparse dimensions, rank {last} has (3, 2) with 1"),
        (torch.zeros(2, 2).to_sparse(2), ""),
        (torch.zeros(2, 2, dtype=torch.float64).to_sparse(1), "dtype"),
    ]
    for tensor, text in other:
        finish = hvd.sparse_allreduce_async(
            tensor if hvd.rank() == last else torch.zeros(2, 2).to_sparse(1), "x", hvd.Sum
        )
        with pytest.raises(MismatchError, match=re.escape(text)):
            finish()


@on_ranks(3)
def test_after_a_rank_has_joined() -> None:
    left = hvd.size() - 1
    if hvd.rank() < left:
        tensors = [entries(rank, 5, (7, 3), 1, torch.float64) for rank in range(left)]
        result = hvd.sparse_allreduce_async(tensors[hvd.rank()], "joined", hvd.Average)()
        torch.testing.assert_close(result.to_dense(), torch.stack([t.to_dense() for t in tensors]).mean(0))
    hvd.join()
