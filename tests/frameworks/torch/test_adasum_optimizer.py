"""`DistributedOptimizer(op=Adasum)`: every rank's own step, and the adaptive sum of what the steps have changed."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
from typing import Any

import pytest
import torch
from torch import nn

import horovodish
import horovodish.torch as hvd
from support.leaves import backward, leaf, own, wrapped
from support.model import adasum
from support.on_ranks import on_ranks

BATCH = 4
STEPS = 6

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def small_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    optimizer.zero_grad()
    model(torch.randn(BATCH, 3, generator=generator)).square().sum().backward()
    optimizer.step()


@on_ranks(3, (2, "mpi_ring"))
@pytest.mark.parametrize("options", [{}, {"groups": 2}], ids=["no groups", "groups"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_against_the_definition(kind: str, options: dict[str, Any]) -> None:
    """Each rank plays all ranks: models that start a step alike, optimizers that keep their own state."""
    make, model = OPTIMIZERS[kind], small_model()
    optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), op=hvd.Adasum, **options)
    played = [small_model() for _ in range(hvd.size())]
    optimizers = [make(one.parameters()) for one in played]
    for step in range(STEPS):
        start = [parameter.detach().clone() for parameter in played[0].parameters()]
        for rank, (one, its) in enumerate(zip(played, optimizers, strict=True)):
            train(one, its, step, rank)
        for index, parameters in enumerate(zip(*(one.parameters() for one in played), strict=True)):
            deltas = [(parameter.detach() - start[index]).double().flatten().numpy() for parameter in parameters]
            reduced = torch.from_numpy(adasum(deltas)).float().reshape(start[index].shape)
            for parameter in parameters:
                parameter.data.copy_(start[index] + reduced)
        train(model, optimizer, step, hvd.rank())
        for parameter, expected in zip(model.parameters(), played[0].parameters(), strict=True):
            torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-5)
        hvd.check_consistency(model, optimizer)


@on_ranks(3, (2, "mpi_ring"))
def test_missing_gradients() -> None:
    """A rank without a gradient contributes no change; of one that nobody has, nothing moves."""
    p, q = leaf(), leaf(1.0)
    optimizer = wrapped([p, q], op=hvd.Adasum)
    for _ in range(2):
        optimizer.zero_grad()
        if hvd.rank() == 0:
            backward([p], 2.0)
        optimizer.step()
    assert p.tolist() == [-4.0] * 3
    assert q.tolist() == [1.0] * 3
    assert (p.grad is None) == (hvd.rank() > 0)
    assert q.grad is None


@on_ranks(3, (2, "mpi_ring"))
def test_windows_and_methods() -> None:
    p = leaf()
    optimizer = wrapped([p], op=hvd.Adasum, backward_passes_per_step=3)
    for _ in range(3):
        with optimizer.no_sync():
            backward([p], 1.0)
    optimizer.synchronize()
    assert p.grad.tolist() == [3.0] * 3
    optimizer.step()
    assert p.tolist() == [-3.0] * 3, "what the ranks have in common counts once"
    optimizer.set_backward_passes_per_step(1)
    with pytest.raises(ValueError, match="must be a whole number"):
        optimizer.set_backward_passes_per_step(0)
    with pytest.raises(ValueError, match="not for op=Adasum"), optimizer.skip_synchronize():
        optimizer.step()
    with pytest.raises(ValueError, match="needs op=Average"):
        wrapped([p], op=hvd.Adasum, gradient_predivide_factor=2.0)


@on_ranks(3, (2, "mpi_ring"))
def test_later_and_frozen_parameters() -> None:
    p, q, r = leaf(), leaf(), leaf()
    q.requires_grad_(False)
    optimizer = wrapped([p, q], op=hvd.Adasum)
    for step in range(6):
        if step == 2:
            q.requires_grad_(True)
        if step == 4:
            optimizer.add_param_group({"params": [r], "lr": 2.0})
        optimizer.zero_grad()
        backward([p] + [q] * (step >= 2) + [r] * (step >= 4), 1.0)
        optimizer.step()
    assert [parameter[0].item() for parameter in (p, q, r)] == [-6.0, -4.0, -4.0]


@on_ranks(3, (2, "mpi_ring"))
def test_parameters_that_the_script_replaces() -> None:
    p, q, r = leaf(), leaf(), leaf()
    optimizer = wrapped([p, q], op=hvd.Adasum)
    for parameters in ([p, q], [p, r], [r]):
        optimizer.param_groups[0]["params"][:] = parameters
        optimizer.zero_grad()
        backward(parameters, 2.0 if hvd.rank() == 0 else 0.0)
        optimizer.step()
    assert [parameter[0].item() for parameter in (p, q, r)] == [-4.0, -2.0, -4.0]


@on_ranks(3, (2, "mpi_ring"))
def test_closures() -> None:
    p = leaf()
    optimizer = wrapped([p], op=hvd.Adasum)

    def closure() -> float:
        optimizer.zero_grad()
        backward([p], 1.0)
        return 1.5

    assert optimizer.step(closure) == 1.5
    assert p.tolist() == [-1.0] * 3


@on_ranks(3, (2, "mpi_ring"))
def test_grad_scaler() -> None:
    """A rank whose gradients are not finite contributes no change; its scale goes down, that of the others does not."""
    for fused in (False, True):
        for unscales in (False, True):
            p = leaf()
            optimizer = torch.optim.Adam([p], lr=0.5, fused=fused)
            optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            infinite = hvd.rank() == 0
            scaler.scale((p * (float("inf") if infinite else 3.0)).sum()).backward()
            if unscales:
                scaler.unscale_(optimizer)
                assert p.grad[0].item() == (float("inf") if infinite else 3.0)
            scaler.step(optimizer)
            scaler.update()
            torch.testing.assert_close(p.detach(), torch.full((3,), -0.5)), (fused, unscales)
            assert scaler.get_scale() == (2.0 if infinite else 4.0)


@on_ranks(3, (2, "mpi_ring"))
def test_compression() -> None:
    p = nn.Parameter(torch.zeros(4, 6).t())
    optimizer = wrapped([p], op=hvd.Adasum, compression=hvd.Compression.bf16)
    (p * own() / 3).sum().backward()
    optimizer.step()
    expected = adasum([torch.full((24,), -(2.0**rank) / 3).numpy() for rank in range(hvd.size())])[0]
    torch.testing.assert_close(p.detach(), torch.full((6, 4), float(expected)), rtol=2e-2, atol=0)
    assert p.stride() == (1, 6)


@pytest.mark.soak
@on_ranks(3, (2, "mpi_ring"))
def test_copies() -> None:
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Adasum)
    train(model, optimizer, 0, hvd.rank())
    assert type(copy.deepcopy(optimizer)) is torch.optim.Adam
    assert type(pickle.loads(pickle.dumps(optimizer))) is torch.optim.Adam
    assert isinstance(optimizer, torch.optim.Adam)
    plain = torch.optim.Adam(small_model().parameters())
    plain.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    train(model, optimizer, 1, hvd.rank())


@on_ranks(3, (2, "mpi_ring"))
def test_process_sets() -> None:
    alone = horovodish.add_process_set([1])
    p = leaf()
    optimizer = wrapped([p], op=hvd.Adasum, process_set=alone)
    backward([p], own())
    optimizer.step()
    assert p.tolist() == [-own()] * 3
    horovodish.remove_process_set(alone)


@on_ranks(3, (2, "mpi_ring"))
def test_over_from_gradients() -> None:
    """A parameter that was wrapped for gradients is no longer reduced in backward."""
    p = leaf()
    before = wrapped([p], op=hvd.Sum)
    optimizer = wrapped([p], op=hvd.Adasum)
    backward([p], own())
    assert p.grad.tolist() == [own()] * 3
    optimizer.step()
    assert type(before) is type(wrapped([leaf()])), "and the other wrapper still lives"


@pytest.mark.soak
@on_ranks(3, (2, "mpi_ring"))
def test_an_interrupt_in_the_wait() -> None:
    """Ctrl-C on rank 0 while it waits for the others: the step ends later, with what the rank had submitted."""
    p, q = (nn.Parameter(torch.zeros(1000)) for _ in range(2))
    optimizer = wrapped([p, q], op=hvd.Adasum)
    backward([p, q], 1.0)
    if hvd.rank() == 0:

        def step_until_control_c() -> None:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            optimizer.step()

        with pytest.raises(KeyboardInterrupt):
            step_until_control_c()
        taken = [torch.full((1000,), 100.0) for _ in range(100)]  # the memory that travels is not among it
        hvd.barrier()
        del taken
    else:
        hvd.barrier()
        optimizer.step()
    for steps in (1, 2):
        optimizer.zero_grad()
        assert [parameter.unique().tolist() for parameter in (p, q)] == [[-steps]] * 2
        assert p.grad is None
        backward([p, q], 1.0)
        optimizer.step()


class CannotTravelOnce:
    """A compression that raises for its second tensor."""

    left = 1

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        if tensor.any():
            cls.left -= 1
            if cls.left == -1:
                raise ZeroDivisionError
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, _: None) -> torch.Tensor:
        return tensor


@on_ranks(3, (2, "mpi_ring"))
def test_a_change_that_cannot_travel() -> None:
    p, q = leaf(), leaf()
    CannotTravelOnce.left = 1
    optimizer = wrapped([p, q], op=hvd.Adasum, compression=CannotTravelOnce)
    backward([p, q], 1.0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert p.tolist() == q.tolist() == [0.0] * 3
    optimizer.step()
    assert p.tolist() == q.tolist() == [-1.0] * 3
