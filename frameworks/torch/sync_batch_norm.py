"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from horovodish.collectives.operation import Operation
from horovodish.collectives.process_sets import ProcessSet, checked_id, global_process_set
from horovodish.collectives.reduce_ops import Sum
from horovodish.collectives.submission import RefuseOnError, generated_name
from horovodish.torch.adapter import TENSORS

__all__ = ["SyncBatchNorm", "convert_sync_batchnorm"]


class SyncBatchNorm(_BatchNorm):
    """Batch normalization with the mean and variance of the batches of all ranks, as if they were one batch.

    While training every call is collective: each rank must make it as often as the others, with any number of samples,
    also none, and must run the backward pass. It costs one collective in either direction. In evaluation mode nothing
    travels, and it does the same as `torch.nn.BatchNorm*d`. Its state dict is the same, too.

    torch's own kernels compute each rank's statistics, in float32, or float64 where the input is. The statistics travel
    and are combined as float64. The gradients of weight and bias are this rank's share, as for all parameters. Ranks
    that have joined do not count. There is no second derivative.

    Args:
        num_features: the number of channels, C.
        eps: is added to the variance.
        momentum: the weight of a new batch in the running statistics; None for the average of all batches.
        affine: with learnable weight and bias.
        track_running_stats: with running statistics. Without, evaluation mode uses the statistics of the rank's batch.
        process_set: the ranks whose batches count as one.
        device, dtype: of parameters and buffers.

    Shape:
        (N, C) or (N, C, ...); N and the dimensions after C may differ between ranks.

    Raises:
        ValueError: while training, the input has no second dimension or not C channels in it, is not of a floating
            dtype, or there is just one value per channel on all ranks together.
        UnsupportedTensorError: the input is neither in host memory nor on this rank's GPU.
        As `horovodish.collectives` lists.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), hvd.SyncBatchNorm(8), torch.nn.ReLU())
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_set = process_set

    def forward(self, input: Tensor) -> Tensor:
        """The normalized input. Collective while training; blocks."""
        if not self.training or self.process_set.size() == 1:
            return super().forward(input)
        identity = checked_id(self.process_set)
        name = generated_name("sync_batch_norm", identity)
        with RefuseOnError("allreduce", name, identity):
            self._check_input_dim(input)
        arguments = (input, self.weight, self.bias, self.eps, name, self.process_set)
        normalized: tuple[Tensor, ...] = _Normalization.apply(*arguments)
        output, mean, variance, count = normalized
        if math.prod(input.shape) <= self.num_features:  # otherwise there is no need to wait for a device
            _check_count(int(count), name)
        if self.track_running_stats:
            self._track(mean, variance, count)
        return output

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.size(1) != self.num_features:
            raise ValueError(f"expected input of shape (N, {self.num_features}, ...), got {tuple(input.shape)}")
        if not input.is_floating_point():
            raise ValueError(f"expected input of a floating dtype, got {input.dtype}")

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        batches, running_mean, running_var = self.num_batches_tracked, self.running_mean, self.running_var
        assert batches is not None and running_mean is not None and running_var is not None
        batches.add_(1)
        momentum = 1.0 / int(batches) if self.momentum is None else self.momentum
        for running, new in ((running_mean, mean), (running_var, variance * (count / (count - 1)))):
            # No samples anywhere: there is nothing new, as for torch's own.
            running.copy_(torch.where(count > 0, running.double().lerp(new, momentum), running))


def convert_sync_batchnorm(module: torch.nn.Module, process_set: ProcessSet = global_process_set) -> torch.nn.Module:
    """Replace every `torch.nn.BatchNorm*d` and `torch.nn.SyncBatchNorm` within a module by `SyncBatchNorm`. Local.

    The parameters and buffers are the same objects as before, so an optimizer that has them keeps them; dtype, device
    and training mode stay. Hooks of the replaced modules are not taken over.

    Args:
        module: any module, changed in place.
        process_set: the ranks whose batches count as one.

    Returns:
        `module`, or its replacement where it is a batch normalization itself.

    Raises:
        ValueError: a lazy module does not know its number of channels yet.

    Example:
        >>> model = hvd.convert_sync_batchnorm(torchvision.models.resnet18())
    """
    return _converted(module, process_set, {})


def _converted(
    module: torch.nn.Module, process_set: ProcessSet, done: dict[torch.nn.Module, torch.nn.Module]
) -> torch.nn.Module:
    if module not in done:  # a module may be used in several places, and must be afterwards
        done[module] = module
        if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
            done[module] = _replacement(module, process_set)
        for name, child in list(module._modules.items()):
            if child is not None:
                module._modules[name] = _converted(child, process_set, done)
    return done[module]


def _replacement(module: _BatchNorm, process_set: ProcessSet) -> SyncBatchNorm:
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        raise ValueError(f"{module} does not know its channels yet; pass a batch through the model before")
    replacement = SyncBatchNorm(
        module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats, process_set
    )
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        setattr(replacement, name, getattr(module, name))
    return replacement.train(module.training)


class _Normalization(torch.autograd.Function):
    """Gives the output, and of all ranks the mean, the biased variance and the number of values per channel."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        name: str,
        process_set: ProcessSet,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        count, total, squares = _summed(_moments(input), name, process_set).split([1, *[input.size(1)] * 2])
        mean = total / count
        variance = (squares / count - mean * mean).clamp_(min=0)
        inverse = (variance + eps).rsqrt()
        ctx.save_for_backward(input, weight, mean, inverse, count)
        ctx.name, ctx.process_set = f"{name}.gradient", process_set
        ctx.mark_non_differentiable(mean, variance, count)
        dtype = _wide_dtype(input)
        slope, offset = (None if each is None else each.to(dtype) for each in (weight, bias))
        output = functional.batch_norm(input, mean.to(dtype), variance.to(dtype), slope, offset, eps=eps)
        return output, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> Any:
        input, weight, mean, inverse, count = ctx.saved_tensors
        dtype = _wide_dtype(input)
        of_input = None
        products, sums = _sums(gradient, input, mean.to(dtype), inverse.to(dtype))
        if ctx.needs_input_grad[0]:
            both = torch.stack([sums, products]).double()
            means = _summed(both, ctx.name, ctx.process_set) / count
            scale = inverse if weight is None else inverse * weight
            slope, offset = (-scale * means[1] * inverse).to(dtype), (-scale * means[0]).to(dtype)
            wide = input.to(dtype)
            of_input = functional.batch_norm(wide, mean.to(dtype), torch.ones_like(slope), slope, offset, eps=0.0)
            of_input = of_input.addcmul_(gradient, _per_channel(scale.to(dtype), wide)).to(input.dtype)
        of_weight = products.to(weight.dtype) if ctx.needs_input_grad[1] else None
        of_bias = sums.to(weight.dtype) if ctx.needs_input_grad[2] else None
        return of_input, of_weight, of_bias, None, None, None


def _moments(input: Tensor) -> Tensor:
    """Number, sums and sums of squares of the values of each channel, as one vector of float64.

    The squares are squares of the difference from the rank's own mean: with squares of the values themselves, float32
    would lose the differences where the mean is large. For the same reason the rounding of the mean is corrected.
    """
    channels = input.size(1)
    count = math.prod([*input.shape[:1], *input.shape[2:]])
    if count == 0:
        return input.new_zeros(1 + 2 * channels, dtype=torch.float64)
    # In the dtype of the running statistics, which are of no further interest.
    running = input.new_zeros(2, channels, dtype=_wide_dtype(input))
    centre, variance = torch.batch_norm_update_stats(input, running[0], running[1], 0.0)
    rest = (input - _per_channel(centre, input)).sum([0, *range(2, input.dim())])
    centre = centre.double()
    total = count * centre + rest
    squares = count * variance.double() + 2 * centre * total - count * centre * centre
    # Not new_tensor(): it makes the host wait for a GPU.
    return torch.cat([total.new_full((1,), count), total, squares])


def _sums(gradient: Tensor, input: Tensor, mean: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """For each channel, the sums of the gradient times the normalized input, and of the gradient."""
    if input.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    ones = torch.ones_like(mean)
    _, products, sums = torch.ops.aten.native_batch_norm_backward(
        gradient, input, ones, None, None, mean, inverse, True, 0.0, [False, True, True]
    )
    return products, sums


def _summed(values: Tensor, name: str, process_set: ProcessSet) -> Tensor:
    return TENSORS.now(Operation("allreduce", name, process_set, Sum), values)


def _wide_dtype(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    """One value per channel, so that it can be combined with `like`."""
    return values.reshape(1, -1, *[1] * (like.dim() - 2))


def _check_count(count: int, name: str) -> None:
    if count == 1:
        raise ValueError(f"{name}: expected more than 1 value per channel when training, on all ranks together")
