"""Codecs: every rank gets the same bits, and nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("mlx.core", reason="MLX's build for CPUs has no wheel for this Python or machine")

import mlx.core as mx
import numpy as np
from mlx import optimizers

import horovodish.mlx as hvd
from support.coded import ELEMENTS, Floats, encode_or_refuse, loses_nothing
from support.on_ranks import on_ranks


@on_ranks((2, "mpi_ring"))
def test_an_optimizer_loses_nothing() -> None:
    codec = hvd.Compression.int8(where=lambda name, shape: (name, shape) == ("kernel", (ELEMENTS, 1)))
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(1.0), compression=codec)

    def step(gradient: Floats) -> object:
        updated = optimizer.apply_gradients({"kernel": mx.array(gradient)}, {"kernel": mx.zeros((ELEMENTS, 1))})
        return -np.array(updated["kernel"])

    loses_nothing(step)


@on_ranks((2, "mpi_ring"))
def test_every_function_that_takes_a_compression() -> None:
    array = mx.ones((300, 300))

    def step(compression: Any) -> dict[str, mx.array]:
        optimizer = hvd.DistributedOptimizer(optimizers.SGD(1.0), compression=compression)
        return optimizer.apply_gradients({"kernel": array}, {"kernel": mx.zeros((300, 300))})

    encode_or_refuse(
        hvd, {"allreduce": lambda its: hvd.allreduce(array, compression=its), "DistributedOptimizer": step}, {}
    )
    same = {np.array(step(hvd.Compression.auto)["kernel"]).tobytes() for _ in range(2)}
    assert len({*hvd.allgather_object(same.pop())}) == 1
