"""A rank that has fewer steps than the others, in each framework: who waits says for what, where, and what helps."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.mpi_command import mpi_command, mpi_environment

ENDS_WITHIN_SECONDS = 200
TORCH = """
import torch
import horovodish.torch as hvd
hvd.init()
weight = torch.nn.Parameter(torch.ones(3))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), [("layer.weight", weight)])
def step():
    optimizer.zero_grad()
    weight.sum().backward()
    optimizer.step()
"""
TENSORFLOW = """
import tensorflow as tf
import horovodish.tensorflow as hvd
hvd.init()
weight = tf.Variable([1.0, 2.0], name="layer.weight")
def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight)
    hvd.DistributedGradientTape(tape).gradient(loss, [weight])
"""
KERAS = """
os.environ["KERAS_BACKEND"] = "{}"
import keras, numpy as np
import horovodish.keras as hvd
hvd.init()
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
def step():
    model.fit(np.ones((8, 4)), np.ones((8, 1)), batch_size=8, verbose=0)
"""
JAX = """
import jax, optax
from jax import numpy as jnp
import horovodish.jax as hvd
hvd.init()
optimizer = hvd.DistributedOptimizer(optax.sgd(0.1))
parameters = {"layer.weight": jnp.ones(3)}
state = optimizer.init(parameters)
def update(parameters, state):
    updates, state = optimizer.update(jax.grad(lambda p: p["layer.weight"].sum())(parameters), state, parameters)
    return optax.apply_updates(parameters, updates), state
def step():
    global parameters, state
    parameters, state = jax.block_until_ready(update(parameters, state))
"""
FRAMEWORKS = {
    "torch": TORCH,
    "tensorflow": TENSORFLOW,
    "tensorflow, compiled": TENSORFLOW + "step = tf.function(step)",
    "keras on torch": KERAS.format("torch"),
    "keras on tensorflow": KERAS.format("tensorflow"),
    "keras on jax": KERAS.format("jax"),
    "jax": JAX,
    "jax, compiled": JAX + "update = jax.jit(update)",
}
LOOP = """
for number in range(3 - hvd.rank()):
    step()  # waits here
"""


LONG = ("keras on torch", "keras on tensorflow", "keras on jax", "tensorflow", "jax", "jax, compiled")


@pytest.mark.parametrize(
    "framework", [pytest.param(each, marks=pytest.mark.soak if each in LONG else ()) for each in FRAMEWORKS]
)
def test_the_message_has_steps_place_and_remedy(launch_ranks: Callable[..., Any], framework: str) -> None:
    ending = "sys.exit()" if "compiled" in framework else ""
    job = launch_ranks(2, FRAMEWORKS[framework] + LOOP + ending, mpi=False, env={"CUDA_VISIBLE_DEVICES": ""})
    status = job.finish(within=ENDS_WITHIN_SECONDS)
    said = "\n".join(job.stderr.lines)
    assert status == 1, said
    by = r" by sys.exit\(\) in rank.py:\d+" if ending else ""
    assert re.search(f"failed on rank 0 in step 3: rank 1 has ended its script{by} after 2 steps", said), said
    assert "\nRemedy: if the ranks have different numbers of batches, give every rank equally many" in said, said
    assert not re.search('File ".*(horovodish|-packages)/', said), said
    last_words = job.stderr.lines[-1]
    assert re.match(r"horovodish: rank 0 on \S+ failed with exit status 1: RankLostError: allreduce of '", last_words)
    assert ("sequential/dense/bias" if "keras" in framework else "layer.weight") in last_words
    assert re.search(r'rank.py", line \d+, in <module>\n    step\(\)  # waits here', said), said
    assert re.search(r"; rank 0 waits in rank.py:\d+$", last_words)


def test_a_status_of_its_own_is_kept_however_slow_the_exit(launch_ranks: Callable[..., Any]) -> None:
    code = """
import atexit, time
atexit.register(lambda: time.sleep(1.5 * exits))  # after horovodish has left
import horovodish as hvd
hvd.init()
hvd.barrier()
exits = hvd.rank() == 1
if exits: sys.exit(3)
hvd.barrier()
"""
    job = launch_ranks(2, code, mpi=False)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 3, job.stderr.lines
    assert "failed on rank 0: rank 1 called sys.exit(3) in rank.py:9" in "\n".join(job.stderr.lines)
    assert job.stderr.lines[-1].endswith(
        "failed with exit status 3: it called sys.exit(3) in rank.py:9; rank 0 waits in rank.py:10"
    )


@pytest.mark.parametrize(
    "way",
    [
        "with open(os.devnull): sys.exit(3)",
        "try: sys.exit(3)\n    finally: pass",
        "try: sys.exit(3)\n    except BaseException: raise",
        "[sys.exit(3) for _ in range(2)]",
    ],
)
def test_an_exit_from_within_something_is_named(launch_ranks: Callable[..., Any], way: str) -> None:
    code = f"""
import os, sys
import horovodish as hvd
hvd.init()
hvd.barrier()
def leave(status=3):
    {way}
if hvd.rank() == 1: leave()
hvd.barrier()
"""
    job = launch_ranks(2, code, mpi=False)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 3, job.stderr.lines
    assert re.search(r"failed with exit status 3: it called sys.exit\(3\) in rank.py:8; rank 0", job.stderr.lines[-1])


@pytest.mark.parametrize(
    ("way", "status"),
    [
        ("raise SystemExit(3)", 3),
        ("raise type('Stop', (SystemExit,), {})(3)", 3),
        ("raise SystemExit('no data')", 1),
    ],
)
def test_an_exit_that_is_raised_keeps_its_status(launch_ranks: Callable[..., Any], way: str, status: int) -> None:
    code = f"""
import atexit, time
atexit.register(lambda: time.sleep(1.5 * exits))  # after horovodish has left
import horovodish as hvd
hvd.init()
hvd.barrier()
exits = hvd.rank() == 1
if exits:
    {way}
hvd.barrier()
"""
    job = launch_ranks(2, code, mpi=False)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == status, job.stderr.lines
    words = rf"rank 1 .* failed with exit status {status}: it called SystemExit\(.*\)( in rank.py:10)?; rank 0 waits in"
    assert re.search(words, job.stderr.lines[-1])


def test_an_exit_that_the_script_has_caught_is_none(launch_ranks: Callable[..., Any]) -> None:
    code = """
import sys
import horovodish as hvd
hvd.init()
try: sys.exit(3)
except SystemExit: pass
if hvd.rank() == 0: hvd.barrier()
"""
    job = launch_ranks(2, code, mpi=False)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 1, job.stderr.lines
    assert job.stderr.lines[-1].endswith("failed on rank 0: rank 1 has ended its script; rank 0 waits in rank.py:8")


def test_equal_errors_are_shown_once(launch_ranks: Callable[..., Any]) -> None:
    code = "import horovodish as hvd\nhvd.init()\nif hvd.rank() != 1: hvd.barrier()"
    job = launch_ranks(3, code, mpi=False)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 1
    assert sum("Traceback" in line for line in job.stderr.lines) == 1
    assert any(re.match(r"horovodish: ranks 0(,| and) 2 on \S+ raised:", line) for line in job.stderr.lines)
    assert job.stderr.lines[-1].endswith("rank 1 has ended its script; ranks 0, 2 wait in rank.py:4")


def test_under_plain_mpirun_the_traceback_is_shown_as_well(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text("import horovodish as hvd\nhvd.init()\nif hvd.rank() == 0: hvd.barrier()\n")
    command = [*mpi_command(2, survivors=False), sys.executable, str(script)]
    ended = subprocess.run(command, env=mpi_environment(), capture_output=True, text=True, timeout=ENDS_WITHIN_SECONDS)
    assert ended.returncode != 0
    assert 'rank.py", line 3, in <module>' in ended.stderr
    assert "failed on rank 0: rank 1 has ended its script\nRemedy: " in ended.stderr
