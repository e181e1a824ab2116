"""The collectives on tensors, against what every rank can compute for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

import horovodish.torch as hvd
from horovodish.errors import DuplicateNameError, MismatchError, NotInitializedError, UnsupportedTensorError
from support.model import FLOATS, INTEGERS, OPS, difference, reduced, values
from support.on_ranks import on_ranks
from support.tensors import array_of, tensor_of


@on_ranks(1, 3, (2, "mpi_ring"))
def test_every_op_and_dtype() -> None:
    for op, dtype, shape in product(OPS, [*INTEGERS, *FLOATS], [(7,), (3, 1001)]):
        arrays = [values(dtype, shape, rank, op) for rank in range(hvd.size())]
        expected = reduced(arrays, op)
        own = tensor_of(arrays[hvd.rank()])
        result = hvd.allreduce(own, op=getattr(hvd, op), name=f"{op} {dtype} {shape}")
        assert result.dtype == own.dtype
        assert difference(array_of(result), expected, 4.0 * hvd.size()) == "", (op, dtype, shape)
        assert torch.equal(own, tensor_of(arrays[hvd.rank()]))
        hvd.allreduce_(own, op=getattr(hvd, op))
        assert torch.equal(own, result)


@on_ranks(1, 3, (2, "mpi_ring"))
def test_every_dtype_moves() -> None:
    for dtype in ["bool", *INTEGERS, *FLOATS]:
        tensors = [tensor_of(values(dtype, (rank + 2, 3), rank)) for rank in range(hvd.size())]
        own = tensors[hvd.rank()]
        assert torch.equal(hvd.allgather(own), torch.cat(tensors))
        root = hvd.size() - 1
        same_shape = own[:2].clone()
        sent = hvd.broadcast(same_shape, root)
        assert torch.equal(sent, tensors[root][:2])
        assert torch.equal(same_shape, own[:2])
        assert hvd.broadcast_(same_shape, root) is same_shape
        assert torch.equal(same_shape, tensors[root][:2])


@on_ranks(1, 3, (2, "mpi_ring"))
def test_factors() -> None:
    own = torch.full((5,), float(hvd.rank() + 1))
    ranks = sum(range(1, hvd.size() + 1))
    result = hvd.allreduce(own, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    assert torch.equal(result, torch.full((5,), 2.0 * ranks))
    handle = hvd.allreduce_async(own, op=hvd.Average, prescale_factor=2.0)
    torch.testing.assert_close(hvd.synchronize(handle), torch.full((5,), 2.0 * ranks / hvd.size()))


@on_ranks(1, 3, (2, "mpi_ring"))
def test_the_average_argument() -> None:
    own = torch.ones(3)
    assert torch.equal(hvd.allreduce(own, average=False), torch.full((3,), float(hvd.size())))
    assert torch.equal(hvd.allreduce(own, True), own)
    with pytest.raises(ValueError, match="both given"):
        hvd.allreduce(own, average=True, op=hvd.Sum)


@on_ranks(1, 3, (2, "mpi_ring"))
def test_in_place_means_in_place() -> None:
    own = torch.full((4,), float(hvd.rank()))
    address = own.data_ptr()
    version = own._version
    assert hvd.allreduce_(own, op=hvd.Sum) is own
    handle = hvd.allreduce_async_(own, op=hvd.Max)
    assert hvd.synchronize(handle) is own
    assert hvd.synchronize(hvd.broadcast_async_(own, 0)) is own
    assert (own.data_ptr(), own[0].item()) == (address, sum(range(hvd.size())))
    assert own._version > version, "autograd must notice"
    assert hvd.allreduce_(torch.nn.Parameter(own)).requires_grad


@on_ranks(1, 3, (2, "mpi_ring"))
def test_strides() -> None:
    transposed = torch.arange(6.0).reshape(2, 3).t() + hvd.rank()
    mean = (hvd.size() - 1) / 2
    torch.testing.assert_close(hvd.allreduce(transposed), torch.arange(6.0).reshape(2, 3).t() + mean)
    assert torch.equal(hvd.allgather(transposed)[:3], torch.arange(6.0).reshape(2, 3).t())
    assert torch.equal(hvd.broadcast(transposed, 0), torch.arange(6.0).reshape(2, 3).t())
    assert torch.equal(hvd.allreduce(torch.ones(1).expand(4), op=hvd.Sum), torch.full((4,), float(hvd.size())))


@on_ranks(1, 3, (2, "mpi_ring"))
def test_no_dimensions_and_no_elements() -> None:
    scalar = torch.tensor(hvd.rank())
    assert hvd.allreduce(scalar, op=hvd.Sum).item() == sum(range(hvd.size()))
    assert hvd.broadcast(scalar, hvd.size() - 1).item() == hvd.size() - 1
    assert torch.equal(hvd.allgather(scalar), torch.arange(hvd.size()))
    assert hvd.allreduce(torch.empty(0, 3)).shape == (0, 3)
    assert hvd.broadcast(torch.empty(0), 0).shape == (0,)
    assert hvd.allgather(torch.empty(0, 2)).shape == (0, 2)
    rows = 3 if hvd.rank() == 0 else 0
    assert torch.equal(hvd.allgather(torch.ones(rows, 2)), torch.ones(3, 2))


@on_ranks(1, 3, (2, "mpi_ring"))
def test_many_handles() -> None:
    order = list(range(60)) if hvd.rank() % 2 else list(reversed(range(60)))
    handles = {i: hvd.allreduce_async(torch.full((i,), float(i)), op=hvd.Sum, name=f"many {i}") for i in order}
    for i, handle in handles.items():
        assert torch.equal(hvd.synchronize(handle), torch.full((i,), float(i * hvd.size())))
        assert hvd.poll(handle)
    gathered = [hvd.allgather_async(torch.full((i % 3,), hvd.rank())) for i in range(20)]
    for i, handle in enumerate(gathered):
        assert torch.equal(hvd.synchronize(handle), torch.arange(hvd.size()).repeat_interleave(i % 3))
    sent = hvd.broadcast_async(torch.tensor([hvd.rank()]), 0)
    assert hvd.synchronize(sent).item() == 0


@on_ranks(1, 3, (2, "mpi_ring"))
def test_dropped_handles() -> None:
    for i in range(30):
        hvd.allreduce_async(torch.full((50_000,), 1.0), name=f"dropped {i}")
        hvd.allgather_async(torch.full((hvd.rank() + 1, 1000), i), name=f"dropped too {i}")
    hvd.barrier()


@on_ranks(1, 3, (2, "mpi_ring"))
def test_compressed() -> None:
    own = torch.linspace(-1, 1, 1001) * (hvd.rank() + 1)
    expected = torch.linspace(-1, 1, 1001) * sum(range(1, hvd.size() + 1))
    for compression, tolerance in [(hvd.Compression.fp16, 2e-3), (hvd.Compression.bf16, 2e-2)]:
        result = hvd.allreduce(own, op=hvd.Sum, compression=compression)
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
        assert not torch.equal(result, expected), "it was not compressed"
        integers = hvd.allreduce(torch.arange(4), op=hvd.Sum, compression=compression)
        assert torch.equal(integers, torch.arange(4) * hvd.size())


@on_ranks(1, 3, (2, "mpi_ring"))
def test_objects() -> None:
    own = {"rank": hvd.rank(), "tensor": torch.arange(hvd.rank()), "text": "x" * 1000 * hvd.rank()}
    of_all = hvd.allgather_object(own)
    assert [entry["rank"] for entry in of_all] == list(range(hvd.size()))
    assert [len(entry["tensor"]) for entry in of_all] == list(range(hvd.size()))
    root = hvd.size() - 1
    received = hvd.broadcast_object(own if hvd.rank() == root else None, root_rank=root)
    assert len(received["text"]) == 1000 * root
    assert (received is own) == (hvd.rank() == root)


@on_ranks(1, 3, (2, "mpi_ring"))
def test_refusals() -> None:
    refused(lambda: hvd.allreduce_(torch.ones(4, 4).t()), "not contiguous, so no result can be written")
    refused(lambda: hvd.broadcast_(torch.ones(4)[::2], 0), "use the operation without _")
    refused(lambda: hvd.allreduce(torch.ones(2, dtype=torch.bool)), "bool tensors cannot be reduced")
    refused(lambda: hvd.allgather(torch.ones(2, dtype=torch.complex64)), "dtype torch.complex64 is not supported")
    refused(lambda: hvd.allreduce(torch.eye(3).to_sparse()), "torch.sparse_coo is not supported; pass tensor.to_dense")
    refused(lambda: hvd.allreduce(torch.ones(2, device="meta")), "device meta is not supported")
    refused(lambda: hvd.broadcast([1.0], 0), "expected a torch.Tensor, got list")
    with pytest.raises(ValueError, match="root_rank=9 does not exist"):
        hvd.broadcast(torch.ones(1), 9)
    with pytest.raises(TypeError, match="expected a handle"):
        hvd.synchronize(torch.ones(1))
    # The others wait for the first rank, so the name is in use for sure.
    if hvd.rank() > 0:
        handle = hvd.allreduce_async(torch.ones(3), name="twice")
        with pytest.raises(DuplicateNameError, match="twice"):
            hvd.allreduce_async(torch.ones(3), name="twice")
    hvd.barrier()
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(3), name="twice")
    hvd.synchronize(handle)


def refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(UnsupportedTensorError, match=message):
        call()


@on_ranks(3, (2, "mpi_ring"))
def test_mismatches() -> None:
    last = hvd.rank() == hvd.size() - 1
    with pytest.raises(MismatchError, match=r"'w'.*shape"):
        hvd.allreduce(torch.ones(3 if last else 2), name="w")
    with pytest.raises(MismatchError, match=r"'w'.*dtype"):
        hvd.broadcast_(torch.ones(3, dtype=torch.float64 if last else torch.float32), 0, name="w")
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="w").item() == hvd.size()


def test_before_init() -> None:
    with pytest.raises(NotInitializedError, match=r"call hvd.init\(\) before allreduce\(\)"):
        hvd.allreduce(torch.ones(1))
