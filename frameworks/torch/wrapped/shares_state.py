"""Wrapped optimizers whose state the ranks share: with `shard`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from horovodish.gradients.options import GradientOptions
from horovodish.torch.gradients.reducer import Reducer
from horovodish.torch.names import Names
from horovodish.torch.shards import states
from horovodish.torch.shards.pieces import Shards
from horovodish.torch.shards.reducer import ShardedReducer
from horovodish.torch.wrapped.base import is_within_step
from horovodish.torch.wrapped.reduces_gradients import ReducesGradients


class SharesState(ReducesGradients):
    """With `shard`."""

    _shards: Shards | None

    @classmethod
    def _reducer_of(cls, optimizer: Any, names: Names, options: GradientOptions) -> Reducer:
        shards = None if options.alone else Shards(optimizer, options)
        made = (
            super()._reducer_of(optimizer, names, options) if shards is None else ShardedReducer(names, options, shards)
        )
        optimizer._shards = shards
        return made

    @classmethod
    def _register(cls, optimizer: Any) -> None:
        super()._register(optimizer)
        if optimizer._shards is not None:
            # Hooks that the user has registered are to see whole parameters.
            Optimizer.register_step_pre_hook(optimizer, _before_step)
            post_hook = Optimizer.register_step_post_hook(optimizer, _after_step)
            optimizer._optimizer_step_post_hooks.move_to_end(post_hook.id, last=False)

    @contextmanager
    def _calling(self) -> Iterator[None]:
        if self._shards is not None:  # the closure sees whole parameters
            self._shards.leave()
        yield
        if self._shards is not None:
            self._shards.enter()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of all parameters so that their norm is at most `max_norm`. Collective; blocks.

        Args:
            max_norm: of the gradients of all parameters together.
            norm_type: of the p-norm, or inf.

        Returns:
            The norm before, as `torch.nn.utils.clip_grad_norm_` gives it; shape ().
        """
        this: Any = self
        if self._shards is None:
            parameters = [parameter for group in this.param_groups for parameter in group["params"]]
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        return states.clip(self._shards, max_norm, norm_type)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, in a world of one rank. In other worlds no rank has the whole state.

        Raises:
            ValueError: this rank has a part of the state only.
        """
        if self._shards is not None:
            raise ValueError(
                "state_dict() of a sharded optimizer: this rank has only a part of the state. Remedy: call "
                "full_state_dict(root=0) on every rank, which gives the root what the plain optimizer's state_dict() "
                "is; or shard_state_dict(), for a file of each rank's own"
            )
        this: Any = self
        found: dict[str, Any] = self.wrapped_class.state_dict(this)
        return found

    def full_state_dict(self, root: int = 0) -> dict[str, Any] | None:
        """The `state_dict()` that the unwrapped optimizer would have. Collective; blocks.

        Args:
            root: the rank that gets it, in host memory, one tensor after the other.

        Returns:
            The state on the root, None on other ranks. Any number of ranks can load it, and so can a plain optimizer.
        """
        return self.state_dict() if self._shards is None else states.full(self._shards, root)

    def shard_state_dict(self) -> dict[str, Any]:
        """This rank's part of the state. Not collective. It can be loaded by the same rank of as many ranks.

        The tensors are the optimizer's own, as in PyTorch's `state_dict()`: later steps change them. To go back to this
        part in the same process, take `copy.deepcopy` of it.
        """
        return self.state_dict() if self._shards is None else states.own(self._shards)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `full_state_dict()`, `shard_state_dict()` or a plain optimizer's `state_dict()` has given.

        Not collective, but every rank must call it with the same full state, or with the part that it has given.

        Raises:
            ValueError: the state is of another model, or of another number of ranks.
        """
        this: Any = self
        if self._shards is None:
            self.wrapped_class.load_state_dict(this, states.numbered(state_dict))
        else:
            states.load(self._shards, state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the wrapped class."""
        if self._shards is not None:
            self._shards.leave()  # a step may have raised
        super().zero_grad(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._shards is not None:
            raise ValueError(
                "a sharded optimizer cannot be copied or pickled. Remedy: copy the plain one before it is wrapped, or "
                "save full_state_dict()"
            )
        return super().__reduce_ex__(protocol)


@_disable_dynamo
def _before_step(optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if not optimizer._reducer.in_closure or optimizer._skips:
        optimizer._shards.enter()


@_disable_dynamo
def _after_step(optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if not is_within_step(optimizer):
        optimizer._shards.leave()
        optimizer._shards.gather()
