"""The examples for TensorFlow, and code of its guide, do what they say, on two ranks."""

from __future__ import annotations

import re

import pytest

from support.documents import python_blocks
from support.on_ranks import on_ranks
from support.scripts import output_of
from support.sources import ROOT


@pytest.mark.soak
def test_a_loop_of_ones_own() -> None:
    output = output_of(ROOT / "examples/tensorflow_custom_loop.py", np=2)
    accuracy = re.search(r"test accuracy (\d\.\d+), weights equal on 2 ranks\n", output)
    assert accuracy is not None and float(accuracy[1]) >= 0.93, output
    assert output.count("epoch  1/") == 1, "only rank 0 may print"


@pytest.mark.soak
def test_an_embedding() -> None:
    output = output_of(ROOT / "examples/tensorflow_embedding.py", np=2)
    loss = re.search(r"final loss (\d+\.\d+), tables equal on 2 ranks\n", output)
    assert loss is not None and float(loss[1]) < 0.01, output
    rows = [int(number) for number in re.findall(r"(\d+) of 20000 rows", output)]
    assert len(rows) == 4
    assert all(350 < number <= 400 for number in rows), "both ranks use the same 400 words"


@pytest.mark.soak
@pytest.mark.parametrize("scale", [16.0, 2.0**127], ids=["finite", "infinite on rank 1"])
@on_ranks(2)
def test_mixed_precision(scale: float) -> None:
    import keras
    import tensorflow as tf

    import horovodish.tensorflow as hvd

    def loss_of(labels: tf.Tensor, given: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean((tf.cast(given, tf.float32) - labels) ** 2)

    (code,) = (block for block in python_blocks("docs/tensorflow.md") if "scale_loss" in block)
    make_model = lambda: keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])  # noqa: E731
    names = {"hvd": hvd, "keras": keras, "tf": tf, "loss_of": loss_of, "make_model": make_model}
    try:
        exec(code, names)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    model, before = names["model"], names["model"].get_weights()
    names["optimizer"].dynamic_scale.assign(scale if hvd.rank() else 16.0)
    names["step"](tf.random.normal([4, 3]), tf.ones([4, 1]))
    weights = hvd.allgather_object(model.get_weights())
    assert all((one == other).all() for one, other in zip(*weights, strict=True))
    assert (weights[0][0] == before[0]).all() == (scale > 16)
