"""`DistributedOptimizer`: an optimizer that uses the gradients of all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from horovodish.collectives.reduce_ops import Adasum
from horovodish.elastic import membership
from horovodish.gradients.options import GradientOptions, TorchOptions, not_wrapped, takes
from horovodish.torch.ddp import check_no_ddp
from horovodish.torch.names import Names
from horovodish.torch.untraced import tell_dynamo
from horovodish.torch.wrapped.base import Distributed, let_step_call_hooks
from horovodish.torch.wrapped.goes_on import GoesOn
from horovodish.torch.wrapped.meets import Meets
from horovodish.torch.wrapped.reduces_gradients import ReducesGradients
from horovodish.torch.wrapped.reduces_steps import ReducesSteps
from horovodish.torch.wrapped.shares_state import SharesState

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["DistributedOptimizer"]

if membership.start() > 0:
    import torch._dynamo  # the first optimizer would import it, at a time when nobody trains

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


@takes(
    TorchOptions,
    "compression backward_passes_per_step op gradient_predivide_factor num_groups groups sparse_as_dense process_set",
)
def DistributedOptimizer(  # noqa: N802, Horovod's name
    optimizer: OptimizerT,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    *in_order: object,
    **options: Unpack[TorchOptions],
) -> OptimizerT:
    """Make `optimizer` use the gradients of all ranks. Every rank must call it, at the same point.

    It does not block, except with `shard_set` and with `sync=Hierarchical("host")`.

    `backward()` reduces the gradients while it runs, and returns when `p.grad` is reduced on this rank. So you can
    clip, unscale or log gradients between `backward()` and `step()`. In a job of one rank, and on a rank outside
    `process_set`, nothing is reduced and nothing is hooked.

    The optimizer stays the same object, with its state, options, hooks and schedulers. Its class becomes a subclass of
    its old class, with four more methods:

        synchronize()         reduce now all gradients that are not reduced yet. Horovod's scripts call it before they
                              clip; here it does nothing after a `backward()` that has reduced
        skip_synchronize()    a context in which `step()` does not reduce
        no_sync()             a context in which `backward()` does not reduce
        set_backward_passes_per_step(n)

    Rules for gradients:

    - A gradient that is None on every rank stays None. If only some ranks have one, the others contribute zeros.
    - If a step has several backwards, `p.grad` is the sum of their reduced gradients, for every op.
    - With `backward_passes_per_step=n`, a rank adds up the gradients of n-1 backwards, and the n-th backward reduces
      the sum, which is not divided by n. If `step()` comes earlier, as at the end of an epoch, it reduces the gradients
      so far, and a new window begins.
    - Every rank must reduce equally often: once for each window or `step()`.
    - If a gradient is sparse in the first reduction on any rank, its rows are sent: each rank adds up its own entries,
      and indices and values are gathered, without `compression`. `p.grad` is then sparse on every rank. If no rank has
      the gradient in the first reduction, or if it becomes sparse later, it is sent dense once, and is then dense.
    - If a parameter is wrapped twice, it belongs to the optimizer that was wrapped last.
    - Scripts may change `param_groups`, alike on every rank. The next `zero_grad()`, backward or `step()` notices it.
    - Copies and pickles of the optimizer have the class of the optimizer that you passed.
    - With `sparse_as_dense`, `p.grad` is sparse again after the reduction, because optimizers such as
      `torch.optim.SparseAdam` need sparse gradients.
    - With `process_set`, only its ranks need to make the call. On another rank the optimizer works as before.

    With `op=Adasum` gradients are not reduced. Every rank takes its own step, and `step()` then reduces the changes of
    the step: p = p before + Adasum of the ranks' (p after - p before). Parameters must be equal on all ranks at the
    start, and are equal after every step. Each rank has its own optimizer state. `step()` is the collective, so every
    rank must call it equally often, after any number of backwards. Use the learning rate for one rank, not multiplied
    by the number of ranks. Under `GradScaler` a rank whose gradients are not finite contributes no change, and the
    others continue.

    With `wait_for=k` a step goes on when k ranks have a gradient for it. `step()` of a late rank takes the steps
    that it has missed, in order, and its gradient is a part of the next step, so each gradient counts once. After the
    same number of steps, the parameters are the same on all ranks. `optimizer.steps` is the number of steps; use it in
    loops: `while optimizer.steps < 1000`. In a missed step, a late rank uses the learning rate and the other numbers of
    the parameter groups of a rank that was in time. The optimizer must have all of its parameters before the first
    step. `backward()` does not reduce.

    With `sync` the ranks meet from time to time, and each rank takes its own steps in between. So clipping, a closure
    and a scaler see this rank's gradients, schedulers count this rank's steps, and each rank has its own momentum and
    buffers, for example of batch normalization. Parameters must be equal on all ranks at the start, and are equal after
    a meeting. In a job of one rank nothing is reduced, but an outer optimizer steps. `step()` is the collective, so
    every rank must call it equally often. The optimizer has more methods:

        synchronized()        a context to evaluate or save in: the parameters have the values that a meeting
                              would give them now. At its end each rank gets its own values back
        end_round()           meet now, as at the end of training
        state_dict()          also has the progress of the round. If each rank saves it, and its model, within a round,
                              training can continue with the same bits. At the end of a round one rank's copy is enough

    Args:
        optimizer: a `torch.optim.Optimizer` except LBFGS, with parameters in host memory or on the GPU.
        named_parameters: `model.named_parameters()`. Messages use the names, and buckets the reverse of this order. It
            must have all parameters of the optimizer. Without it parameters are numbered.
        options: see `TorchOptions`.

    Returns:
        `optimizer`.

    Raises:
        ValueError: names that are not unique or do not cover the optimizer's parameters, an unknown `op` or
            `compression`, a predivide factor that is not positive or without `Average`, passes per step that are not a
            whole number, invalid `groups`, LBFGS, an optimizer that is wrapped already, a process set that is not in
            use, or an optimizer around another one whose `step()` a scheduler has replaced.
        TypeError: `optimizer` is no optimizer or has no `param_groups`, or `process_set` is no process set.
        UnsupportedTensorError: a parameter of a dtype or on a device that the engine cannot take.
        NotInitializedError: before `init()`.

        After an error the optimizer is as before.

        `backward()`, `step()` and `synchronize()` raise the errors of `horovodish.collectives`, such as MismatchError.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
        >>> optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        >>> loss.backward()
        >>> torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        >>> optimizer.step()
    """
    if not isinstance(optimizer, Optimizer):
        raise not_wrapped("DistributedOptimizer", "a torch.optim.Optimizer", optimizer)
    if isinstance(optimizer, Distributed):
        raise ValueError(f"this {type(optimizer).__name__} is wrapped already; wrap an optimizer once")
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"this {type(optimizer).__name__} has no param_groups, so nothing says which gradients to reduce; wrap its "
            "inner optimizer first, and make it with the wrapped one"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS decides by the loss how often it evaluates the closure; each rank has its own loss, so the ranks "
            "would take different steps. Remedy: use another optimizer"
        )
    checked = GradientOptions.checked(low_rank=True, **options)
    if checked.shard and checked.op is Adasum:
        raise ValueError("op=Adasum reduces steps of whole parameters. Remedy: leave shard= out, or use op=Average")
    checked.warn_of_one_bit(optimizer)
    tell_dynamo()
    names = Names(optimizer, named_parameters)
    checked.check_groups(parameter for _, parameter in names.in_order())
    check_no_ddp(parameter for _, parameter in names.in_order())
    let_step_call_hooks(optimizer)
    _kind_of(checked).install(optimizer, names, checked)
    return optimizer


def _kind_of(options: GradientOptions) -> type[Distributed]:
    if options.wait_for is not None:
        return GoesOn
    if options.sync is not None:
        return Meets
    if options.op is Adasum:
        return ReducesSteps
    return SharesState if options.shard else ReducesGradients


def is_distributed(optimizer: Optimizer) -> bool:
    """Whether an optimizer is wrapped, whichever ranks it reduces among."""
    return isinstance(optimizer, Distributed)


def keeps_own_state(optimizer: Optimizer) -> bool:
    """Whether the optimizer's state is each rank's own, as with `op=Adasum`, and not the same on all ranks."""
    return isinstance(optimizer, ReducesSteps) or getattr(optimizer, "_shards", None) is not None
