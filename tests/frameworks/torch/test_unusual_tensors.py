"""Tensors that are not simply numbers in memory: negated and conjugated views, complex, quantized, without memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import horovodish
import horovodish.torch as hvd
from horovodish.errors import MismatchError, UnsupportedTensorError
from support.leaves import check, wrapped
from support.on_ranks import on_ranks


def negated() -> torch.Tensor:
    """[-1, -2] times the number of this rank plus 1, which are 1 and 2 in memory."""
    return torch._neg_view(torch.tensor([1.0, 2.0]) * (hvd.rank() + 1))


class Negates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        gradient = gradients[0].detach()
        return torch.complex(torch.zeros_like(gradient), gradient).conj().imag


@on_ranks(2)
def test_negated_views() -> None:
    both, first = [[-1.0, -2.0], [-2.0, -4.0]], [-1.0, -2.0]
    assert hvd.allreduce(torch.tensor(1 + 2j).conj().imag, op=hvd.Sum).item() == -4.0
    assert hvd.allreduce(negated(), op=hvd.Max).tolist() == first
    assert hvd.grouped_allreduce([negated()], op=hvd.Min)[0].tolist() == both[1]
    assert hvd.allgather(negated().unsqueeze(0)).tolist() == both
    assert hvd.broadcast(negated(), 0).tolist() == first
    received = hvd.alltoall(negated())
    assert isinstance(received, torch.Tensor)
    assert received.tolist() == [both[0][hvd.rank()], both[1][hvd.rank()]]
    assert hvd.reducescatter(negated(), op=hvd.Sum).tolist() == [[-3.0], [-6.0]][hvd.rank()]
    own = negated()
    hvd.broadcast_parameters({"own": own})
    assert own.tolist() == first
    x = torch.ones(2, requires_grad=True)
    hvd.allreduce(x, op=hvd.Sum).backward(negated())
    assert x.grad is not None
    assert x.grad.tolist() == [-3.0, -6.0]
    for in_place in (hvd.allreduce_, lambda tensor: hvd.broadcast_(tensor, 0)):
        with pytest.raises(
            UnsupportedTensorError, match=r"a view that negates its memory.*use the operation without _"
        ):
            in_place(negated())
    with pytest.raises(UnsupportedTensorError, match=r"Tensor is a view that negates its memory.*resolve_neg\(\)"):
        horovodish.allreduce(negated())


@on_ranks(2)
def test_negated_gradients() -> None:
    """Only one number can negate its memory and be contiguous."""
    ops = (hvd.Sum, -3.0), (hvd.Max, -1.0), (hvd.Average, -1.5)
    for (op, expected), numbers in itertools.product(ops, [1, 4]):
        p = nn.Parameter(torch.zeros(numbers))
        optimizer = wrapped([p], op=op)
        for step in range(3):
            optimizer.zero_grad()
            # On one rank only, so that the ranks' memory has different signs.
            tensor = Negates.apply(p) if hvd.rank() == 0 or step == 2 else -p
            (tensor * (hvd.rank() + 1)).sum().backward()
            check(p, expected)


@on_ranks(2)
def test_tensors_without_memory_are_refused() -> None:
    with FakeTensorMode():
        fake = torch.ones(3)
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    lazy, powersgd = nn.LazyLinear(2), hvd.Compression.powersgd(2)
    calls: list[Callable[[], object]] = [
        lambda: hvd.allreduce(fake),
        lambda: hvd.allreduce_(freed),
        lambda: hvd.allgather(torch._efficientzerotensor(3)),
        lambda: torch.func.vmap(lambda row: hvd.broadcast(row, 0))(torch.ones(2, 2)),
    ]
    for call in calls:
        with pytest.raises(UnsupportedTensorError, match=r"has no memory of its own.*pass a plain tensor of this rank"):
            call()
    for call in (
        lambda: hvd.broadcast_parameters(lazy.state_dict()),
        lambda: hvd.DistributedOptimizer(torch.optim.SGD(lazy.parameters(), lr=0.1)),
        lambda: hvd.DistributedOptimizer(torch.optim.SGD(lazy.parameters(), lr=0.1), compression=powersgd),
    ):
        with pytest.raises(UnsupportedTensorError, match="has no shape yet; call the model with one batch before that"):
            call()
    with pytest.raises(UnsupportedTensorError, match=r"pass torch.view_as_real\(tensor.resolve_conj\(\)\)"):
        hvd.allreduce(torch.ones(2, dtype=torch.complex64))
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
        with pytest.raises(UnsupportedTensorError, match=r"a nested tensor is not supported; pass tensor.values\(\)"):
            hvd.allreduce(nested)


@on_ranks(2)
def test_complex_gradients() -> None:
    for op, expected in ((hvd.Average, 1.5 - 3j), (hvd.Sum, 3 - 6j)):
        for compression in (hvd.Compression.none, hvd.Compression.bf16):
            for shape in ((2, 3), (3,), ()):
                p = nn.Parameter(
                    torch.zeros(shape[::-1], dtype=torch.complex64).permute(tuple(range(len(shape))[::-1]))
                )
                optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), op=op, compression=compression)
                for _ in range(3):
                    optimizer.zero_grad()
                    (p * (1 + 2j) * (hvd.rank() + 1)).real.sum().backward()
                    assert p.grad is not None
                    assert torch.equal(p.grad, torch.full_like(p, expected))
                    optimizer.step()
    p = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(UnsupportedTensorError, match=r"torch.complex64 has no op=Max; use op=Average"):
        hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), op=hvd.Max)
    p = nn.Parameter(torch.zeros(2, dtype=torch.complex64) if hvd.rank() else torch.zeros(2, 2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
    with pytest.raises(MismatchError, match=r"group0.0 \(complex\)"):
        p.real.sum().backward()


@on_ranks(2)
def test_another_default_device() -> None:
    with torch.device("meta"):
        _, counts = hvd.alltoall(torch.ones(2, device="cpu"), splits=[1, 1])
        assert counts.tolist() == [1, 1]
        assert len(list(hvd.ResumableSampler(range(4)))) == 2  # type: ignore[arg-type]


@on_ranks(2)
def test_consistency() -> None:
    model = nn.Module()
    model.register_buffer("negated", torch._neg_view(torch.ones(2)) if hvd.rank() else -torch.ones(2))
    model.register_buffer(
        "conjugated", torch.full((2,), 1j).conj() if hvd.rank() else torch.full((2,), 1j).conj().resolve_conj()
    )
    hvd.check_consistency(model)
    scale = 0.1 * (hvd.rank() + 1)
    model.register_buffer("quantized", torch.quantize_per_tensor(torch.full((2,), scale), scale, 0, torch.qint8))
    with pytest.raises(MismatchError, match="buffer 'quantized' differs"):
        hvd.check_consistency(model)
