"""horovodish.jax in compiled programs: what XLA and JAX's transformations make of a collective and must not make."""

from __future__ import annotations

import re
import threading
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from jax.experimental import serialize_executable
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

import horovodish
import horovodish.jax as hvd
from horovodish.collectives.xla_call import start_attributes
from horovodish.jax import lowering
from horovodish.jax.primitive import primitive
from support.on_ranks import on_ranks
from support.ranks import run_ranks

# The class depends on whether the program fails while JAX dispatches it.
FAILED = (jax.errors.JaxRuntimeError, ValueError)

START, DONE = 'custom_call_target="horovodish_start"', 'custom_call_target="horovodish_done"'


def hlo(function: Any, *arguments: Any) -> str:
    return jax.jit(function).lower(*arguments).compile().as_text()


def calls(function: Any, *arguments: Any) -> tuple[int, int]:
    """How many starts and dones a function's compiled program has."""
    text = hlo(function, *arguments)
    return text.count(START), text.count(DONE)


def total(x: Any, name: str | None = None) -> Any:
    return hvd.allreduce(x, op=hvd.Sum, name=name)


@on_ranks(2)
def test_nothing_is_dropped_merged_or_hoisted() -> None:
    x, size = jnp.ones(3), hvd.size()
    assert calls(lambda x: x + 0 * total(x), x) == (1, 1)
    assert calls(lambda x: (total(x), x)[1], x) == (1, 1), "dropped where the result is not used"
    assert calls(lambda x: total(x, "a") + total(x, "b"), x) == (2, 2), "merged"
    assert calls(lambda x: total(jnp.ones(3)), x) == (1, 1), "computed at compile time"

    def invariant(x: Any) -> Any:
        return lax.fori_loop(0, 5, lambda _, y: y + total(x, "invariant"), x)

    text = hlo(invariant, x)
    entry = text[text.index("\nENTRY") :]
    assert START in text and START not in entry, "hoisted out of a loop"
    np.testing.assert_allclose(jax.jit(invariant)(x), 1 + 5 * size)

    def both_branches(flag: Any, x: Any) -> Any:
        return lax.cond(flag, lambda x: total(x, "branch"), lambda x: x * 10, x)

    assert calls(both_branches, True, x) == (1, 1)
    np.testing.assert_allclose(jax.jit(both_branches)(True, x), size)
    np.testing.assert_allclose(jax.jit(both_branches)(False, x), 10)

    def until(x: Any) -> Any:
        return lax.while_loop(lambda x: x[0] < 100, lambda x: total(x, "until"), x)

    np.testing.assert_allclose(jax.jit(until)(x), size ** np.ceil(np.log(100) / np.log(size)))
    carried, each = jax.jit(lambda x: lax.scan(lambda c, row: (total(c) + row, total(row)), x, jnp.ones((4, 3))))(x)
    assert each.shape == (4, 3) and float(each[0, 0]) == size
    np.testing.assert_allclose(carried, size**4 + sum(size**power for power in range(4)))


@on_ranks(2)
def test_every_done_depends_on_every_start() -> None:
    """Otherwise ranks that come to the calls in different orders could wait for one another for ever."""
    tree = [jnp.ones(1_500_000 + index) for index in range(6)]
    text = hlo(lambda tree: hvd.allreduce(tree, name="tree"), tree)
    assert text.count(START) == 6
    assert re.search(r"s32\[6\]\S* concatenate", text), "one array of all numbers"
    dones = re.findall(rf"custom-call\((%[\w.]+)\), {re.escape(DONE)}", text)
    assert len(dones) == 6
    counts = [re.search(rf"{re.escape(numbers)} = s32\[(\d)\]", text) for numbers in dones]
    assert sorted(int(count[1]) for count in counts if count) == [1, 2, 3, 4, 5, 6], (
        "each leaves one number to the next"
    )


@pytest.mark.shows("Collectives in compiled programs")
@on_ranks(2)
def test_leaves_travel_together() -> None:
    """A program with two calls for each leaf would take XLA seconds to compile."""
    large, small, of_another_dtype = jnp.ones(1_500_000), jnp.ones(4), jnp.arange(4)
    tree = {"large": large, "small": [small, small, small], "other": of_another_dtype}
    for collective, calls in (
        (hvd.allreduce, 3),
        (hvd.reducescatter, 3),
        (lambda tree: hvd.broadcast(tree, 0), 3),
        (hvd.allgather, 2),
    ):
        assert hlo(collective, tree).count(START) == calls


@on_ranks(2)
def test_results_are_used_one_after_another() -> None:
    """So that the memory of one serves the next."""
    tree = [jnp.ones(1_500_000 + index) for index in range(6)]

    def update(parameters: Any, tree: Any) -> Any:
        return jax.tree.map(jnp.add, parameters, hvd.allreduce(tree, name="results"))

    compiled = jax.jit(update, donate_argnums=0).lower(tree, tree).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5 * tree[0].nbytes


@on_ranks(2)
def test_names() -> None:
    def looped(x: Any) -> Any:
        for _ in range(3):
            x = hvd.allreduce(x)
        return x

    text = hlo(looped, jnp.ones(2))
    found = re.findall(r'name = "(allreduce[^"]*)"', text)
    line = looped.__code__.co_firstlineno + 2
    place = f"allreduce.test_programs.py:{line}"
    assert sorted(found) == [place, f"{place}#2", f"{place}#3"]
    text = hlo(lambda tree: hvd.allreduce(tree, name="g"), {"w": [jnp.ones(2), jnp.ones(3)]})
    assert r"members = \"g['w'][1]\0Ag['w'][0]\0A\"".replace('\\"', '"') in text
    found = re.findall(r'name = "(again[^"]*)"', hlo(lambda x: total(x, "again") + total(x * 2, "again"), jnp.ones(2)))
    assert sorted(found) == ["again", "again#2"]


@on_ranks(2)
def test_a_name_that_is_in_flight() -> None:
    """The rank that finds it refuses, and so no other rank waits for the second operation."""
    program = jax.jit(lambda x: total(x, "twice"))
    program.lower(jnp.ones(3)).compile()
    if hvd.rank() == 0:
        first = horovodish.allreduce_async(np.ones(3, np.float32), op=hvd.Sum, name="twice")
        with pytest.raises(FAILED, match=r"'twice' on rank 0: an operation of that name has not"):
            program(jnp.ones(3)).block_until_ready()
    hvd.barrier()
    if hvd.rank() != 0:
        program(jnp.ones(3)).block_until_ready()  # with what rank 0 has begun
        with pytest.raises(FAILED, match=r"rank 0 cannot take part: allreduce 'twice' on rank 0: an operation of that"):
            program(jnp.ones(3)).block_until_ready()
    hvd.barrier()
    if hvd.rank() == 0:
        np.testing.assert_array_equal(first.wait(), hvd.size())
    np.testing.assert_array_equal(program(jnp.ones(3)), hvd.size())


@jax.custom_vjp
def mean_of_all(x: Any) -> Any:
    return hvd.allreduce(x, name="custom")


mean_of_all.defvjp(
    lambda x: (mean_of_all(x), None),
    lambda _, gradient: (hvd.allreduce(gradient, name="custom backwards"),),
)


@pytest.mark.soak
@on_ranks(2)
def test_derivatives() -> None:
    rank, size = hvd.rank(), hvd.size()
    weights = jnp.arange(4.0) + rank
    summed = sum(np.arange(4.0) + other for other in range(size))

    def gradient(function: Any, shape: tuple[int, ...] = (4,)) -> Any:
        results = [derivative(jnp.ones(shape)) for derivative in (jax.grad(function), jax.jit(jax.grad(function)))]
        np.testing.assert_array_equal(*results)
        return results[0]

    np.testing.assert_allclose(gradient(lambda x: total(x, "s") @ weights), summed)
    np.testing.assert_allclose(gradient(lambda x: hvd.allreduce(x, name="m") @ weights), summed / size)
    np.testing.assert_allclose(gradient(lambda x: hvd.broadcast(x, 1, name="b") @ weights), summed * (rank == 1))
    cubed = jax.grad(lambda x: (hvd.broadcast(x, 0, name="h") ** 3).sum())
    second = gradient(lambda x: cubed(x).sum())
    np.testing.assert_allclose(second, np.full(4, 6.0 * size * (rank == 0)))
    np.testing.assert_allclose(gradient(lambda x: hvd.barrier(x, name="w") @ weights), weights)
    gathered = gradient(lambda x: hvd.allgather(x, name="g") @ (jnp.arange(2.0 * size) + rank), (2,))
    np.testing.assert_allclose(gathered, size * (np.arange(2) + 2 * rank) + sum(range(size)))
    rows = gradient(lambda x: hvd.reducescatter(x, name="r", op=hvd.Sum).sum() * (rank + 1), (3, 2))
    dealt = np.concatenate(
        [np.full((len(part), 2), other + 1) for other, part in enumerate(np.array_split(np.ones(3), size))]
    )
    np.testing.assert_allclose(rows, dealt)
    scaled = {"prescale_factor": 3.0, "postscale_factor": 0.5}
    means = gradient(lambda x: hvd.reducescatter(x, name="m", **scaled).sum() * (rank + 1), (3, 2))
    np.testing.assert_allclose(means, dealt * 1.5 / size)
    np.testing.assert_allclose(gradient(lambda x: hvd.allreduce(x, name="f", **scaled) @ weights), summed * 1.5 / size)
    if size == 2:
        sent = gradient(lambda x: (hvd.alltoall(x, name="a") * (rank + 1)).sum())
        np.testing.assert_allclose(sent, [1, 1, 2, 2])
    np.testing.assert_allclose(jax.jvp(lambda x: total(x, "t"), (weights,), (weights,))[1], summed)
    second = jax.jit(jax.hessian(lambda x: (total(x, "h") ** 2).sum()))(jnp.ones(2))
    np.testing.assert_allclose(second, 2 * size * size * np.eye(2))
    for checkpoint in (jax.checkpoint, lambda function: function):
        kept = gradient(checkpoint(lambda x: total(jnp.sin(x), "c").sum()))
        np.testing.assert_allclose(kept, size * np.cos(np.ones(4)), rtol=1e-6)
    np.testing.assert_allclose(
        gradient(lambda x: mean_of_all(jnp.sin(x)) @ weights), summed / size * np.cos(1), rtol=1e-6
    )
    # A part of a group has no gradient, and another part nothing that depends on it.
    both = gradient(lambda x: hvd.grouped_allreduce([x, x * 2, jnp.arange(2)], op=hvd.Sum, name="parts")[0] @ weights)
    np.testing.assert_allclose(both, summed)
    for derivative in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        with pytest.raises(NotImplementedError, match=r"largest: allreduce has a derivative for .* not for op=Max"):
            derivative(lambda x: hvd.allreduce(x, op=hvd.Max, name="largest").sum())(jnp.ones(2))


@on_ranks(2)
def test_batches() -> None:
    rank, size = hvd.rank(), hvd.size()
    rows = jnp.arange(12.0).reshape(3, 4) + rank
    every = np.stack([np.arange(12.0).reshape(3, 4) + other for other in range(size)])
    for mapped in (jax.vmap, lambda f, *a: jax.jit(jax.vmap(f, *a))):
        np.testing.assert_allclose(mapped(lambda x: total(x, "v"))(rows), every.sum(0))
        np.testing.assert_allclose(mapped(lambda x: total(x, "v"), 1, 1)(rows), every.sum(0))
        np.testing.assert_allclose(mapped(lambda x: hvd.allgather(x, name="v"))(rows), np.concatenate(every, 1))
        np.testing.assert_allclose(mapped(lambda x: hvd.broadcast(x, 1, name="v"))(rows), every[1])
        scattered = mapped(lambda x: hvd.reducescatter(x, op=hvd.Sum, name="v"))(rows)
        np.testing.assert_allclose(scattered, np.array_split(every.sum(0), size, axis=1)[rank])
        dealt = mapped(lambda x: hvd.alltoall(x, name="v"))(rows)
        np.testing.assert_allclose(dealt, np.concatenate(np.split(every, size, axis=2)[rank], axis=1))
        np.testing.assert_allclose(mapped(lambda x: hvd.barrier(x, name="v"))(rows), rows)
        # One member of the group is the same in the whole batch.
        pair = mapped(lambda x: hvd.grouped_allreduce([x, jnp.ones(2)], op=hvd.Sum, name="v"))(rows)
        np.testing.assert_allclose(pair[0], every.sum(0))
        np.testing.assert_allclose(pair[1], np.full((3, 2), size))
        slopes = mapped(jax.grad(lambda x: total(jnp.sin(x), "v").sum()))(rows)
        np.testing.assert_allclose(slopes, size * np.cos(rows), rtol=1e-5, atol=1e-6)
        with pytest.raises(NotImplementedError, match="Adasum scales each array as a whole"):
            mapped(lambda x: hvd.allreduce(x, op=hvd.Adasum, name="v"))(rows)
    assert calls(jax.vmap(lambda x: total(x, "v")), rows) == (1, 1), "one call for the whole batch"


def several_devices() -> None:
    """This process has two devices of its own."""
    assert len(jax.local_devices()) == 2
    mesh = jax.make_mesh((2,), ("d",))
    spec = PartitionSpec("d")
    mapped = jax.shard_map(lambda x: total(x, "p"), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    sharded = jax.device_put(jnp.ones((2, 3)), jax.sharding.NamedSharding(mesh, spec))
    for function, given in (
        (jax.pmap(lambda x: total(x, "p")), np.ones((2, 3))),
        (jax.jit(mapped), sharded),
        (jax.jit(lambda x: total(x, "p")), sharded),
    ):
        with pytest.raises(NotImplementedError, match=r"several devices of one process .* use jax\.lax\.psum"):
            function(given)
    on_the_other = jax.device_put(jnp.ones(3), jax.local_devices()[1])
    for function in (total, jax.jit(total)):
        assert function(on_the_other).devices() == {jax.local_devices()[1]}


def orders_that_differ() -> list[np.ndarray]:
    """Ranks that come to the buckets of a tree in different orders do not wait for one another for ever.

    Gives what has come of it, which is the same in every run.
    """
    rank = hvd.rank()

    def program(x: Any) -> Any:
        # What each leaf needs first differs by rank: early leaves are late ones on another rank.
        leaves = []
        for index in range(8):
            depth = (7 - index, index, index * 3 % 8)[rank]
            y = x + index
            for _ in range(depth):
                y = jnp.tanh(y @ x) * 1e-3
            leaves.append(y)
        return hvd.allreduce(leaves, op=hvd.Sum, name="orders")

    x = jax.random.normal(jax.random.key(rank), (400, 400))
    runs = [[np.asarray(leaf) for leaf in jax.jit(program)(x)] for _ in range(5)]
    for again in runs[1:]:
        np.testing.assert_array_equal(again, runs[0])
    # Separate calls of one program, which XLA runs one after another because each is small.
    many = jax.jit(lambda x: sum(total(x + index, f"small {index}").sum() for index in range(40)))
    for _ in range(5):
        many(jnp.ones(2)).block_until_ready()
    return runs[0]


@on_ranks(2)
def test_no_numbers() -> None:
    """NaN and infinity are in the results of all ranks, and nowhere else in them."""
    x = jnp.where(jnp.arange(5) == hvd.rank(), jnp.array([jnp.nan, jnp.inf, 0, 0, 0]), 1.0)
    for op in (hvd.Sum, hvd.Average, hvd.Max, hvd.Min):
        result = np.asarray(jax.jit(lambda x, op=op: hvd.allreduce(x, op=op, name="no numbers"))(x))
        assert np.isnan(result).tolist() == [True] + [False] * 4, op
        assert np.isposinf(result).tolist() == [False, op is not hvd.Min] + [False] * 3, op


@on_ranks(2)
def test_runs_that_are_not_waited_for() -> None:
    """The next run of a program begins when the last one is done with its names."""
    program = jax.jit(lambda x: total(x[0, 0], "runs") + 0 * (x @ x)[0, 0])
    results = [program(jnp.full((300, 300), float(index))) for index in range(20)]
    np.testing.assert_allclose(results, hvd.size() * np.arange(20.0))


@on_ranks(2)
def test_starts_are_within_the_backward_pass() -> None:
    """And no result is asked for before all have begun: the order in which XLA runs the program."""
    layers = {f"layer_{number}": jnp.ones((1024, 1024)) for number in range(6)}  # a bucket each

    def loss(layers: Any, x: Any) -> Any:
        for name in sorted(layers):
            x = jnp.tanh(x @ layers[name])
        return x.sum()

    text = hlo(hvd.grad(loss, name="backward"), layers, jnp.ones((4, 1024)))
    assert "is_scheduled=true" in text
    entry = text[text.index("\nENTRY") :]
    found = re.findall(r' (dot)\(|custom_call_target="horovodish_(start|done)"', entry)
    order = " ".join(product or call for product, call in found)
    assert re.fullmatch(r"(dot )*((dot )+start ){6}(done ?){6}", order), order


@on_ranks(2)
def test_programs_for_several_shapes_and_arguments() -> None:
    def reduced(x: Any, op: Any, process_set: Any) -> Any:
        return hvd.allreduce(x, op=op, process_set=process_set, name="static")

    run = jax.jit(reduced, static_argnames=("op", "process_set"))
    for length in (1, 5, 1, 0):
        for op, expected in ((hvd.Sum, hvd.size()), (hvd.Max, 1)):
            result = run(jnp.ones(length), op=op, process_set=hvd.global_process_set)
            np.testing.assert_array_equal(result, np.full(length, expected))


@on_ranks(2)
def test_calls_of_python_beside_collectives() -> None:
    seen = []

    @jax.jit
    def program(x: Any) -> Any:
        x = total(x, "first")
        jax.debug.callback(lambda x: seen.append(x.tolist()), x)
        x = jax.pure_callback(lambda x: np.asarray(x) + 1, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return total(x, "second")

    expected = hvd.size() * (hvd.size() + 1)
    for _ in range(3):
        np.testing.assert_array_equal(program(jnp.ones(2)), np.full(2, expected))
    jax.effects_barrier()
    assert seen == [[hvd.size()] * 2] * 3


@on_ranks(2)
def test_programs_that_are_stored() -> None:
    compiled = jax.jit(lambda x: total(x, "stored")).lower(jnp.ones(2)).compile()
    stored = serialize_executable.serialize(compiled)
    again = serialize_executable.deserialize_and_load(*stored, execution_devices=jax.local_devices()[:1])
    np.testing.assert_array_equal(again(jnp.ones(2)), np.full(2, hvd.size()))


@on_ranks(2)
def test_programs_that_another_version_has_stored() -> None:
    """Before there were codecs, calls had no attribute for one."""

    def without_codec(*arguments: Any) -> dict[str, Any]:
        return {name: value for name, value in start_attributes(*arguments).items() if name != "codec"}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering, "start_attributes", without_codec)
        with pytest.raises(FAILED, match=r"no attribute codec, so another version .* Remedy: .*compile it again"):
            jax.jit(lambda x: total(x, "stored"))(jnp.ones(2)).block_until_ready()


@on_ranks(2)
def test_memory_is_not_shared() -> None:
    """What is given away or written later takes nothing else with it."""
    x, given = jnp.arange(1000.0), np.ones(1000, np.float32)
    results = [hvd.allreduce(x), hvd.broadcast(x, 0), hvd.barrier(x), hvd.allgather(x), hvd.broadcast_parameters(x)]
    results += [total(given), hvd.barrier(given)]
    given[:] = 7
    np.testing.assert_array_equal(results[-2], np.full(1000, hvd.size()))
    np.testing.assert_array_equal(results[-1], np.ones(1000))
    overwrite = jax.jit(lambda y: y * 0 - 1, donate_argnums=0)
    for result in results:
        overwrite(result).block_until_ready()
        np.testing.assert_array_equal(x, np.arange(1000.0))


@on_ranks(2)
def test_threads_with_names_of_their_own() -> None:
    def work(name: str) -> None:
        program = jax.jit(lambda x: total(x, name))
        for _ in range(20):
            results.append(float(program(jnp.ones(50))[0]))

    results: list[float] = []
    threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [hvd.size()] * 40


@on_ranks(2)
def test_through_the_host() -> None:
    """What a program on a GPU does; there is none here, so the CPU takes that way."""

    def staged(ctx: Any, *operands: Any, traced: Any) -> Any:
        return lowering.through_the_host(ctx, operands, traced)

    mlir.register_lowering(primitive, staged, platform="cpu", cacheable=False)
    try:
        result = jax.jit(lambda tree: hvd.allreduce(tree, op=hvd.Sum, name="staged"))([jnp.ones(3), jnp.arange(3)])
        np.testing.assert_array_equal(result[1], np.arange(3) * hvd.size())
    finally:
        mlir.register_lowering(primitive, lowering._on_cpu, platform="cpu", cacheable=False)
    with pytest.raises(NotImplementedError, match="no collectives inside jit on tpu devices"):
        jax.jit(lambda x: total(x, "tpu")).trace(jnp.ones(2)).lower(lowering_platforms=("tpu",))
    no_backend = pytest.raises(ValueError, match="different from the lowering platform cuda")  # by then it has warned
    with pytest.warns(UserWarning, match="arrays on cuda devices are copied to the host"), no_backend:
        jax.jit(lambda x: total(x, "cuda")).trace(jnp.ones(2)).lower(lowering_platforms=("cuda",))


def test_several_devices() -> None:
    run_ranks(several_devices, 2, env={"JAX_NUM_CPU_DEVICES": "2"}, begin=True)


@on_ranks(2)
def test_orders_that_differ() -> None:
    orders_that_differ()


@pytest.mark.soak
def test_three_ranks_give_the_same_bits_in_every_run() -> None:
    runs = [run_ranks(orders_that_differ, 3, begin=True) for _ in range(2)]
    for by_rank in runs:
        for result in by_rank:
            np.testing.assert_array_equal(result, runs[0][0])
