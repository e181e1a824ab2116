"""A toy framework and its shim: all that a fifth framework must say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from horovodish import elastic
from horovodish._native import Handle
from horovodish.collectives.adapter import Adapter
from horovodish.collectives.array_adapter import ARRAYS
from horovodish.collectives.arrays import Array, host_array, writable_array
from horovodish.collectives.consistency import checksum_of
from horovodish.collectives.devices import Placement
from horovodish.collectives.functions import Collectives
from horovodish.collectives.named_tensors import broadcast_named
from horovodish.collectives.operation import Member
from horovodish.collectives.reduce_ops import ReduceOp
from horovodish.errors import UnsupportedTensorError
from horovodish.gradients.compression import casts
from horovodish.gradients.lone_steps import Count, LoneSteps
from horovodish.gradients.options import GradientOptions, ModelOptions, takes
from horovodish.gradients.plan import GradientAdapter, GradientPlan, Layout, Payload
from horovodish.process_api import *  # noqa: F403

# -- the framework


@dataclass(eq=False)
class Tensor:
    data: Array
    name: str = ""

    dtype = property(lambda self: self.data.dtype)
    ndim = property(lambda self: self.data.ndim)
    shape = property(lambda self: self.data.shape)

    def reshape(self, rows: int) -> Tensor:
        return Tensor(self.data.reshape(rows))


class SGD:
    before_step: ClassVar[list[Callable[[SGD], None]]] = []

    def __init__(self, parameters: dict[str, Tensor], learning_rate: float):
        self.parameters = parameters
        self.learning_rate = learning_rate
        self.is_wrapped = False

    def step(self, gradients: dict[str, Tensor | None]) -> None:
        for hook in self.before_step:
            hook(self)
        for name, gradient in gradients.items():
            if gradient is not None:
                self.parameters[name].data -= self.learning_rate * gradient.data


# -- its shim


class _TensorAdapter(Adapter[Tensor]):
    noun = "tensor"

    def source(self, tensor: Any, name: str) -> Tensor:
        if not isinstance(tensor, Tensor):
            raise UnsupportedTensorError(f"{name}: expected a Tensor, got {type(tensor).__name__}; pass Tensor(value)")
        return Tensor(host_array(tensor.data, name))

    def target(self, tensor: Any, name: str) -> Tensor:
        return Tensor(writable_array(self.source(tensor, name).data, name))

    def empty(self, source: Tensor, shape: Sequence[int] | None) -> Tensor:
        return Tensor(ARRAYS.empty(source.data, shape))

    def member(self, source: Tensor, target: Tensor | None, name: str, op: ReduceOp | None) -> Member:
        return ARRAYS.member(source.data, target.data if target else None, name, op)

    def received(self, native: Handle, index: int, source: Tensor, rows: int, placement: Placement) -> Tensor:
        return Tensor(ARRAYS.received(native, index, source.data, rows, placement))

    def row_counts(self, counts: Sequence[int]) -> Tensor:
        return Tensor(ARRAYS.row_counts(counts))


TENSORS = _TensorAdapter()


COLLECTIVES = Collectives[Tensor, Tensor](TENSORS)
allgather = COLLECTIVES.allgather
allreduce = COLLECTIVES.allreduce
alltoall = COLLECTIVES.alltoall
broadcast = COLLECTIVES.broadcast
reducescatter = COLLECTIVES.reducescatter


def broadcast_parameters(parameters: dict[str, Tensor], root_rank: int = 0) -> None:
    for name, value in broadcast_named("broadcast_parameters", parameters, root_rank, TENSORS).items():
        parameters[name].data = value.data


def _is_wider(tensor: Tensor) -> bool:
    return tensor.dtype in (np.float32, np.float64)


def _cast(tensor: Tensor, dtype: Any) -> Tensor:
    return Tensor(tensor.data.astype(dtype))


FP16Compressor, BF16Compressor, Compression = casts(__name__, np.float16, ml_dtypes.bfloat16, _is_wider, _cast)


class _Gradients(GradientAdapter):
    tensors = TENSORS

    def payload(self, tensor: Tensor, source: Tensor) -> Payload:
        return Payload(tensor.data.nbytes, tensor.dtype)

    def checksum(self, source: Tensor) -> tuple[str, int]:
        return checksum_of(source.data)

    def filled(self, gradient: Tensor | None, source: Tensor, layout: Layout) -> Tensor:
        return Tensor(np.zeros_like(source.data))


GRADIENTS = _Gradients()


class DistributedOptimizer:
    @takes(ModelOptions)
    def __init__(self, optimizer: SGD, **options: Any):
        checked = GradientOptions.checked(**options)
        checked.check_groups(optimizer.parameters.values())
        names = list(optimizer.parameters)
        self.wrapped = optimizer
        optimizer.is_wrapped = True
        remedy = "hvd.broadcast_parameters(parameters, root_rank=0)"
        self._plan = GradientPlan(checked, GRADIENTS, lambda index, _: f".{names[index]}", remedy)

    def step(self, gradients: dict[str, Tensor | None]) -> None:
        parameters = self.wrapped.parameters
        ours = [gradients.get(name) for name in parameters]
        reduced = self._plan.reduce("gradients", ours, list(parameters.values()))
        self.wrapped.step(dict(zip(parameters, reduced, strict=True)))


def _watch(count: Count) -> Callable[[], object]:
    def hook(optimizer: SGD) -> None:
        if not optimizer.is_wrapped:
            count("SGD", lambda: sum(tensor.data.nbytes for tensor in optimizer.parameters.values()))

    SGD.before_step.append(hook)
    return lambda: SGD.before_step.remove(hook)


LONE_STEPS = LoneSteps(_watch, "optimizer = hvd.DistributedOptimizer(optimizer)")


class ToyState(elastic.State):
    def _keeps(self, value: object) -> bool:
        return isinstance(value, SGD) or super()._keeps(value)

    def _kept_of(self, value: Any) -> Any:
        if isinstance(value, SGD):
            return {name: tensor.data for name, tensor in value.parameters.items()}
        return super()._kept_of(value)

    def _give_back(self, value: Any, kept: Any) -> None:
        if isinstance(value, SGD):
            for name, data in kept.items():
                value.parameters[name].data = data
        else:
            super()._give_back(value, kept)
