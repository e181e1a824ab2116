"""The learning rate for batches that grow with the number of ranks."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from horovodish import basics

__all__ = ["LinearScalingWarmup"]


class LinearScalingWarmup(LRScheduler):
    """Raises the learning rate step by step from the optimizer's own to a multiple of it, where it stays.

    N ranks compute the gradient of a batch N times as large, which bears a learning rate N times as large, though not
    in the first steps: lr(t) = lr * (1 + (factor - 1) * min(t / warmup_steps, 1)). Goyal et al., "Accurate, large
    minibatch SGD: training ImageNet in 1 hour", 2017, arXiv:1706.02677.

    It is one of torch's schedulers: call `step()` after every `optimizer.step()`, keep its `state_dict()` in
    checkpoints, and put the schedule that follows behind it with `torch.optim.lr_scheduler.SequentialLR`, or use both
    with `ChainedScheduler`. Not collective.

    Args:
        optimizer: with the learning rate that suits one process; wrapped by `DistributedOptimizer` or not.
        warmup_steps: how many steps the learning rate rises; 0 for none. Goyal et al. use those of 5 epochs.
        factor: of the learning rate in the end; the number of ranks when not given.
        last_epoch: the step that was last, when training is resumed without a state dict.

    Raises:
        ValueError: `warmup_steps` is negative, or `factor` is not positive.
        NotInitializedError: `factor` is not given, before `init()`.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scheduler = hvd.LinearScalingWarmup(optimizer, warmup_steps=5 * len(loader))
    """

    def __init__(
        self, optimizer: Optimizer, warmup_steps: int, factor: float | None = None, last_epoch: int = -1
    ) -> None:
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps} is negative; pass 0 for no warm-up")
        self.factor = float(basics.size() if factor is None else factor)
        if self.factor <= 0:
            raise ValueError(f"factor={factor} is not positive; leave it out for the number of ranks")
        self.warmup_steps = warmup_steps
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """The learning rate of each parameter group, in order."""
        progress = min(self.last_epoch / self.warmup_steps, 1.0) if self.warmup_steps else 1.0
        return [base * (1 + (self.factor - 1) * progress) for base in self.base_lrs]
