"""The class of `p.grad` while only a part of it is on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from horovodish.collectives.operation import Operation
from horovodish.collectives.process_sets import ProcessSet
from horovodish.collectives.reduce_ops import Max
from horovodish.errors import UnsupportedTensorError
from horovodish.torch.adapter import TENSORS

__all__ = ["ShardedGradient"]

_AMP = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


class ShardedGradient(Tensor):
    """The reduced gradient of a parameter. This rank has only the elements that it steps.

    It has the shape of the parameter and no memory for it. Reading elements that are not there raises, such as
    `torch.nn.utils.clip_grad_norm_`. `zero_()` works, and so does `GradScaler`.

    Attributes:
        piece: the elements of this rank, in the order of the parameter's memory; shape (n,), perhaps (0,).
        label: the name of the parameter.
    """

    piece: Tensor
    label: str
    process_set: ProcessSet

    @staticmethod
    def __new__(cls, parameter: Tensor, piece: Tensor, name: str, process_set: ProcessSet) -> ShardedGradient:
        gradient: ShardedGradient = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=piece.dtype, device=piece.device
        )
        gradient.piece, gradient.label, gradient.process_set = piece, name, process_set
        return gradient

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ShardedGradient({self.piece.numel()} of {self.numel()} elements of the gradient of {self.label})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.zero_.default:
            args[0].piece.zero_()
            return args[0]
        if function is torch.ops.aten._foreach_zero_.default and all(isinstance(each, cls) for each in args[0]):
            for each in args[0]:
                each.piece.zero_()
            return None
        if function is torch.ops.aten.add_.Tensor and all(isinstance(each, cls) for each in args) and not kwargs:
            args[0].piece.add_(args[1].piece)
            return args[0]
        if function is torch.ops.aten.detach.default:
            return args[0]
        if function is _AMP:
            return _unscale(*args)
        first = next(each for each in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(each, cls))
        raise UnsupportedTensorError(
            f"{function.overloadpacket.__name__} of the gradient of {first.label}: with shard= this rank has only "
            f"{first.piece.numel()} of its {first.numel()} elements after backward(). Remedy: to clip, call "
            "optimizer.clip_grad_norm_(max_norm), which sees the parts of all ranks; to read them, leave shard= out"
        )


def _unscale(gradients: Sequence[ShardedGradient], found_inf: Tensor, inv_scale: Tensor) -> None:
    """As `GradScaler.unscale_`. All ranks call it, and if one finds values that are not finite, all do."""
    pieces = [each.piece for each in gradients if each.piece.numel() > 0]
    if pieces:
        _AMP(pieces, found_inf, inv_scale)
    operation = Operation("allreduce", None, gradients[0].process_set, Max)
    found_inf.copy_(TENSORS.now(operation, found_inf.detach().cpu()))
