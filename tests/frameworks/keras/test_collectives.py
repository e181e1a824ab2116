"""The collectives of horovodish.keras, which come from the backend's shim."""

from __future__ import annotations

from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest

import horovodish.keras as hvd
from horovodish.errors import MismatchError
from horovodish.keras.backends import collectives
from support.expect import one_rank_is_wrong
from support.keras_models import compiled, same_everywhere
from support.on_ranks import on_ranks

pytestmark = pytest.mark.usefixtures("backend")


@on_ranks(2)
def test_values_are_reduced() -> None:
    rank = hvd.rank()
    assert hvd.allreduce(rank + 1.0) == 1.5
    assert isinstance(hvd.allreduce(np.ones(2, "int32"), op=hvd.Sum), np.ndarray)
    tensor = keras.ops.ones((2, 3)) * (rank + 1)
    for value in (tensor, keras.Variable(tensor)):
        for compression in (hvd.Compression.none, hvd.Compression.bf16):
            result = hvd.allreduce(value, compression=compression)
            assert keras.ops.is_tensor(result)
            assert keras.backend.standardize_dtype(result.dtype) == "float32"
            np.testing.assert_array_equal(keras.ops.convert_to_numpy(result), np.full((2, 3), 1.5))
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(hvd.allgather(value))[:, 0], [1, 1, 2, 2])
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(hvd.broadcast(value, 1)), np.full((2, 3), 2))
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(hvd.reducescatter(value, op=hvd.Sum)), [[3, 3, 3]])


@on_ranks(2)
def test_variables_are_broadcast() -> None:
    model = compiled(seed=hvd.rank())
    model.optimizer.build(model.trainable_variables)
    hvd.broadcast_global_variables(1, model)
    assert same_everywhere(model)
    for call in (hvd.broadcast_global_variables, lambda root: hvd.broadcast_global_variables(root, None)):
        with pytest.raises(ValueError, match="pass the model"):
            call(0)
    with pytest.raises(MismatchError, match=r"of shape \(3,\)"):
        hvd.broadcast_variables([keras.Variable(np.zeros(2 + hvd.rank()))], 0)
    one_rank_is_wrong(
        ValueError,
        "root_rank=7 does not exist",
        lambda: hvd.broadcast_variables(model.weights, 0),
        lambda: hvd.broadcast_variables(model.weights, 7),
    )


@on_ranks(2)
def test_join_is_that_of_the_backend() -> None:
    with mock.patch.object(collectives(), "join", return_value=7) as joined:
        assert hvd.join(3) == 7
    joined.assert_called_once_with(3)
    assert hvd.join() in range(hvd.size())


@pytest.mark.shows("Gradients of collectives")
@on_ranks(2)
def test_gradients_of_collectives() -> None:
    """The gradient of an average is the average of the gradients."""

    def loss(values: Any) -> Any:
        return keras.ops.sum(hvd.allreduce(values) * (hvd.rank() + 1.0))

    values = keras.ops.ones(3)
    if keras.config.backend() == "torch":
        values.requires_grad_()
        loss(values).backward()
        gradient = values.grad
    elif keras.config.backend() == "jax":
        import jax

        gradient = jax.grad(loss)(values)
    else:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(values)
            total = loss(values)
        gradient = tape.gradient(total, values)
    assert keras.ops.convert_to_numpy(gradient).tolist() == [1.5] * 3
