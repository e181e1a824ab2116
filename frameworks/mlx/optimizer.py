"""`DistributedOptimizer`: an optimizer of MLX whose gradients are those of all ranks."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten, tree_map_with_path

from horovodish.collectives.process_sets import ProcessSet, checked_id, global_process_set
from horovodish.collectives.reduce_ops import Average, ReduceOp
from horovodish.collectives.submission import generated_name
from horovodish.gradients.compression import Compressor, casts
from horovodish.gradients.options import GradientOptions
from horovodish.gradients.plan import GradientAdapter, GradientPlan, Payload
from horovodish.mlx.collectives import ARRAYS, bytes_of, name_of

__all__ = ["Compression", "DistributedOptimizer"]

_REMEDY = "call hvd.broadcast_parameters(model, root_rank=0) before the first step"


def _is_wider(tensor: mx.array) -> bool:
    return mx.issubdtype(tensor.dtype, mx.floating) and tensor.dtype.size > 2


FP16Compressor, BF16Compressor, Compression = casts(
    __name__, mx.float16, mx.bfloat16, _is_wider, lambda tensor, dtype: tensor.astype(dtype)
)


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
    """What a wrapped optimizer does besides what its class does."""

    _plan: GradientPlan
    _name = "optimizer"

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        own, values = dict(tree_flatten(gradients)), dict(tree_flatten(parameters))
        sources = [_Parameter(name, values[name]) for name in own]
        reduced = dict(zip(own, self._plan.reduce(self._name, list(own.values()), sources), strict=True))
        return super().apply_gradients(tree_map_with_path(lambda name, _: reduced[name], gradients), parameters)


def DistributedOptimizer(  # noqa: N802, Horovod's name
    optimizer: Optimizer,
    op: ReduceOp = Average,
    compression: Compressor = Compression.none,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Optimizer:
    """Make `optimizer` use the gradients of all ranks. Every rank must call it, at the same point; does not block.

    `update` and `apply_gradients` are collective then, and block. Call them outside of `mx.compile`. In the second step
    the ranks compare their parameters, and rank 0 warns if they differ.

    Args:
        optimizer: of MLX, `MultiOptimizer` among them.
        op: `Average` (the default), `Sum`, `Adasum`, `Min`, `Max` or `Product`.
        compression: what travels instead of each gradient; see `Compression`.
        gradient_predivide_factor: with `Average`, divides before the reduction by this factor f and after it by the
            number of ranks over f, to keep small dtypes in range.
        process_set: the ranks that reduce among themselves; on another rank the optimizer works as before.

    Returns:
        `optimizer`, the same object with the same state.

    Raises:
        ValueError: an option is not possible, or `optimizer` is wrapped already.
        TypeError: `optimizer` is none of MLX, or `process_set` no process set.
        NotInitializedError: before `init()`. `update` raises what `horovodish.collectives` lists.

    Example:
        >>> optimizer = hvd.DistributedOptimizer(optim.AdamW(1e-3))
        >>> loss, gradients = nn.value_and_grad(model, loss_of)(batch_of_this_rank)
        >>> optimizer.update(model, gradients)
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"DistributedOptimizer wraps an mlx.optimizers.Optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, _Distributed):
        raise ValueError(f"this {type(optimizer).__name__} is wrapped already; wrap an optimizer once")
    options = GradientOptions.checked(
        op=op,
        compression=compression,
        gradient_predivide_factor=gradient_predivide_factor,
        process_set=process_set,
    )
    wrapped: Any = optimizer
    wrapped.__class__ = type(type(optimizer).__name__, (_Distributed, type(optimizer)), {})
    wrapped._plan = GradientPlan(options, _Gradients(), lambda _, source: f".{source.name}", _REMEDY)
    if process_set.included():  # a rank outside the set never reduces, and counts for no other set
        wrapped._name = generated_name("optimizer", checked_id(process_set))
    return optimizer
