"""Compiled JAX programs on CUDA devices: their calls on pretended GPUs everywhere, all of them where there is a GPU."""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import horovodish as hvd
from support.gpu import needs_gpu
from support.model import FLOATS, difference, reduced, values
from support.pretended_gpu import variables
from support.processes import wait_until
from support.ranks import run_ranks


def program(function: Callable[..., Any], *arrays: Any) -> Any:
    """Compile for a CUDA device. The machine needs none."""
    import jax

    from horovodish.jax import lowering

    lowering.register_handlers = lambda platform: None  # which asks for the device
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",))


def only_the_fusion_buffer_is_left() -> bool:
    import ctypes

    library = ctypes.CDLL(os.environ["HOROVODISH_TEST_CUDA"])
    library.pretend_allocations.restype = ctypes.c_size_t
    return int(library.pretend_allocations()) <= 1


def calls_on_pretended_gpus() -> None:
    import jax

    from support.xla_on_gpu import Gpu

    jax.config.update("jax_enable_x64", True)
    hvd.init()
    gpu = Gpu(hvd.local_rank())
    every_collective(gpu)
    the_stream_waits_and_the_host_does_not(gpu)
    orders_that_differ(gpu)
    what_fails(gpu)
    if hvd.size() == 1:
        executions_at_once(gpu)
    what_goes_through_the_host()
    hvd.barrier()
    gpu.stream.wait()
    wait_until(only_the_fusion_buffer_is_left)  # threads of the engine may be about to let go of what has ended
    if hvd.size() > 1:
        one_that_fails_among_others(gpu)


def results_of(gpu: Any, function: Callable[..., Any], *arrays: Any) -> list[Any]:
    results = gpu.run(program(function, *arrays), arrays)
    gpu.stream.wait()
    return results


def every_collective(gpu: Any) -> None:
    import horovodish.jax as hvd_jax

    rank, size = hvd.rank(), hvd.size()
    for dtype in FLOATS:
        for op in ("Average", "Sum", "Max"):
            by_rank = [values(dtype, (3, 5), r, op) for r in range(size)]
            [result] = results_of(
                gpu, lambda x, op=op: hvd_jax.allreduce(x, op=getattr(hvd, op), name="r"), by_rank[rank]
            )
            assert not (wrong := difference(result, reduced(by_rank, op), 4.0 * size)), f"{dtype} {op}: {wrong}"
    groups = [[values("float32", length, r) for length in (4, 1, 0, 7)] for r in range(size)]
    grouped = results_of(gpu, lambda *given: hvd_jax.grouped_allreduce(list(given), name="group"), *groups[rank])
    for index, result in enumerate(grouped):
        np.testing.assert_allclose(result, reduced([group[index] for group in groups], "Average"), rtol=1e-6)
    equal = [values("int16", (2, 3), r) for r in range(size)]
    [gathered] = results_of(gpu, lambda x: hvd_jax.allgather(x, name="g"), equal[rank])
    np.testing.assert_array_equal(gathered, np.concatenate(equal))
    [sent] = results_of(gpu, lambda x: hvd_jax.broadcast(x, size - 1, name="b"), equal[rank])
    np.testing.assert_array_equal(sent, equal[size - 1])
    rows = [values("float64", (2 * size + 1, 2), r) for r in range(size)]
    [part] = results_of(gpu, lambda x: hvd_jax.reducescatter(x, op=hvd.Sum, name="s"), rows[rank])
    np.testing.assert_allclose(part, np.array_split(reduced(rows, "Sum"), size)[rank])
    dealt = [values("float32", (2 * size, 2), r) for r in range(size)]
    [received] = results_of(gpu, lambda x: hvd_jax.alltoall(x, name="t"), dealt[rank])
    np.testing.assert_array_equal(received, np.concatenate([each[2 * rank : 2 * rank + 2] for each in dealt]))


def the_stream_waits_and_the_host_does_not(gpu: Any) -> None:
    import horovodish.jax as hvd_jax

    array = np.full(6, float(hvd.rank()), np.float32)
    compiled = program(lambda x: hvd_jax.allreduce(x, op=hvd.Sum, name="ordered"), array)
    gpu.stream.hold(True)
    gpu.stream.add(array, 10.0)  # what the program computes before
    [result] = gpu.run(compiled, [array])  # returns although the values are not even computed
    gpu.stream.add(result, 0.5)  # and what it computes after
    gpu.stream.hold(False)
    gpu.stream.wait()
    np.testing.assert_array_equal(result, np.full(6, sum(range(hvd.size())) + 10.0 * hvd.size() + 0.5))


def orders_that_differ(gpu: Any) -> None:
    """XLA may run the calls of a program in another order on every rank."""
    import horovodish.jax as hvd_jax

    arrays = [np.full(3, float(hvd.rank() + index), np.float32) for index in range(4)]

    compiled = program(lambda *given: hvd_jax.allreduce(list(given), op=hvd.Sum, name="ordered"), *arrays)
    text = compiled.as_text()
    assert text.count("@horovodish_start(") == 4
    operands = [given.count("%") for given in re.findall(r"@horovodish_done\(([^)]*)\)", text)]
    assert operands == [4, 1, 1, 1], "all after all starts, without each being told of each"
    results = gpu.run(compiled, arrays, backwards=hvd.rank() % 2 == 1)
    gpu.stream.wait()
    for index, result in enumerate(results):
        np.testing.assert_array_equal(result, np.full(3, sum(rank + index for rank in range(hvd.size()))))


def what_fails(gpu: Any) -> None:
    import horovodish.jax as hvd_jax
    from support.xla_on_gpu import XlaError

    array = np.ones(3, np.float32)
    if hvd.size() > 1:
        mine = np.ones(3 + hvd.rank(), np.float32)
        with pytest.raises(XlaError, match=r"(?s)allreduce 'unequal'.*rank 0.*rank 1") as raised:
            gpu.run(program(lambda x: hvd_jax.allreduce(x, name="unequal"), mine), [mine])
        assert raised.value.args[0] == 3, "an argument is wrong"
    of_last_rank = int(hvd.rank() == hvd.size() - 1)  # which tells the others
    gpu.ordinal += of_last_rank
    with pytest.raises(XlaError, match=r"runs on GPU \d, but this process has used GPU \d.*CUDA_VISIBLE_DEVICES"):
        gpu.run(program(lambda x: hvd_jax.allreduce(x, name="elsewhere"), array), [array])
    gpu.ordinal -= of_last_rank


def executions_at_once(gpu: Any) -> None:
    """Two threads may run one program; each gets its own results once the name is free."""
    import horovodish.jax as hvd_jax
    from support.xla_on_gpu import XlaError

    arrays = [np.full(3, float(index), np.float32) for index in range(2)]
    compiled = program(lambda x: hvd_jax.allreduce(x, name="at once"), arrays[0])
    inner: list[Any] = []

    def second() -> None:
        while not inner:
            with contextlib.suppress(XlaError):  # the name is not free yet
                inner.extend(gpu.run(compiled, arrays[1:]))

    outer = gpu.run(compiled, arrays[:1], between=second)
    gpu.stream.wait()
    np.testing.assert_array_equal([*outer, *inner], arrays)


def one_that_fails_among_others(gpu: Any) -> None:
    """No call waits for an operation that the other rank never starts, because its program is another one."""
    import horovodish.jax as hvd_jax
    from support.xla_on_gpu import XlaError

    arrays = [np.ones(3 + hvd.rank(), np.float32), np.ones(3, np.float32)][: 2 - hvd.rank()]
    calls = program(lambda *given: hvd_jax.allreduce(list(given), name="fails"), *arrays)
    with pytest.raises(XlaError, match="allreduce of 'fails"):
        gpu.run(calls, arrays, backwards=True)


def what_goes_through_the_host() -> None:
    import jax

    import horovodish.jax as hvd_jax
    from horovodish.collectives.operation import Operation
    from horovodish.jax import cuda
    from horovodish.jax.primitive import Traced

    def problem(kind: str, dtype: str, **options: Any) -> str:
        return cuda.problem([Traced(Operation(kind, "x", **options))], [jax.ShapeDtypeStruct((3,), dtype)])

    assert problem("allreduce", "bfloat16", op=hvd.Average, prescale_factor=0.5) == ""
    assert problem("allgather", "bool") == problem("alltoall", "int16") == ""
    assert problem("allreduce", "int16") == "x: NCCL does not reduce int16"
    assert problem("allreduce", "float32", op=hvd.Adasum) == "x: NCCL has no Adasum"
    assert problem("allgather", "float8_e5m2") == "x: no arrays of float8_e5m2"
    encoded = [codec.of("x", (300, 300)) for codec in (hvd_jax.Compression.auto, hvd_jax.Compression.int8)]
    assert [problem("allreduce", "float32", codec=codec) for codec in encoded] == [
        "",
        "x: codes are made in host memory",
    ]
    assert problem("barrier", "int32") == "a barrier is one of the hosts"


@pytest.mark.parametrize("np", [1, 2])
def test_calls_on_pretended_gpus(np: int) -> None:
    more = {"HOROVODISH_PLANE": "nccl", "HOROVODISH_FUSION_THRESHOLD_MB": "0", "JAX_PLATFORMS": "cpu"}
    run_ranks(calls_on_pretended_gpus, np, env=variables(np + 1, **more))


def training_on_a_gpu() -> None:
    """N ranks with batches of B train to the weights of one process with batches of N x B, and all stays on the GPU."""
    import jax
    import optax
    from jax import numpy as jnp

    import horovodish.jax as hvd_jax

    jax.config.update("jax_enable_x64", True)
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    assert jax.devices()[0].platform == "gpu"
    shapes = {"first": (6, 16), "bias": (16,), "second": (16, 2)}
    start = {name: jnp.asarray(values("float64", shape, 0)) for name, shape in shapes.items()}

    def loss_of(parameters: Any, batch: Any) -> Any:
        hidden = jnp.tanh(batch @ parameters["first"] + parameters["bias"])
        return jnp.square(hidden @ parameters["second"]).mean()

    def trained(optimizer: Any, batches: Callable[[int], Any]) -> Any:
        parameters, state = start, optimizer.init(start)

        @jax.jit
        def step(parameters: Any, state: Any, batch: Any) -> Any:
            loss, gradients = jax.value_and_grad(loss_of)(parameters, batch)
            updates, state = optimizer.update(gradients, state, parameters)
            return optax.apply_updates(parameters, updates), state, loss

        for number in range(10):
            parameters, state, _ = step(parameters, state, batches(number))
        return parameters

    parts = [[values("float64", (4, 6), r + number * size) for r in range(size)] for number in range(10)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = trained(hvd_jax.DistributedOptimizer(optax.sgd(0.1)), lambda number: parts[number][rank])
    alone = trained(optax.sgd(0.1), lambda number: np.concatenate(parts[number]))
    for name in shapes:
        np.testing.assert_allclose(ours[name], alone[name], rtol=1e-9, atol=1e-12)
    several_collectives()


def several_collectives() -> None:
    import jax

    import horovodish.jax as hvd_jax

    rank, size = hvd.rank(), hvd.size()
    given = [values("float32", (2 * size, 3), r) for r in range(size)]

    @jax.jit
    def all_kinds(x: Any) -> Any:
        return (
            hvd_jax.allreduce(x, op=hvd.Sum, name="sum"),
            hvd_jax.allgather(x, name="gathered"),
            hvd_jax.broadcast(x, size - 1, name="sent"),
            hvd_jax.reducescatter(x, op=hvd.Sum, name="dealt"),
            hvd_jax.alltoall(x, name="exchanged"),
            hvd_jax.allreduce(x.astype("int16"), op=hvd.Sum, name="over the host"),
        )

    for _ in range(3):
        total, gathered, sent, dealt, exchanged, short = all_kinds(given[rank])
        assert not difference(np.asarray(total), reduced(given, "Sum"), 4.0 * size)
        np.testing.assert_array_equal(gathered, np.concatenate(given))
        np.testing.assert_array_equal(sent, given[size - 1])
        assert not difference(np.asarray(dealt), reduced(given, "Sum")[2 * rank : 2 * rank + 2], 4.0 * size)
        np.testing.assert_array_equal(exchanged, np.concatenate([each[2 * rank : 2 * rank + 2] for each in given]))
        np.testing.assert_array_equal(short, sum(each.astype("int16") for each in given))


@pytest.mark.gpu
@pytest.mark.parametrize("np", [1, 2])
def test_a_gpu(np: int) -> None:
    needs_gpu()
    more = {"HOROVODISH_TEST_SHARED_GPU": "1", "HOROVODISH_PLANE": "nccl", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    run_ranks(training_on_a_gpu, np, env={**more, "JAX_PLATFORMS": "cuda,cpu"})
