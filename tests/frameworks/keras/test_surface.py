"""The names, errors and guide of horovodish.keras."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest

import horovodish.keras as hvd
from support.documents import python_blocks
from support.keras_models import mlp, sgd
from support.on_ranks import on_ranks
from support.surface import by_position, check_surface

pytestmark = pytest.mark.usefixtures("backend")


@on_ranks(2)
def test_the_public_names() -> None:
    check_surface(hvd)
    assert all(getattr(hvd.callbacks, name).__doc__ for name in hvd.callbacks.__all__)
    if keras.config.backend() == "tensorflow":
        import horovodish.tensorflow.keras as known
        from horovodish.tensorflow.keras.callbacks import MetricAverageCallback

        assert known.__all__ == hvd.__all__
        assert known.DistributedOptimizer is hvd.DistributedOptimizer
        assert MetricAverageCallback is known.callbacks.MetricAverageCallback


@on_ranks(2)
def test_mistakes_are_refused() -> None:
    weight = keras.Variable(np.zeros(2, "float32"))
    refused: list[tuple[str, dict[str, Any]]] = [
        ("op", {"op": "mean"}),
        ("needs op=Average", {"op": hvd.Sum, "gradient_predivide_factor": 2.0}),
        ("is not positive", {"gradient_predivide_factor": 0.0}),
        ("must be a whole number", {"backward_passes_per_step": 0}),
        ("use Compression.none", {"compression": "fp16"}),
        ("pass groups= alone", {"num_groups": 2, "groups": 2}),
        ("groups=-1 is not possible", {"groups": -1}),
        ("list of lists of parameters", {"groups": [weight]}),
        ("in group 0 and in group 1", {"groups": [[weight], [weight]]}),
    ]
    for text, options in refused:
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(sgd(), **options)
    with pytest.raises(TypeError, match=r"wraps a keras.optimizers.Optimizer, not str"):
        hvd.DistributedOptimizer("sgd")
    once = hvd.DistributedOptimizer(sgd())
    for again in (once, keras.optimizers.LossScaleOptimizer(once)):
        with pytest.raises(ValueError, match="wrap an optimizer once"):
            hvd.DistributedOptimizer(again)
    with pytest.raises(ValueError, match=r"is not among the parameters that the optimizer trains"):
        hvd.DistributedOptimizer(sgd(), groups=[[weight]]).build([keras.Variable(np.zeros(2, "float32"))])
    with pytest.raises(ValueError, match="is not built yet"):
        hvd.PartialDistributedOptimizer(sgd(), local_layers=keras.layers.Dense(1))
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    with pytest.warns(RuntimeWarning, match="was given no variables. Remedy: build the model"):
        hvd.broadcast_variables(unbuilt.variables, root_rank=0)
    with pytest.raises(ValueError, match=r"sequential.* is not built, so it has no weights to send"):
        hvd.broadcast_global_variables(0, unbuilt)
    with pytest.raises(TypeError, match="takes root_rank and then the model, not int"):
        hvd.broadcast_global_variables(unbuilt, 0)
    one = keras.ops.ones(1)
    unknown = pytest.raises(ImportError, match=r"on the numpy backend needs horovodish.numpy")
    with mock.patch.object(keras.config, "backend", return_value="numpy"), unknown:
        hvd.allreduce(one)


@on_ranks(2)
def test_the_guide(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    training, vocabulary, loading = python_blocks("docs/keras.md")
    x = np.random.default_rng(0).normal(size=(32, 6)).astype("float32")
    y = np.stack([x.sum(1), x.prod(1)], 1)
    scope = {"model": mlp(), "x": x, "y": y, "validation_x": x[:8], "validation_y": y[:8], "keras": keras}
    exec(training, scope)
    hvd.barrier()
    exec(loading, scope)
    if keras.config.backend() == "tensorflow":  # lookups need it
        words = {"lookup": keras.layers.StringLookup(), "words_of_this_rank": [f"word {hvd.rank()}"]}
        exec(vocabulary, {**scope, **words})
        assert words["lookup"].get_vocabulary()[1:] == ["word 0"]
    assert scope["model"].optimizer.built


IN_HOROVODS_ORDER = (
    "optimizer name device_dense device_sparse compression sparse_as_dense gradient_predivide_factor op "
    "backward_passes_per_step average_aggregated_gradients num_groups groups process_set scale_local_gradients"
)


def test_arguments_by_position_are_in_horovods_order() -> None:
    assert by_position(hvd.DistributedOptimizer) == IN_HOROVODS_ORDER
