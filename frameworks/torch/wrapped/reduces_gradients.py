"""Wrapped optimizers whose gradients are reduced: with every op but Adasum."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from horovodish.gradients.options import GradientOptions, checked_passes
from horovodish.torch.gradients.reducer import Reducer
from horovodish.torch.names import Names
from horovodish.torch.wrapped.base import Distributed, check_once


class MaySkip(Distributed):
    """The base of classes that reduce gradients in all steps or in some."""

    _skips: bool

    @classmethod
    def _register(cls, optimizer: Any) -> None:
        optimizer._skips = False
        pre_hook = Optimizer.register_step_pre_hook(optimizer, _before_step)
        # Hooks that the user has registered are to see reduced gradients.
        optimizer._optimizer_step_pre_hooks.move_to_end(pre_hook.id, last=False)
        Optimizer.register_step_post_hook(optimizer, _after_step)
        super()._register(optimizer)

    def _gradient_reducer(self) -> Reducer | None:
        """The reducer of this step's gradients; None: each rank uses its own gradients."""
        raise NotImplementedError

    def _calling(self) -> AbstractContextManager[None]:
        """A context in which a step calls its closure."""
        return nullcontext()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context in which `step()` uses the gradients without reducing them. Not collective.

        Example:
            >>> optimizer.synchronize()
            >>> torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            >>> with optimizer.skip_synchronize():
            ...     optimizer.step()
        """
        self._skips = True
        try:
            yield
        finally:
            self._skips = False


class ReducesGradients(MaySkip):
    """With every op but Adasum."""

    _reducer: Reducer

    @classmethod
    def _reducer_of(cls, optimizer: Any, names: Names, options: GradientOptions) -> Reducer:
        return Reducer(names, options)

    @classmethod
    def _register(cls, optimizer: Any) -> None:
        weakref.finalize(optimizer, optimizer._reducer.remove_hooks).atexit = False
        super()._register(optimizer)

    def _gradient_reducer(self) -> Reducer:
        return self._reducer

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


def _before_step(
    optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    check_once(optimizer)
    reducer = optimizer._gradient_reducer()
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
    reducing = _reducing(closure, reducer, optimizer._calling)

    def changed(value: Any) -> Any:
        return reducing if value is closure else value

    return tuple(map(changed, args)), {key: changed(value) for key, value in kwargs.items()}


def _reducing(
    closure: Callable[..., Any], reducer: Reducer, calling: Callable[[], AbstractContextManager[None]]
) -> Callable[..., Any]:
    """The closure, followed by the reduction of what its backward did not reduce, such as gradients set by hand."""
    calls = 0

    @functools.wraps(closure)
    def reducing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if calls:
            reducer.called_again()
        calls += 1
        with calling():
            result = closure(*args, **kwargs)
            reducer.synchronize()
        return result

    return reducing


@_disable_dynamo
def _after_step(optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    reducer = optimizer._gradient_reducer()
    if reducer is not None:
        reducer.stepped()
