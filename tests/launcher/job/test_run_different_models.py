"""Ranks that have built different models, in each framework: the message says what only one of them has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

ENDS_WITHIN_SECONDS = 200
TORCH = """
import torch
import horovodish.torch as hvd
hvd.init()
model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(1 + hvd.rank())])
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
model(torch.ones(2, 4)).sum().backward()
"""
BROADCAST = """
import torch
import horovodish.torch as hvd
hvd.init()
hvd.broadcast_parameters(torch.nn.Linear(4, 4 + hvd.rank()).state_dict())
"""
KERAS = """
os.environ["KERAS_BACKEND"] = "{}"
import keras, numpy as np
import horovodish.keras as hvd
hvd.init()
layers = [keras.layers.Dense(4, name=f"layer{{number}}") for number in range(1 + hvd.rank())]
model = keras.Sequential([keras.layers.Input((4,)), *layers], name="model")
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
model.fit(np.ones((8, 4)), np.ones((8, 4)), batch_size=8, verbose=0)
"""
TENSORFLOW = """
import tensorflow as tf
import horovodish.tensorflow as hvd
hvd.init()
weights = [tf.Variable(tf.ones({size}), name=f"layer{{number}}") for number in range({layers})]
def step():
    with tf.GradientTape() as tape:
        loss = sum(tf.reduce_sum(weight) for weight in weights)
    return hvd.DistributedGradientTape(tape).gradient(loss, weights)
{run}(step)()
"""
LONG = pytest.mark.soak  # the other rows go the same ways
LAYERS = {"size": "2", "layers": "1 + hvd.rank()"}
WIDTH = {"size": "2 + hvd.rank()", "layers": "2"}
JAX = """
import jax, optax
from jax import numpy as jnp
import horovodish.jax as hvd
hvd.init()
optimizer = hvd.DistributedOptimizer(optax.sgd(0.1))
parameters = {f"layer{number}": jnp.ones(2) for number in range(1 + hvd.rank())}
state = optimizer.init(parameters)
jax.block_until_ready(jax.jit(optimizer.update)(parameters, state, parameters))
"""
MLX = """
import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
import horovodish.mlx as hvd
hvd.init()
model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(1 + hvd.rank())])
optimizer = hvd.DistributedOptimizer(optim.SGD(0.1))
_, gradients = nn.value_and_grad(model, lambda inputs: model(inputs).sum())(mx.ones((2, 4)))
optimizer.update(model, gradients)
"""


def differ(only: str) -> str:
    return f"the ranks' models differ: rank 0 trains 2 parameters, rank 1 trains 4: only rank 1 has {only}. Remedy: "


@pytest.mark.parametrize(
    ("code", "text"),
    [
        pytest.param(TORCH, differ("1.weight, 1.bias"), id="torch"),
        pytest.param(
            BROADCAST,
            "bias is of shape (4,) on rank 0 and of shape (5,) on rank 1, and 1 more differ; build the same model",
            id="broadcast",
        ),
        pytest.param(
            KERAS.format("torch"), differ("model/layer1/kernel, model/layer1/bias"), id="keras on torch", marks=LONG
        ),
        pytest.param(
            KERAS.format("tensorflow"), differ("model/layer1/kernel, model/layer1/bias"), id="keras on tf", marks=LONG
        ),
        pytest.param(
            KERAS.format("jax"), differ("model/layer1/kernel, model/layer1/bias"), id="keras on jax", marks=LONG
        ),
        *[
            pytest.param(TENSORFLOW.format(run=run, **how), text, id=f"tensorflow, {name} {what}", marks=marks or eager)
            for run, name, eager in (("", "eager", LONG), ("tf.function", "function", ()))
            for how, text, what, marks in (
                (LAYERS, "rank 0 trains 1 parameter, rank 1 trains 2: only rank 1 has layer1", "layers", LONG),
                (WIDTH, "variable 0 (layer0) is of shape (2,) on rank 0 and of shape (3,) on rank 1", "width", ()),
            )
        ],
        pytest.param(JAX, "rank 0 has 'optimizer.rank.py:7['layer0']'", id="jax"),
        pytest.param(MLX, differ("layers.1.weight, layers.1.bias"), id="mlx"),
    ],
)
def test_the_message_says_what_only_one_rank_has(launch_ranks: Callable[..., Any], code: str, text: str) -> None:
    if "mlx" in code:
        pytest.importorskip("mlx.core")
    job = launch_ranks(2, code, mpi=False, env={"CUDA_VISIBLE_DEVICES": ""})
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 1
    said = "\n".join(job.stderr.lines)
    assert text in said, said


def test_what_needs_init_says_so(launch_ranks: Callable[..., Any]) -> None:
    code = "import horovodish as hvd\nhvd.allreduce([1.0])"
    job = launch_ranks(1, code, mpi=False)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 1
    lines = [line for line in job.stderr.lines if not line.strip().startswith("^")]
    lines = lines[lines.index("Traceback (most recent call last):") :]
    assert lines[1].endswith('rank.py", line 3, in <module>')
    assert lines[2] == "    hvd.allreduce([1.0])"
    assert lines[3].endswith("horovodish is not running in this process: call hvd.init() before allreduce()")


def test_the_function_that_needs_init_is_the_one_that_the_script_calls(launch_ranks: Callable[..., Any]) -> None:
    """And not one of ours that begins a `with` in it."""
    pytest.importorskip("torch")
    code = "import torch, horovodish.torch as hvd\nhvd.broadcast_parameters({'w': torch.ones(1)}, 0)"
    job = launch_ranks(1, code, mpi=False)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 1
    assert job.stderr.lines[-1].endswith("call hvd.init() before broadcast_parameters()")
