"""The base of the classes of all wrapped optimizers, and how an optimizer gets such a class."""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from horovodish.gradients.options import GradientOptions
from horovodish.torch.ddp import check_no_ddp
from horovodish.torch.names import Names


class Distributed:
    """The methods that wrapping adds to an optimizer's class."""

    wrapped_class: type[Optimizer]
    _reducer: Any
    synchronize: Callable[..., None]
    _is_checked: bool

    @classmethod
    def install(cls, optimizer: Any, names: Names, options: GradientOptions) -> None:
        """Make an optimizer one of this kind. An error leaves it as it was."""
        kind: Any = cls  # mypy mistakes the hash of a class for the hash of its objects
        new_class = _distributed_class(kind, optimizer.__class__)
        options.compare_before_sets()
        optimizer._reducer = cls._reducer_of(optimizer, names, options)
        cls._register(optimizer)
        optimizer._is_checked = False
        optimizer.__class__ = new_class

    @classmethod
    def _reducer_of(cls, optimizer: Any, names: Names, options: GradientOptions) -> Any:
        """The reducer for an optimizer. If it cannot be made, it leaves nothing behind."""
        raise NotImplementedError

    @classmethod
    def _register(cls, optimizer: Any) -> None:
        """Register the hooks of its steps. Cannot fail."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Every rank must add the same group at the same point."""
        this: Any = self
        self.wrapped_class.add_param_group(this, param_group)
        try:
            self._reducer.renew()
        except BaseException:
            del this.param_groups[-1]
            raise

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the wrapped class. If a backward or a step has raised, the reduction that it had begun ends first."""
        self.wrapped_class.zero_grad(self, *args, **kwargs)  # type: ignore[arg-type]
        if self._reducer.interrupted:
            self.synchronize()
            self.wrapped_class.zero_grad(self, *args, **kwargs)  # type: ignore[arg-type]
        self._reducer.zeroed()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class exists in this process only, and what it needs is bound to these parameters and this engine.
        this: Any = self
        return object.__new__, (self.wrapped_class,), this.__getstate__()


def let_step_call_hooks(optimizer: Optimizer) -> None:
    """Do what an optimizer around another one leaves out if it does not call `Optimizer.__init__()`.

    Raises:
        ValueError: something has replaced `step()`, with a function that does not call hooks.
    """
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        # Not by getattr(), which might give the dict of the optimizer within.
        if not isinstance(vars(optimizer).get(name), OrderedDict):
            setattr(optimizer, name, OrderedDict())
    if not getattr(type(optimizer).step, "hooked", False):
        if "step" in vars(optimizer):
            raise ValueError(
                f"step() of this {type(optimizer).__name__} was replaced, perhaps by a scheduler, and calls no hooks; "
                "wrap the optimizer first, then make the scheduler"
            )
        optimizer._patch_step_function()


# What optimizers have as well.
_OVERRIDDEN = (
    "add_param_group",
    "zero_grad",
    "_step_supports_amp_scaling",
    "__reduce_ex__",
    "state_dict",
    "load_state_dict",
    "step",
    "steps",
)


@functools.cache
def _distributed_class(kind: type[Distributed], wrapped: type[Optimizer]) -> type[Optimizer]:
    # The same class for the same base, so that isinstance, type() and caches by type see one. The wrapped class comes
    # first, because an object can only change to a class whose memory is laid out by its own.
    namespace = {"wrapped_class": wrapped, "__module__": __name__, "__doc__": wrapped.__doc__}
    own = {name: getattr(kind, name) for name in _OVERRIDDEN if hasattr(kind, name)}
    return type(f"Distributed{wrapped.__name__}", (wrapped, kind), namespace | own)


@_disable_dynamo
def check_once(optimizer: Any) -> None:
    """DistributedDataParallel may have come after the optimizer was wrapped."""
    if not optimizer._is_checked:
        optimizer._is_checked = True
        check_no_ddp(parameter for group in optimizer.param_groups for parameter in group["params"])


_STEP = Optimizer.profile_hook_step(lambda: None).__code__


def is_within_step(optimizer: Optimizer) -> bool:
    """Whether this `step()` was called by another one of the same object: each class on the way calls the hooks."""
    steps, frame = 0, sys._getframe(1).f_back
    while frame is not None:
        steps += frame.f_code is _STEP and frame.f_locals["args"][0] is optimizer
        frame = frame.f_back
    return steps > 1


@torch.no_grad()
def unscale(optimizer: Any) -> None:
    """The work that GradScaler leaves to an optimizer that supports scaling: unscale, or skip the step."""
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is None:
        return
    scale = optimizer.grad_scale
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if float(found_inf):
                parameter.grad = None
            elif parameter.grad is not None and scale is not None:
                parameter.grad.div_(scale)
    # Optimizers without AMP support assert that these are None, so clear them.
    optimizer.grad_scale = optimizer.found_inf = None
