"""`horovodish status` names the rank, its host and the call if a framework's job hangs."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from typing import Any

import pytest

from support.status import wait_for_sentence

HOST = re.escape(socket.gethostname())
MISSING = rf"rank 1 on {HOST} has not called {{call}}: ranks 0, 2 have waited for it for \d+ s\. Rank 1 has nothing .*"
LATE = "if rank == 1: time.sleep(1000)\n"

JAX = f"""
import jax, jax.numpy as jnp, horovodish.jax as hvd
hvd.init()
reduced = jax.jit(lambda x: hvd.allreduce(x, name="loss"))
reduced(jnp.zeros(3)).block_until_ready()
{LATE}
reduced(jnp.zeros(3)).block_until_ready()
"""
TENSORFLOW = f"""
import tensorflow as tf, horovodish.tensorflow as hvd
hvd.init()
reduced = tf.function(lambda x: hvd.allreduce(x, name="loss"))
reduced(tf.zeros(3))
{LATE}
reduced(tf.zeros(3)).numpy()
"""
TORCH = """
import torch, horovodish.torch as hvd
hvd.init()
model = torch.nn.Linear(3, 1, bias=False)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(){options})
for step in range(9):
    if step == 3 and rank in {late}: time.sleep(1000)
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
"""
# With wait_for=2 the gradients of two late ranks may be used in two steps.
LATE_STEP = r"step\(\) number \d of 'late steps of optimizer 1' with wait_for={count}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "code", "expected"),
    [
        ("jax", JAX, MISSING.format(call="allreduce 'loss'")),
        ("tensorflow", TENSORFLOW, MISSING.format(call="allreduce 'loss'")),
        ("torch", TORCH.format(options="", late=(1,)), MISSING.format(call="allreduce of .*'weight'.*")),
        (
            "torch",
            TORCH.format(options=", wait_for=2", late=(1, 2)),
            rf"ranks 1-2 on {HOST} have not called {LATE_STEP.format(count=2)}: rank 0 has waited for it for \d+ s",
        ),
        (
            "torch",
            TORCH.format(options=", wait_for=3", late=(0,)),
            rf"rank 0 on {HOST} has not called {LATE_STEP.format(count=3)}: ranks 1-2 have waited for it for \d+ s\..*",
        ),
    ],
    ids=["jax", "tensorflow", "torch", "wait_for=", "wait_for= of the first rank"],
)
def test_the_late_rank_is_named(hang: Callable[..., Any], framework: str, code: str, expected: str) -> None:
    pytest.importorskip(framework)
    assert len(wait_for_sentence(hang(code).process.pid, expected)) == 1
