"""Two frameworks in one process share one engine; JAX has a module of Horovod's kind, too."""

import pickle

import horovod.jax
import horovod.torch as hvd
import jax
import jax.numpy as jnp
import optax
import torch

hvd.init()
assert horovod.jax.is_initialized() and horovod.jax.size() == hvd.size() == 2
weights = horovod.jax.broadcast_parameters({"w": jnp.full((3,), float(hvd.rank()))}, root_rank=1)
optimizer = horovod.jax.DistributedOptimizer(optax.sgd(0.1))
state = optimizer.init(weights)


@jax.jit
def step(weights, state, inputs):
    gradients = jax.grad(lambda given: (given["w"] * inputs).sum())(weights)
    updates, state = optimizer.update(gradients, state, weights)
    return optax.apply_updates(weights, updates), state


weights, state = step(weights, state, jnp.full((3,), float(hvd.rank())))
assert jnp.allclose(weights["w"], 0.95)
assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == horovod.jax.allreduce(jnp.ones(2), op=hvd.Sum).tolist()

# What names a class of Horovod's by its module is loaded, and the class is the same.
loaded = pickle.loads(b"chorovod.torch.compression\nFP16Compressor\n.")
assert loaded is hvd.Compression.fp16
for compression in (hvd.Compression.fp16, horovod.jax.Compression.bf16):
    assert pickle.loads(pickle.dumps(compression)) is compression


class Own(hvd.Compression.fp16):
    dtype = torch.bfloat16


assert Own.compress(torch.ones(1))[0].dtype == torch.bfloat16
assert pickle.loads(pickle.dumps(hvd.Sum)) == hvd.Sum
print("done")
