"""`DistributedOptimizer`: an optimizer whose gradients are those of all ranks."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from horovodish.collectives import Adasum, Average, ReduceOp, chosen_op
from horovodish.torch.compression import Compression, Compressor
from horovodish.torch.reducer import Reducer

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


def DistributedOptimizer(  # noqa: N802, Horovod's name
    optimizer: OptimizerT,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
) -> OptimizerT:
    """Make `optimizer` use the gradients of all ranks. Every rank must call it, at the same point; does not block.

    `backward()` reduces the gradients while it runs, and ends when `p.grad` is reduced on every rank. So gradients can
    be clipped, unscaled or logged between `backward()` and `step()` without further ado. In a world of one rank nothing
    is reduced and nothing is hooked.

    The optimizer is the same object afterwards, with the state, options, hooks and schedulers that it had; its class
    becomes a subclass of the one that it had, with three more methods:

        synchronize()         reduce now what is not reduced yet. Horovod's scripts call it before they clip; here it
                              has nothing to do after a `backward()` that has reduced
        skip_synchronize()    a context in which `step()` does not reduce
        set_backward_passes_per_step(n)

    What holds for gradients:

    - A gradient that is None on every rank stays None. Where only some ranks have one, the others contribute zeros.
    - Several backwards in one step: `p.grad` is the sum of what each of them would give, for every op.
    - With `backward_passes_per_step=n`, gradients accumulate on the rank for n-1 backwards and the n-th reduces their
      sum; it is not divided by n. When `step()` comes earlier, as at the end of an epoch, it reduces what there is
      and a new window begins.
    - Every rank must reduce equally often: one reduction for each window or `step()`.
    - Sparse gradients are refused. Copies and pickles of the optimizer are of the class that was wrapped.
    - A parameter that is wrapped again belongs to the optimizer that was wrapped last.

    Args:
        optimizer: any optimizer of torch's kind except LBFGS, over parameters in host memory.
        named_parameters: `model.named_parameters()`: names for messages, and the order in which the gradients are
            expected (backwards). All parameters of the optimizer must be among them. Without it they are numbered.
        compression: what travels instead of each gradient; see `Compression`.
        backward_passes_per_step: backwards that accumulate before the gradients are reduced.
        op: `Average` (the default), `Sum`, `Min`, `Max` or `Product`.
        gradient_predivide_factor: with `Average`, divides before the reduction by this factor f and after it by the
            number of ranks over f, to keep small dtypes in range.

    Returns:
        `optimizer`.

    Raises:
        ValueError: names that are not unique or do not cover the optimizer's parameters, an `op` that cannot be had, a
            predivide factor without `Average`, fewer than one pass per step, LBFGS, or an optimizer that is wrapped.
        UnsupportedTensorError: a parameter of a dtype or on a device that the engine cannot take.
        NotInitializedError: before `init()`.

        `backward()`, `step()` and `synchronize()` raise what `horovodish.collectives` lists, such as MismatchError.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
        >>> optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        >>> loss.backward()
        >>> torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        >>> optimizer.step()
    """
    if isinstance(optimizer, _Distributed):
        raise ValueError(f"this {type(optimizer).__name__} is wrapped already; wrap an optimizer once")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS decides by the loss how often it evaluates the closure; each rank has its own loss, so the ranks "
            "would part. Use another optimizer"
        )
    op = chosen_op(None, op)
    if op is Adasum:
        raise ValueError("op=Adasum is not available for an optimizer yet; use op=Average or op=Sum")
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor} needs op=Average")
    _check_passes(backward_passes_per_step)
    names = _Names(optimizer, named_parameters)
    reducer = Reducer(
        names.in_order(),
        op,
        compression,
        1.0 / gradient_predivide_factor,
        gradient_predivide_factor,
        backward_passes_per_step,
    )
    weakref.finalize(optimizer, reducer.remove_hooks).atexit = False
    distributed: Any = optimizer
    distributed.__class__ = _distributed_class(distributed.__class__)
    distributed._reducer = reducer
    distributed._names = names
    distributed._skips = False
    pre_hook = optimizer.register_step_pre_hook(_before_step)
    # Hooks that the user has registered are to see reduced gradients.
    optimizer._optimizer_step_pre_hooks.move_to_end(pre_hook.id, last=False)  # type: ignore[attr-defined]
    optimizer.register_step_post_hook(_after_step)
    return optimizer


class _Distributed:
    """What a wrapped optimizer's class has besides its own methods."""

    wrapped_class: type[Optimizer]
    _reducer: Reducer
    _names: _Names
    _skips: bool

    def synchronize(self) -> None:
        """Reduce the gradients now, unless they are reduced. Collective; blocks.

        Raises:
            HorovodInternalError: the reduction failed.
        """
        self._reducer.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context in which `step()` takes the gradients as they are. Not collective.

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

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backwards accumulate before the gradients are reduced. Every rank must do so alike.

        Args:
            passes: at least 1; counts from the next backward on.

        Raises:
            ValueError: `passes` is less than 1.
        """
        _check_passes(passes)
        self._reducer.passes_per_step = passes

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. After a backward that raised, what it had begun to reduce is brought to its end first."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        if self._reducer.interrupted:
            self._reducer.synchronize()
            super().zero_grad(set_to_none)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Every rank must add the same group at the same point."""
        super().add_param_group(param_group)  # type: ignore[misc]
        group: dict[str, Any] = self.param_groups[-1]  # type: ignore[attr-defined]
        self._reducer.add(self._names.of_added(len(self.param_groups) - 1, group))  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class exists in this process only, and what it needs is bound to these parameters and this engine.
        this: Any = self
        return object.__new__, (self.wrapped_class,), this.__getstate__()


@functools.cache
def _distributed_class(wrapped: type[Optimizer]) -> type[Optimizer]:
    # The same class for the same base, so that isinstance, type() and caches by type see one.
    namespace = {"wrapped_class": wrapped, "__module__": __name__, "__doc__": wrapped.__doc__}
    return type(f"Distributed{wrapped.__name__}", (_Distributed, wrapped), namespace)


def _before_step(optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if kwargs.get("closure") is not None or any(map(callable, args[1:])):
        # The closure calls backward, and each of its calls must reduce.
        optimizer._reducer.in_closure = True
    elif not optimizer._skips:
        optimizer._reducer.synchronize()


def _after_step(optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    optimizer._reducer.stepped()


def _check_passes(passes: int) -> None:
    if passes < 1:
        raise ValueError(f"backward_passes_per_step={passes} is not possible; it is at least 1")


class _Names:
    """The names of an optimizer's parameters: unique, and the same on every rank."""

    def __init__(self, optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None):
        self._given = None if named_parameters is None else _checked(list(named_parameters))
        self._groups = optimizer.param_groups
        if self._given is not None:
            given = {id(parameter) for _, parameter in self._given}
            unnamed = [
                f"parameter {index} of group {number}, of shape {tuple(parameter.shape)}"
                for number, group in enumerate(self._groups)
                for index, parameter in enumerate(group["params"])
                if id(parameter) not in given
            ]
            if unnamed:
                raise ValueError(
                    f"named_parameters does not name {'; '.join(unnamed)}. Pass the parameters of every module that "
                    "the optimizer trains, or leave named_parameters out"
                )

    def in_order(self) -> list[tuple[str, Tensor]]:
        """Names and parameters of the optimizer, in the order in which the model has registered them."""
        if self._given is None:
            return [pair for number, group in enumerate(self._groups) for pair in _numbered(number, group)]
        trained = {id(parameter) for group in self._groups for parameter in group["params"]}
        return [(name, parameter) for name, parameter in self._given if id(parameter) in trained]

    def of_added(self, number: int, group: dict[str, Any]) -> list[tuple[str, Tensor]]:
        """Names for the parameters of a group that came later."""
        given = {id(parameter): name for name, parameter in self._given or ()}
        return [(given.get(id(parameter), name), parameter) for name, parameter in _numbered(number, group)]


def _numbered(number: int, group: dict[str, Any]) -> list[tuple[str, Tensor]]:
    return [(f"group{number}.{index}", parameter) for index, parameter in enumerate(group["params"])]


def _checked(named: list[Any]) -> list[tuple[str, Tensor]]:
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in named):
        raise ValueError("named_parameters must be pairs of a name and a parameter; pass model.named_parameters()")
    repeated = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if repeated:
        raise ValueError(
            f"named_parameters has these names more than once: {', '.join(repeated)}; give each a prefix of its own, "
            "such as the name of its module"
        )
    # A shared parameter may have several names; the first counts.
    first = {id(parameter): name for name, parameter in reversed(named)}
    return [(name, parameter) for name, parameter in named if first[id(parameter)] == name]
