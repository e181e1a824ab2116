"""Tensors of PyTorch from the NumPy arrays of `support.model`, bfloat16 included, and process sets to try them on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import torch

import horovodish.torch as hvd


def tensor_of(array: Any) -> torch.Tensor:
    """A tensor with a copy of the array's values."""
    array = np.array(array, order="C")
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def array_of(tensor: torch.Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


@contextmanager
def sets_with_this_rank() -> Iterator[list[hvd.ProcessSet]]:
    """All ranks, and of the sets of all ranks but one, which overlap, those that this rank is in."""
    size = hvd.size()
    smaller = [[rank for rank in range(size) if rank != out] for out in range(size)] if size > 1 else []
    added = [hvd.add_process_set(ranks) for ranks in smaller]
    yield [hvd.global_process_set, *(process_set for process_set in added if process_set.included())]
    for process_set in added:
        assert hvd.remove_process_set(process_set)
