"""SyncBatchNorm: N ranks compute what torch's own batch normalization computes of the joined batch on one process."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import horovodish.torch as hvd
from horovodish.collectives import adapter
from horovodish.errors import MismatchError
from support.on_ranks import on_ranks
from support.tensors import sets_with_this_rank

CHANNELS = 4
OWN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-10, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def batches(sizes: list[int], *rest: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """One batch per rank, each with a mean and scale of its own."""
    generator = torch.Generator().manual_seed(len(rest))
    return [
        (torch.randn(n, CHANNELS, *rest, generator=generator) * (rank + 1) + 3 * rank).to(dtype)
        for rank, n in enumerate(sizes)
    ]


def agree(reference: Any, inputs: list[Tensor], process_set: hvd.ProcessSet, steps: int = 2, dtype: Any = None) -> None:
    """The converted `reference` on this rank's batch gives this rank's part of what it gives of all of them."""
    module = hvd.convert_sync_batchnorm(copy.deepcopy(reference), process_set)
    module = copy.deepcopy(module)
    assert isinstance(module, hvd.SyncBatchNorm)
    tolerance = TOLERANCE[dtype or inputs[0].dtype]
    sizes, own = [len(batch) for batch in inputs], process_set.rank()
    for step in range(steps):
        joined = (torch.cat(inputs) * (step + 1)).requires_grad_()
        mine = (inputs[own] * (step + 1)).requires_grad_()
        slope = torch.linspace(-1, 1, joined.numel()).reshape(joined.shape).square().to(joined.dtype)
        expected, result = reference(joined), module(mine)
        (expected * slope).sum().backward()
        (result * slope.split(sizes)[own]).sum().backward()
        assert result.dtype == mine.dtype
        close(result, expected.split(sizes)[own], tolerance)
        close(mine.grad, joined.grad.split(sizes)[own], tolerance)
        for theirs, ours in zip(reference.parameters(), module.parameters(), strict=True):
            close(hvd.allreduce(ours.grad, op=hvd.Sum, process_set=process_set), theirs.grad, tolerance)
        for theirs, ours in zip(reference.buffers(), module.buffers(), strict=True):
            assert theirs.dtype == ours.dtype
            close(ours, theirs, tolerance)
    other = type(reference)(CHANNELS, **{key: getattr(reference, key) for key in ("affine", "track_running_stats")})
    other.load_state_dict(module.state_dict())
    module.load_state_dict(reference.state_dict())


def close(result: Any, expected: Any, tolerance: float) -> None:
    scale = float(expected.abs().max()) if expected.numel() else 1.0
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance * max(1.0, scale))


def affine_with_values(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.uniform_(parameter, 0.5, 2.0, generator=torch.Generator().manual_seed(1))
    return module


def every_configuration(process_set: hvd.ProcessSet) -> None:
    size = process_set.size()
    for rest, momentum, affine, tracked in product(
        [(), (5,), (3, 2), (2, 1, 2)], [0.3, None], [True, False], [True, False]
    ):
        reference = OWN[2 + len(rest)](CHANNELS, 1e-3, momentum, affine, tracked)
        agree(
            affine_with_values(reference), batches([3] * size, *rest), process_set, steps=3 if momentum is None else 1
        )


def every_dtype(process_set: hvd.ProcessSet) -> None:
    """Every dtype for the module and its input, and an input of less precision than the module."""
    for dtype, of_module in [*[(dtype, dtype) for dtype in TOLERANCE], (torch.bfloat16, torch.float32)]:
        reference = affine_with_values(nn.BatchNorm2d(CHANNELS)).to(of_module)
        inputs = batches([5] * process_set.size(), 3, 3, dtype=dtype)
        agree(reference, inputs, process_set, steps=1, dtype=dtype)


def uneven_batches(process_set: hvd.ProcessSet) -> None:
    size = process_set.size()
    for sizes in ([1 + 3 * rank for rank in range(size)], [0, 1, 2][:size], [4, 0, 0][:size]):
        if sum(sizes):
            agree(affine_with_values(nn.BatchNorm1d(CHANNELS)), batches(sizes, 6), process_set)
    channels_last = [x.contiguous(memory_format=torch.channels_last) for x in batches([2] * size, 3, 3)]
    agree(affine_with_values(nn.BatchNorm2d(CHANNELS)), channels_last, process_set)


def a_large_mean(process_set: hvd.ProcessSet) -> None:
    """Sums of squares in float32 would leave nothing of the variance, or make it negative."""
    inputs = [1e4 + batch for batch in batches([8] * process_set.size(), 16)]
    joined = torch.cat(inputs).double()
    module = hvd.SyncBatchNorm(CHANNELS, process_set=process_set)
    result = module(inputs[process_set.rank()])
    expected = nn.functional.batch_norm(joined, None, None, training=True).float().split(8)[process_set.rank()]
    torch.testing.assert_close(result, expected, rtol=1e-2, atol=2e-3)
    variance = joined.transpose(0, 1).flatten(1).var(1)
    torch.testing.assert_close(module.running_var, (0.9 + 0.1 * variance).float(), rtol=1e-6, atol=0.0)


def layers_in_a_model(process_set: hvd.ProcessSet) -> None:
    """Several layers, one of them used twice; training with the gradients of all ranks equals one process."""
    shared = nn.BatchNorm1d(6)
    reference = nn.Sequential(
        nn.Linear(5, 6), shared, nn.Tanh(), nn.Linear(6, 6), nn.ModuleDict({"inner": shared})["inner"]
    )
    reference.add_module("again", nn.BatchNorm1d(6))
    reference.register_module("same", reference[1])
    for parameter in reference.parameters():
        nn.init.uniform_(parameter, -1, 1, generator=torch.Generator().manual_seed(parameter.numel()))
    before = copy.deepcopy(reference)
    model = hvd.convert_sync_batchnorm(copy.deepcopy(before), process_set)
    assert model[1] is model[4] is model.same
    assert list(model.state_dict()) == list(reference.state_dict())
    size, own = process_set.size(), process_set.rank()
    for step in range(5):
        inputs = [
            torch.randn(2 + rank, 5, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in range(size)
        ]
        reference(torch.cat(inputs)).square().sum().backward()
        model(inputs[own]).square().sum().backward()
        for theirs, ours in zip(reference.parameters(), model.parameters(), strict=True):
            hvd.allreduce_(ours.grad, op=hvd.Sum, process_set=process_set)
            for parameter in (theirs, ours):
                parameter.data -= 0.01 * parameter.grad
                parameter.grad = None
    for (key, theirs), ours in zip(reference.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, msg=lambda told, key=key: f"{key}: {told}")
        for_all = hvd.allgather(ours.reshape(1, -1), process_set=process_set)
        assert (for_all == for_all[0]).all(), f"{key} differs between the ranks"


@on_ranks(1, 3)
def test_on_process_sets() -> None:
    with sets_with_this_rank() as sets:
        for process_set in sets:
            every_configuration(process_set)
            every_dtype(process_set)
            uneven_batches(process_set)
            a_large_mean(process_set)
            layers_in_a_model(process_set)


@on_ranks(1, 3)
def test_gradient_checkpointing() -> None:
    for reentrant in (False, True):
        module, twin = hvd.SyncBatchNorm(CHANNELS), hvd.SyncBatchNorm(CHANNELS)
        inputs = [batches([3] * hvd.size(), 2)[hvd.rank()].requires_grad_() for _ in range(2)]
        module(inputs[0]).square().sum().backward()
        torch.utils.checkpoint.checkpoint(twin, inputs[1], use_reentrant=reentrant).square().sum().backward()
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad)


@on_ranks(1, 3)
def test_evaluation_is_local() -> None:
    """Each rank may make as many calls as it likes; without running statistics the rank's own batch counts."""
    for tracked in (True, False):
        module = hvd.SyncBatchNorm(CHANNELS, track_running_stats=tracked).eval()
        reference = nn.BatchNorm1d(CHANNELS, track_running_stats=tracked).eval()
        reference.load_state_dict(module.state_dict())
        for _ in range(hvd.rank()):
            batch = batches([3])[0] * (hvd.rank() + 1)
            torch.testing.assert_close(module(batch), reference(batch))


@on_ranks(1, 3)
def test_no_sample_anywhere() -> None:
    module = hvd.SyncBatchNorm(CHANNELS)
    before = copy.deepcopy(module.state_dict())
    empty = torch.empty(0, CHANNELS, 3, requires_grad=True)
    output = module(empty)
    output.sum().backward()
    assert output.shape == (0, CHANNELS, 3)
    assert torch.equal(module.running_mean, before["running_mean"])
    assert torch.equal(module.running_var, before["running_var"])


@on_ranks(1, 3)
def test_too_few_values() -> None:
    """One value per channel on all ranks together has no variance; every rank says so."""
    module = hvd.SyncBatchNorm(CHANNELS)
    with pytest.raises(ValueError, match="xpected more than 1 value per channel when training"):
        module(torch.ones(1 if hvd.rank() == 0 else 0, CHANNELS))
    assert not module.running_mean.any()


@on_ranks(1, 3)
def test_what_need_not_travel() -> None:
    """The gradient of an input that needs none is not asked for: each rank runs backward as often as it likes."""
    module = hvd.SyncBatchNorm(CHANNELS)
    loss = module(batches([3] * hvd.size())[hvd.rank()]).sum()
    if hvd.rank() == 0:
        loss.backward()
    hvd.barrier()


@on_ranks(1, 3)
def test_one_collective_in_either_direction() -> None:
    submitted: list[str] = []
    original = adapter.submit
    adapter.submit = lambda request, *rest, **more: submitted.append(request.name) or original(request, *rest, **more)
    try:
        inputs = batches([3] * hvd.size(), 2, 2)[hvd.rank()].requires_grad_()
        hvd.SyncBatchNorm(CHANNELS)(inputs).sum().backward()
    finally:
        adapter.submit = original
    first = [name for name in submitted if not name.endswith(".gradient")]
    assert submitted == ([*first, f"{first[0]}.gradient"] if hvd.size() > 1 else [])
    assert len(first) < 2


@on_ranks(3)
def test_one_rank_is_wrong() -> None:
    last = hvd.size() - 1
    module, right = hvd.SyncBatchNorm(CHANNELS), batches([3] * hvd.size())[0]
    wrong: list[tuple[str, Tensor]] = [
        (r"expected input of shape \(N, 4, ...\), got \(3, 5\)", torch.ones(3, 5)),
        (r"expected input of shape \(N, 4, ...\), got \(4,\)", torch.ones(4)),
        (r"expected input of a floating dtype, got torch.int64", torch.ones(3, 4, dtype=torch.int64)),
    ]
    for text, tensor in wrong:
        with pytest.raises(ValueError if hvd.rank() == last else MismatchError, match=text):
            module(tensor if hvd.rank() == last else right)
    agree(nn.BatchNorm1d(CHANNELS), batches([3] * hvd.size()), hvd.global_process_set)


@on_ranks(3)
def test_after_a_rank_has_joined() -> None:
    left = hvd.size() - 1
    if hvd.rank() < left:
        inputs = batches([3] * left, 2)
        joined, mine = torch.cat(inputs).requires_grad_(), inputs[hvd.rank()].requires_grad_()
        expected = nn.functional.batch_norm(joined, None, None, training=True)
        result = hvd.SyncBatchNorm(CHANNELS)(mine)
        torch.testing.assert_close(result, expected.split(3)[hvd.rank()])
        for output in (expected, result):
            output.pow(3).sum().backward()
        torch.testing.assert_close(mine.grad, joined.grad.split(3)[hvd.rank()], rtol=1e-4, atol=1e-4)
    hvd.join()


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Sequential(nn.ReLU(), nn.SyncBatchNorm(2)))


def test_conversion_keeps_everything() -> None:
    model = convolution().double().eval()
    model[1].weight.requires_grad_(False)
    tensors = {key: id(tensor) for key, tensor in (*model.named_parameters(), *model.named_buffers())}
    state = copy.deepcopy(model.state_dict())
    converted = hvd.convert_sync_batchnorm(model)
    assert converted is model
    assert {key: id(t) for key, t in (*model.named_parameters(), *model.named_buffers())} == tensors
    for layer in (model[1], model[2][1]):
        assert isinstance(layer, hvd.SyncBatchNorm)
        assert not layer.training and layer.process_set is hvd.global_process_set
    assert not model[1].weight.requires_grad
    assert "SyncBatchNorm(2, eps=1e-05" in repr(model)
    convolution().double().load_state_dict(model.state_dict())
    model.load_state_dict(state)
    assert hvd.convert_sync_batchnorm(model)[1] is model[1]


def test_conversion_of_one_layer_and_of_others() -> None:
    assert isinstance(hvd.convert_sync_batchnorm(nn.BatchNorm3d(2)), hvd.SyncBatchNorm)
    for other in (nn.InstanceNorm2d(2), nn.LayerNorm(2), nn.Linear(2, 2)):
        assert hvd.convert_sync_batchnorm(other) is other
    lazy = nn.Sequential(nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match=re.escape("does not know its channels yet; pass a batch through")):
        hvd.convert_sync_batchnorm(lazy)
    lazy(torch.ones(2, 3))
    assert hvd.convert_sync_batchnorm(lazy)[0].num_features == 3


def test_a_layer_can_be_saved() -> None:
    file = io.BytesIO()
    torch.save(hvd.SyncBatchNorm(2, momentum=None), file)
    file.seek(0)
    loaded: hvd.SyncBatchNorm = torch.load(file, weights_only=False)
    assert loaded.process_set is hvd.global_process_set and loaded.momentum is None


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_device_and_dtype(device: str) -> None:
    make: Callable[..., nn.Module] = hvd.SyncBatchNorm
    assert {(t.device.type, t.dtype) for t in make(2, device=device, dtype=torch.float64).parameters()} == {
        (device, torch.float64)
    }
