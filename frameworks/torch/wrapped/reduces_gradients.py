"""Wrapped optimizers whose gradients are reduced: with every op but Adasum."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from horovodish.gradients.options import checked_passes
from horovodish.torch.gradients.reducer import Reducer
from horovodish.torch.gradients.steps import StepReducer
from horovodish.torch.shards.pieces import Shards
from horovodish.torch.wrapped.base import Distributed, MaySkip, check_once


class ReducesGradients(MaySkip, Distributed):
    """With every op but Adasum."""

    _reducer: Reducer

    def synchronize(self) -> None:
        """Reduce the gradients now, unless they are reduced. Collective; blocks.

        Raises:
            HorovodInternalError: the reduction failed.
        """
        self._reducer.synchronize()

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which `backward()` accumulates gradients on the rank and does not reduce. Not collective.

        The next backward outside of it reduces the sum, and so does `step()`. Every rank must do so alike. A closure's
        backwards within it do not reduce either; when the closure returns, `step()` reduces what they have added up.

        Example:
            >>> with optimizer.no_sync():
            ...     for inputs in batches[:-1]:
            ...         model(inputs).sum().backward()
            >>> model(batches[-1]).sum().backward()
            >>> optimizer.step()
        """
        return self._reducer.suspended()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backwards accumulate before the gradients are reduced. Every rank must do so alike.

        Args:
            passes: at least 1; counts from the next backward on.

        Raises:
            ValueError: `passes` is less than 1.
        """
        self._reducer.passes_per_step = checked_passes(passes)


def call_around_steps(optimizer: Optimizer) -> None:
    """Have gradients be reduced before a step that no backward has reduced."""
    pre_hook = Optimizer.register_step_pre_hook(optimizer, _before_step)
    # Hooks that the user has registered are to see reduced gradients.
    optimizer._optimizer_step_pre_hooks.move_to_end(pre_hook.id, last=False)  # type: ignore[attr-defined]
    Optimizer.register_step_post_hook(optimizer, _after_step)


def _before_step(
    optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    check_once(optimizer)
    reducer = _gradient_reducer(optimizer)
    if reducer is None:
        return None
    closure = kwargs["closure"] if kwargs.get("closure") is not None else next(filter(callable, args[1:]), None)
    if closure is None:
        if not optimizer._skips:
            reducer.synchronize()
        return None
    # The closure calls backward, and each of its calls must reduce.
    reducer.in_closure = True
    if optimizer._skips:
        return None
    reducing = _reducing(closure, reducer, getattr(optimizer, "_shards", None))

    def changed(value: Any) -> Any:
        return reducing if value is closure else value

    return tuple(map(changed, args)), {key: changed(value) for key, value in kwargs.items()}


def _gradient_reducer(optimizer: Any) -> Reducer | None:
    """What reduces an optimizer's gradients in this step; None: each rank uses its own."""
    reducer = optimizer._reducer
    found: Reducer | None = reducer.gradients if isinstance(reducer, StepReducer) else reducer
    return found


def _reducing(closure: Callable[..., Any], reducer: Reducer, shards: Shards | None) -> Callable[..., Any]:
    """The closure, followed by the reduction of what its backward did not reduce, such as gradients set by hand.

    It sees whole parameters.
    """
    calls = 0

    @functools.wraps(closure)
    def reducing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if calls:
            reducer.called_again()
        calls += 1
        if shards is not None:
            shards.leave()
        result = closure(*args, **kwargs)
        reducer.synchronize()
        if shards is not None:
            shards.enter()
        return result

    return reducing


@_disable_dynamo
def _after_step(optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    reducer = _gradient_reducer(optimizer)
    if reducer is not None:
        reducer.stepped()
