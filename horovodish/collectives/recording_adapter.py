"""Collectives with gradients, for a framework that records each call together with a function for its gradient.

Gradients are gradients of the sum of the losses of all ranks, so where a collective sends values to other ranks, the
backward pass brings their gradients back. The setting `collective_gradients` multiplies the gradient.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from horovodish.collectives.adapter import Adapter, Shaped, identified, only
from horovodish.collectives.derivatives import are_horovods, check_linear, factor, opposite
from horovodish.collectives.operation import Operation
from horovodish.collectives.submission import Handle
from horovodish.errors import HorovodInternalError
from horovodish.runtime import basics

__all__ = ["RecordingAdapter"]

T = TypeVar("T", bound=Shaped)
R = TypeVar("R")


class RecordingAdapter(Adapter[T]):
    """An adapter whose collectives have gradients, which are made of recorded collectives and so have gradients, too.

    Its tensors can be sliced, reshaped and multiplied by a number.
    """

    @abstractmethod
    def has_gradient(self, tensor: T) -> bool:
        """True for tensors of floating-point numbers."""

    @abstractmethod
    def recorded(
        self,
        name: str,
        inputs: list[T],
        results: list[T],
        gradients: Callable[[Sequence[T]], list[T | None]],
    ) -> list[T]:
        """The results, for the framework a function of the inputs.

        Args:
            name: of the collective.
            inputs: the caller's tensors.
            results: the engine's results, one for each input.
            gradients: computes the gradients of the inputs from the gradients of the results; None stands for zeros.
                Collective; blocks.
        """

    def now(self, operation: Operation, tensor: Any) -> T:
        """As `Adapter.now`, but every call is recorded, so none repeats an earlier one."""
        return self.start(operation, [tensor], only, waits=True).wait()

    def start(
        self,
        operation: Operation,
        tensors: Sequence[Any],
        result: Callable[[list[T], list[list[int]]], R],
        *,
        waits: bool = False,
    ) -> Handle[R]:
        """As `Adapter.start`."""
        operation = operation._replace(name=identified(operation)[0])
        given = list(tensors) if isinstance(tensors, Iterator) else tensors

        def recorded(results: list[T], counts: list[list[int]]) -> R:
            inputs = list(given)
            known = [index for index, each in enumerate(inputs) if self.has_gradient(each)]

            def gradients(of_results: Sequence[T]) -> list[T | None]:
                own = [of_results[index] for index in known], [inputs[index] for index in known]
                rows = [counts[index] for index in known] if counts else []
                found = dict(zip(known, _gradients(self, operation, *own, rows), strict=True))
                return [found.get(index) for index in range(len(inputs))]

            return result(self.recorded(str(operation.name), inputs, results, gradients), counts)

        return super().start(operation, given, recorded, waits=waits)


def _gradients(
    adapter: Adapter[T], operation: Operation, of_results: list[T], inputs: list[T], counts: list[list[int]]
) -> Sequence[Any]:
    """The gradients of a collective's tensors. Collective; blocks.

    Raises:
        NotImplementedError: the op is not linear.
        HorovodInternalError: a rank has joined since, whose rows are missing.
    """
    kind, name, process_set = operation.kind, f"{operation.name}.gradient", operation.process_set
    if kind in ("allreduce", "reducescatter"):
        check_linear(operation, "an array whose gradient is stopped")
    scale = float(factor(operation, process_set.size(), are_horovods()))
    back = opposite(operation, scale)._replace(name=name)
    if kind == "allreduce":
        return adapter.group(back, of_results).wait()
    if kind in ("allgather", "broadcast"):
        summed: list[Any] = adapter.group(back, of_results).wait()
        if kind == "broadcast":
            return summed if basics.rank() == operation.root_rank else [None for _ in summed]
        own = process_set.rank()
        places = [slice(sum(rows[:own]), sum(rows[: own + 1])) for rows in counts]
        return [each[place].reshape(given.shape) for each, place, given in zip(summed, places, inputs, strict=True)]
    if kind == "alltoall":
        returned: list[Any] = [adapter.one(back._replace(splits=counts[0]), of_results[0]).wait()]
    else:
        gathered: list[Any] = adapter.group(back, of_results).wait()
        returned = [each * scale for each in gathered]
    if any(tuple(each.shape) != tuple(given.shape) for each, given in zip(returned, inputs, strict=True)):
        raise HorovodInternalError(f"{name}: a rank has joined since the forward pass, so its rows are missing")
    return returned
