"""Gradients that travel as rows: the sparse gradients of parameters such as an embedding's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from horovodish.collectives.reduce_ops import Average, ReduceOp, Sum
from horovodish.errors import UnsupportedTensorError
from horovodish.gradients.layouts import Layout
from horovodish.gradients.options import GradientOptions
from horovodish.torch.sparse import sparse_allreduce_async


def layout(gradient: Tensor | None) -> Layout:
    """The layout of a gradient."""
    if gradient is None:
        return Layout.ABSENT
    return Layout.SPARSE if gradient.is_sparse else Layout.DENSE


def check_op(names: Sequence[str], op: ReduceOp) -> None:
    """Raise unless this op can reduce the sparse gradients of the parameters of these names.

    Raises:
        UnsupportedTensorError: there are such parameters, and it is not for them.
    """
    if names and op not in (Average, Sum):
        raise UnsupportedTensorError(
            f"gradient of {names[0]}: it is sparse, and op={op.name.capitalize()} is not for sparse gradients; use "
            "op=Average or op=Sum, or pass sparse_as_dense=True"
        )


class SparseGradients:
    """The parameters of one optimizer whose gradients are sparse on some rank.

    A rank without a gradient contributes no rows. Where no rank has rows, gradients stay as they are.
    """

    def __init__(self, prefix: str, named: Sequence[tuple[str, Tensor]], options: GradientOptions):
        self.parameters = [parameter for _, parameter in named]
        self._prefix = prefix
        self._named = named
        self._options = options
        self._pending: list[tuple[Tensor, Callable[[], Tensor]]] = []

    def submit(self) -> None:
        """Hands over the gradients, whatever their layout is on this rank."""
        for name, parameter in self._named:
            rows = _rows(parameter) * self._options.prescale_factor
            finish = sparse_allreduce_async(
                rows, f"{self._prefix}.sparse.{name}", self._options.op, self._options.process_set
            )
            self._pending.append((parameter, finish))

    def finish(self) -> Exception | None:
        """Waits for what was submitted and puts the results into the parameters; gives the first error."""
        errors = []
        for parameter, finish in self._pending:
            try:
                reduced = finish()
            except Exception as error:
                errors.append(error)
                continue
            if reduced._nnz():
                parameter.grad = reduced * self._options.postscale_factor
        self._pending.clear()
        return errors[0] if errors else None


def _rows(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
        values = parameter.detach().new_empty(0, *parameter.shape[1:])
        return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
    return gradient.detach() if gradient.is_sparse else gradient.detach().to_sparse(1)
