"""Ranks of different frameworks in one world: an operation is known by its name, whoever submits it."""

from __future__ import annotations

import pytest

import horovodish
from support.ranks import run_ranks


def one_rank_each() -> list[list[float]]:
    horovodish.init()
    return with_torch() if horovodish.rank() == 0 else with_tensorflow()


def with_torch() -> list[list[float]]:
    import torch

    import horovodish.torch as hvd

    results = [
        hvd.allreduce(torch.tensor([1.0, 2.0]), name="x"),
        hvd.allreduce(torch.tensor([1.0, 2.0], dtype=torch.bfloat16), op=hvd.Sum, name="half"),
        hvd.allgather(torch.tensor([[1.0, 2.0]]), name="rows"),
        hvd.broadcast(torch.tensor([5.0]), 0, name="sent"),
        *hvd.grouped_allreduce([torch.tensor([1.0]), torch.tensor([2.0])], op=hvd.Max, name="group"),
        hvd.reducescatter(torch.tensor([1.0, 2.0]), op=hvd.Sum, name="scattered"),
    ]
    with pytest.raises(hvd.MismatchError, match=r"dtype: rank 0 has float32, rank 1 has float64"):
        hvd.allreduce(torch.tensor([1.0]), name="different")
    return [result.float().flatten().tolist() for result in results]


def with_tensorflow() -> list[list[float]]:
    import tensorflow as tf

    import horovodish.tensorflow as hvd

    @tf.function
    def all_of_them() -> list[tf.Tensor]:
        return [
            hvd.allreduce(tf.constant([3.0, 4.0]), name="x"),
            hvd.allreduce(tf.constant([3.0, 4.0], tf.bfloat16), op=hvd.Sum, name="half"),
            hvd.allgather(tf.constant([[3.0, 4.0], [5.0, 6.0]]), name="rows"),
            hvd.broadcast(tf.constant([0.0]), 0, name="sent"),
            *hvd.grouped_allreduce([tf.constant([3.0]), tf.constant([1.0])], op=hvd.Max, name="group"),
            hvd.reducescatter(tf.constant([3.0, 4.0]), op=hvd.Sum, name="scattered"),
        ]

    results = all_of_them()
    with pytest.raises(hvd.MismatchError, match=r"dtype: rank 0 has float32, rank 1 has float64"):
        hvd.allreduce(tf.constant([1.0], tf.float64), name="different")
    return [tf.cast(tf.reshape(result, [-1]), tf.float32).numpy().tolist() for result in results]


def test_torch_and_tensorflow() -> None:
    first, second = run_ranks(one_rank_each, 2, timeout=120, fresh=True)
    shared = [[2.0, 3.0], [4.0, 6.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [5.0], [3.0], [2.0]]
    assert first == [*shared, [4.0]]
    assert second == [*shared, [6.0]]
