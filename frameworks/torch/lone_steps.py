"""Counts the steps of PyTorch's optimizers that are not wrapped."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from horovodish.gradients.lone_steps import Count, LoneSteps
from horovodish.torch.gradients.unwrapped import has_stepped
from horovodish.torch.optimizer import is_distributed

__all__: list[str] = []


def _watch(count: Count) -> Callable[[], object]:
    @_disable_dynamo
    def step(optimizer: Optimizer, *_: object) -> None:
        if not is_distributed(optimizer):
            has_stepped(optimizer)
            if not _may_reduce_elsewhere():
                count(type(optimizer).__name__, lambda: _trained_bytes(optimizer))

    return register_optimizer_step_pre_hook(step).remove


def _may_reduce_elsewhere() -> bool:
    """Whether `torch.distributed` may reduce the gradients, as DistributedDataParallel does over any backend."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _trained_bytes(optimizer: Optimizer) -> int:
    return sum(
        parameter.numel() * parameter.element_size()
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


_lone_steps = LoneSteps(
    _watch, "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())"
)
