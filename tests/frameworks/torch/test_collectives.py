"""What PyTorch offers besides allreduce, allgather and broadcast: every dtype, on process sets, in groups, and join."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import horovodish.torch as hvd
from horovodish.errors import MismatchError, UnsupportedTensorError
from support.model import FLOATS, INTEGERS, MOVED, OPS, difference, dtype_of, reduced, values
from support.on_ranks import on_ranks
from support.tensors import array_of, sets_with_this_rank, tensor_of

DTYPES = [*MOVED, *INTEGERS, *FLOATS]


def reduces_on(process_set: hvd.ProcessSet) -> None:
    own, size = process_set.rank(), process_set.size()
    arrays = [values("float32", (3, 5), rank) for rank in process_set.ranks]
    for op in OPS:
        result = hvd.allreduce(tensor_of(arrays[own]), op=getattr(hvd, op), process_set=process_set)
        assert not difference(array_of(result), reduced(arrays, op), 4.0 * size), (op, process_set)
    in_place = tensor_of(arrays[own])
    assert hvd.allreduce_(in_place, process_set=process_set) is in_place
    handle = hvd.allreduce_async(tensor_of(arrays[own]), process_set=process_set)
    assert torch.equal(hvd.synchronize(handle), in_place)
    again = tensor_of(arrays[own])
    assert hvd.synchronize(hvd.allreduce_async_(again, process_set=process_set)) is again
    assert torch.equal(again, in_place)
    hvd.barrier(process_set)


def scatters_on(process_set: hvd.ProcessSet) -> None:
    own, size = process_set.rank(), process_set.size()
    for op, dtype, rows in product(OPS, [*INTEGERS, *FLOATS], [0, 1, 2 * size, 2 * size + 1]):
        arrays = [values(dtype, (rows, 3), rank, op) for rank in process_set.ranks]
        tensor = tensor_of(arrays[own])
        result = hvd.reducescatter(tensor, op=getattr(hvd, op), process_set=process_set)
        base, more = divmod(rows, size)
        begin = base * own + min(own, more)
        expected = reduced(arrays, op)[begin : begin + base + (own < more)]
        assert result.dtype == tensor.dtype
        assert not difference(array_of(result), expected, 4.0 * size), (op, dtype, rows)
    handle = hvd.reducescatter_async(tensor, op=hvd.Product, process_set=process_set, postscale_factor=2.0)
    assert torch.equal(hvd.synchronize(handle), result * 2)


def gathers_on(process_set: hvd.ProcessSet) -> None:
    own = process_set.rank()
    for dtype in DTYPES:
        tensors = [tensor_of(values(dtype, (rank + 1, 3), rank)) for rank in process_set.ranks]
        assert torch.equal(hvd.allgather(tensors[own], process_set=process_set), torch.cat(tensors))
        handle = hvd.allgather_async(tensors[own].t().contiguous().t(), process_set=process_set)
        assert torch.equal(hvd.synchronize(handle), torch.cat(tensors))
        for root in process_set.ranks:
            sent = hvd.broadcast(tensors[own][:1], root, process_set=process_set)
            assert torch.equal(sent, tensors[process_set.ranks.index(root)][:1])
            into = tensors[own][:1].clone()
            handle = hvd.broadcast_async_(into, root, process_set=process_set)
            assert hvd.synchronize(handle) is into
            assert torch.equal(into, sent)


def exchanges_on(process_set: hvd.ProcessSet) -> None:
    own, size = process_set.rank(), process_set.size()
    splits = [[(2 * rank + 3 * to) % 4 for to in range(size)] for rank in range(size)]
    for dtype, columns in product(DTYPES, [(), (3,)]):
        tensors = [tensor_of(values(dtype, (sum(splits[i]), *columns), i)) for i in range(size)]
        expected = torch.cat([tensor.split(splits[i])[own] for i, tensor in enumerate(tensors)])
        rows, counts = hvd.alltoall(tensors[own], splits[own], process_set=process_set)
        assert torch.equal(rows, expected)
        assert torch.equal(counts, torch.tensor([row[own] for row in splits])) and counts.dtype == torch.int64
        handle = hvd.alltoall_async(tensors[own], splits[own], process_set=process_set)
        assert torch.equal(hvd.synchronize(handle)[0], expected)
    even = torch.arange(2 * size) + 100 * own
    expected = torch.cat([torch.arange(2) + 2 * own + 100 * rank for rank in range(size)])
    assert torch.equal(hvd.alltoall(even, process_set=process_set), expected)
    assert torch.equal(hvd.synchronize(hvd.alltoall_async(even, process_set=process_set)), expected)


def groups_on(process_set: hvd.ProcessSet) -> None:
    own, size = process_set.rank(), process_set.size()
    shapes: list[tuple[str, tuple[int, ...]]] = [("float32", (2, 3)), ("int64", (size,)), ("bfloat16", (5,))]
    arrays = [[values(dtype, shape, rank) for dtype, shape in shapes] for rank in process_set.ranks]
    group = [tensor_of(array) for array in arrays[own]]
    of_all = [[by_rank[i] for by_rank in arrays] for i in range(len(shapes))]
    given = [tensor.clone() for tensor in group]
    results = hvd.grouped_allreduce(group, name="group", op=hvd.Sum, process_set=process_set)
    for result, member in zip(results, of_all, strict=True):
        assert not difference(array_of(result), reduced(member, "Sum"), 4.0 * size)
    assert all(map(torch.equal, group, given))
    handle = hvd.grouped_allreduce_async(group, op=hvd.Sum, process_set=process_set)
    assert all(map(torch.equal, hvd.synchronize(handle), results))
    in_place = [tensor.clone() for tensor in group]
    addresses = [tensor.data_ptr() for tensor in in_place]
    assert hvd.grouped_allreduce_(in_place, op=hvd.Sum, process_set=process_set)[0] is in_place[0]
    assert all(map(torch.equal, in_place, results))
    again = [tensor.clone() for tensor in group]
    hvd.synchronize(hvd.grouped_allreduce_async_(again, op=hvd.Sum, process_set=process_set))
    assert all(map(torch.equal, again, results))
    assert addresses == [tensor.data_ptr() for tensor in in_place]
    gathered = hvd.grouped_allgather(iter(group), process_set=process_set)
    for result, member in zip(gathered, of_all, strict=True):
        assert torch.equal(result, torch.cat([tensor_of(array) for array in member]))
    later = hvd.synchronize(hvd.grouped_allgather_async(group, process_set=process_set))
    assert all(map(torch.equal, later, gathered))
    scattered = hvd.grouped_reducescatter(group, op=hvd.Sum, process_set=process_set)
    for result, whole in zip(scattered, results, strict=True):
        parts = whole.tensor_split(size) if len(whole) % size else whole.chunk(size)
        assert torch.equal(result, parts[own])
    later = hvd.synchronize(hvd.grouped_reducescatter_async(group, op=hvd.Sum, process_set=process_set))
    assert all(map(torch.equal, later, scattered))


def objects_on(process_set: hvd.ProcessSet) -> None:
    mine = {"rank": hvd.rank(), "tensor": torch.arange(hvd.rank())}
    of_all = hvd.allgather_object(mine, process_set=process_set)
    assert [entry["rank"] for entry in of_all] == process_set.ranks
    root = process_set.ranks[-1]
    assert len(hvd.broadcast_object(mine, root, process_set=process_set)["tensor"]) == root


@on_ranks(1, 3)
def test_on_process_sets() -> None:
    with sets_with_this_rank() as sets:
        for process_set in sets:
            reduces_on(process_set)
            scatters_on(process_set)
            gathers_on(process_set)
            exchanges_on(process_set)
            groups_on(process_set)
            objects_on(process_set)


@on_ranks(1, 3)
def test_adasum() -> None:
    own = torch.zeros(hvd.size(), dtype=torch.float64)
    own[hvd.rank()] = 3.0  # orthogonal to the others': nothing is in common
    torch.testing.assert_close(hvd.allreduce(own, op=hvd.Adasum), torch.full_like(own, 3.0))
    with pytest.raises(UnsupportedTensorError, match=r"op=Adasum needs floating-point numbers, not torch\.int32"):
        hvd.allreduce(torch.ones(2, dtype=torch.int32), op=hvd.Adasum)
    with pytest.raises(ValueError, match="op=Adasum is for allreduce"):
        hvd.reducescatter(own, op=hvd.Adasum)


@on_ranks(1, 3)
def test_counts_beyond_32_bits() -> None:
    """Rows without columns cost nothing, however many there are."""
    many = 2**33 + 1
    rows, counts = hvd.alltoall(torch.empty(many * hvd.size(), 0), [many] * hvd.size())
    assert rows.shape == (many * hvd.size(), 0)
    assert torch.equal(counts, torch.full((hvd.size(),), many))


@on_ranks(1, 3)
def test_splits_of_any_kind() -> None:
    size = hvd.size()
    own = torch.arange(2 * size)
    kinds: list[Any] = [(2,) * size, torch.full((size,), 2), torch.full((size,), 2, dtype=torch.int32)]
    for splits in kinds:
        rows, _ = hvd.alltoall(own, splits=splits, name="kinds")
        assert torch.equal(rows, (torch.arange(2) + 2 * hvd.rank()).repeat(size))
    with pytest.raises(ValueError, match=r"must be . whole numbers, one per rank"):
        hvd.alltoall(own, splits=torch.full((size,), 2.0))
    with pytest.raises(ValueError, match="this tensor of zero dimensions has no rows to send"):
        hvd.alltoall(torch.tensor(1.0))
    with pytest.raises(ValueError, match="this tensor of zero dimensions has no rows to deal out"):
        hvd.reducescatter(torch.tensor(1.0))


@on_ranks(1, 3)
def test_compression() -> None:
    group = [torch.full((hvd.size(), 2), 1 + 2**-11), torch.arange(hvd.size())]
    for result in (
        hvd.grouped_allreduce(group, compression=hvd.Compression.fp16),
        hvd.grouped_reducescatter(group, compression=hvd.Compression.fp16),
    ):
        assert (result[0].dtype, result[1].dtype) == (torch.float32, torch.int64)
        assert result[0].flatten()[0] == 1.0, "it was not compressed"
    assert hvd.reducescatter(group[0], compression=hvd.Compression.bf16).flatten()[0] == 1.0


@on_ranks(1, 3)
def test_denormals() -> None:
    """They are kept, whatever the thread that happens to reduce does with them elsewhere."""
    torch.set_flush_denormal(True)
    try:
        for dtype in FLOATS:
            bits = np.arange(1, 9, dtype=f"u{dtype_of(dtype).itemsize}")
            result = hvd.allreduce(tensor_of(bits.view(dtype_of(dtype))), op=hvd.Sum, prescale_factor=2.0)
            assert np.array_equal(array_of(result).view(bits.dtype), bits * 2 * hvd.size()), dtype
    finally:
        torch.set_flush_denormal(False)


@on_ranks(1, 3)
def test_copies_of_a_process_set() -> None:
    """What holds a set, such as a layer, may be copied and saved; it goes on with the same set."""
    sets = [hvd.global_process_set]
    if hvd.size() > 1:
        sets.append(hvd.add_process_set([0]))
    for process_set in sets:
        holder = {"set": process_set}
        assert copy.deepcopy(holder)["set"] is process_set
        file = io.BytesIO()
        torch.save(holder, file)
        file.seek(0)
        assert torch.load(file, weights_only=False)["set"] is process_set
    if hvd.size() > 1:
        hvd.remove_process_set(sets[1])
        assert copy.copy(sets[1]).ranks == [0]


@on_ranks(3)
def test_outside_of_a_process_set() -> None:
    first = hvd.add_process_set([0])
    own = torch.zeros(2)
    calls: list[Callable[..., Any]] = [
        hvd.allreduce,
        hvd.allreduce_,
        hvd.allgather,
        hvd.alltoall,
        hvd.reducescatter,
        hvd.allgather_async,
        lambda x, process_set: hvd.broadcast(x, 0, process_set=process_set),
        lambda x, process_set: hvd.grouped_allreduce([x], process_set=process_set),
        lambda x, process_set: hvd.grouped_allgather([x], process_set=process_set),
        lambda x, process_set: hvd.grouped_reducescatter([x], process_set=process_set),
        lambda x, process_set: hvd.sparse_allreduce_async(x.to_sparse(), "x", hvd.Sum, process_set),
        lambda x, process_set: hvd.barrier(process_set),
        lambda x, process_set: hvd.broadcast_object(x, process_set=process_set),
    ]
    for call in calls:
        if first.included():
            call(own, process_set=first)
        else:
            with pytest.raises(ValueError, match=f"rank {hvd.rank()} is not in process set"):
                call(own, process_set=first)
    if first.included():
        with pytest.raises(ValueError, match="root_rank=1 is not in the process set"):
            hvd.broadcast(own, 1, process_set=first)
    assert hvd.remove_process_set(first)


@on_ranks(3)
def test_one_rank_is_wrong() -> None:
    """The last rank makes the wrong call; it raises, the others raise its reason, and all go on."""
    last, four = hvd.size() - 1, torch.zeros(4)
    sparse = torch.eye(2).to_sparse()
    wrong: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
        ("expected a torch.Tensor, got list", lambda: hvd.allreduce(four), lambda: hvd.allreduce([1.0])),
        (
            "expected a torch.Tensor, got list",
            lambda: hvd.allreduce(four, compression=hvd.Compression.fp16),
            lambda: hvd.allreduce([1.0], compression=hvd.Compression.fp16),
        ),
        ("bool tensors cannot be reduced", lambda: hvd.allreduce_(four), lambda: hvd.allreduce_(four.bool())),
        ("is not a reduce op", lambda: hvd.allreduce(four), lambda: hvd.allreduce(four, op="sum")),
        ("is not a reduce op", lambda: hvd.allreduce(four), lambda: hvd.allreduce([1.0], op="sum")),
        ("is not a reduce op", lambda: hvd.grouped_allreduce([four]), lambda: hvd.grouped_allreduce([[1.0]], op="sum")),
        ("is for allreduce", lambda: hvd.reducescatter(four), lambda: hvd.reducescatter([1.0], op=hvd.Adasum)),
        (
            "compression='fp16' is not a compression",
            lambda: hvd.allreduce(four, compression=hvd.Compression.fp16),
            lambda: hvd.allreduce(four, compression="fp16"),
        ),
        ("is not contiguous", lambda: hvd.broadcast_(four, 0), lambda: hvd.broadcast_(torch.zeros(8)[::2], 0)),
        ("root_rank=9 does not exist", lambda: hvd.broadcast(four, 0), lambda: hvd.broadcast(four, 9)),
        ("device meta is not", lambda: hvd.allgather(four), lambda: hvd.allgather(torch.zeros(4, device="meta"))),
        ("pass tensor.to_dense()", lambda: hvd.reducescatter(four), lambda: hvd.reducescatter(four.to_sparse())),
        ("the group is empty", lambda: hvd.grouped_allgather([four]), lambda: hvd.grouped_allgather([])),
        ("the group is empty", lambda: hvd.grouped_allgather([four]), lambda: hvd.grouped_allgather(iter([]))),
        ("got one tensor", lambda: hvd.grouped_allgather([four]), lambda: hvd.grouped_allgather(four)),
        ("pass [tensor]", lambda: hvd.grouped_reducescatter([four]), lambda: hvd.grouped_reducescatter(four)),
        (
            "of the group share memory",
            lambda: hvd.grouped_allreduce_([four, torch.zeros(4)]),
            lambda: hvd.grouped_allreduce_([four, four]),
        ),
        ("got one tensor", lambda: hvd.grouped_allreduce_([four]), lambda: hvd.grouped_allreduce_(four)),
        ("must be", lambda: hvd.alltoall(torch.zeros(hvd.size())), lambda: hvd.alltoall(four, [9])),
        (
            "is not for sparse tensors",
            lambda: hvd.sparse_allreduce_async(sparse, "s", hvd.Sum)(),
            lambda: hvd.sparse_allreduce_async(sparse, "s", hvd.Max),
        ),
    ]
    for gradient in (False, True):
        four.requires_grad_(gradient)
        for text, right, call in wrong:
            with pytest.raises((ValueError, TypeError) if hvd.rank() == last else MismatchError, match=re.escape(text)):
                (call if hvd.rank() == last else right)()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


@on_ranks(1, 3)
def test_autograd_notices_what_is_written() -> None:
    """A leaf may be written in place, as by torch's own collectives, but not what a backward pass still needs."""
    leaf = torch.nn.Parameter(torch.full((3,), float(hvd.rank())))
    for write in (hvd.allreduce_, lambda x: hvd.broadcast_(x, 0), lambda x: hvd.grouped_allreduce_([x])):
        loss = (leaf**2).sum()
        write(leaf)
        assert leaf.is_leaf and leaf.requires_grad
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    with torch.inference_mode():
        assert hvd.allreduce_(torch.ones(2), op=hvd.Sum)[0] == hvd.size()


@on_ranks(1, 3)
def test_out_of_data() -> None:
    for _ in range(hvd.rank() + 1):  # the last rank has the most
        hvd.allreduce(torch.ones(2))
    last = hvd.join(device=0)
    assert last == hvd.size() - 1
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum)[0] == hvd.size()
