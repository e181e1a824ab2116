"""`DistributedOptimizer`: an optimizer of MLX that uses the gradients of all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten, tree_map_with_path

from horovodish.collectives.process_sets import checked_id
from horovodish.collectives.submission import counted
from horovodish.gradients.lone_steps import Count, LoneSteps, calls_of
from horovodish.gradients.options import GradientOptions, ReductionOptions, not_wrapped, takes
from horovodish.gradients.plan import GradientAdapter, GradientPlan, Payload
from horovodish.mlx.collectives import ARRAYS, bytes_of, name_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["DistributedOptimizer"]

_REMEDY = "call hvd.broadcast_parameters(model, root_rank=0) before the first step"


class _Parameter(NamedTuple):
    name: str
    value: mx.array


class _Gradients(GradientAdapter):
    tensors = ARRAYS

    def payload(self, tensor: mx.array, source: _Parameter) -> Payload:
        return Payload(tensor.nbytes, tensor.dtype)

    def checksum(self, source: _Parameter) -> tuple[str, int]:
        value = ARRAYS.source(source.value, source.name)
        return f"{name_of(value.dtype)} of shape {value.shape}", zlib.crc32(bytes_of(value).data)


class _Distributed(Optimizer):
    """The methods that wrapping adds to an optimizer."""

    _plan: GradientPlan
    _name = "optimizer"

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        # By name: a dict on another rank may have the same parameters in another order.
        own: dict[str, Any] = dict(sorted(dict(tree_flatten(gradients)).items()))
        values = dict(tree_flatten(parameters))
        sources = [_Parameter(name, values[name]) for name in own]
        reduced = dict(zip(own, self._plan.reduce(self._name, list(own.values()), sources), strict=True))
        return super().apply_gradients(tree_map_with_path(lambda name, _: reduced[name], gradients), parameters)


@takes(ReductionOptions)
def DistributedOptimizer(optimizer: Optimizer, **options: Unpack[ReductionOptions]) -> Optimizer:  # noqa: N802
    """Make `optimizer` use the gradients of all ranks. Every rank must call it, at the same point; does not block.

    Returns the same object. Its `update` and `apply_gradients` are collective then, and block; call them outside of
    `mx.compile`. In the second step the ranks compare their parameters, and rank 0 warns if they differ.

    Args:
        optimizer: of MLX, `MultiOptimizer` among them.
        options: taken by name.

    Raises:
        ValueError: an option is not possible, or `optimizer` is wrapped already.
        TypeError: `optimizer` is none of MLX, or `process_set` no process set.
        NotInitializedError: before `init()`. `update` raises the errors of `horovodish.collectives`.

    Example:
        >>> optimizer = hvd.DistributedOptimizer(optim.AdamW(1e-3))
        >>> loss, gradients = nn.value_and_grad(model, loss_of)(batch_of_this_rank)
        >>> optimizer.update(model, gradients)
    """
    if not isinstance(optimizer, Optimizer):
        raise not_wrapped("DistributedOptimizer", "an mlx.optimizers.Optimizer", optimizer)
    if isinstance(optimizer, _Distributed):
        raise ValueError(f"this {type(optimizer).__name__} is wrapped already; wrap an optimizer once")
    checked = GradientOptions.checked(**options)
    checked.warn_of_one_bit(optimizer)
    wrapped: Any = optimizer
    wrapped.__class__ = type(type(optimizer).__name__, (_Distributed, type(optimizer)), {})
    wrapped._plan = GradientPlan(checked, _Gradients(), lambda _, source: f".{source.name}", _REMEDY)
    checked.comparison.count()
    if checked.process_set.included():  # a rank outside the set never reduces, and counts for no other set
        wrapped._name = f"gradients of optimizer {counted('optimizer', checked_id(checked.process_set))}"
    return optimizer


def _watch(count: Count) -> Callable[[], object]:
    def before(optimizer: Optimizer, gradients: Any, _: Any) -> None:
        if not isinstance(optimizer, _Distributed):
            count(type(optimizer).__name__, lambda: sum(each.nbytes for each in dict(tree_flatten(gradients)).values()))

    return calls_of(Optimizer, "apply_gradients", before)


_lone_steps = LoneSteps(_watch, "optimizer = hvd.DistributedOptimizer(optimizer)")
