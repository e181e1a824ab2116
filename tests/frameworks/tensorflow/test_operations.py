"""The collectives on TensorFlow's tensors, eagerly and in functions, against what every rank can compute for all."""

from __future__ import annotations

import threading
import time
from itertools import product
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovodish
import horovodish.tensorflow as hvd
from horovodish.collectives.operation import Operation
from horovodish.errors import DuplicateNameError, NotInitializedError
from horovodish.runtime.basics import engine
from horovodish.tensorflow import library, sparse
from support.expect import the_engine_goes_on
from support.model import FLOATS, INTEGERS, MOVED, OPS, difference, dtype_of, reduced, values
from support.on_ranks import on_ranks
from support.tensorflow_tensors import EAGER, GRAPH, XLA, called


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("way", [EAGER, GRAPH, XLA])
def test_every_op_and_dtype(way: str) -> None:
    assert library.keeps_callbacks()
    for op, shape in product(OPS, [(), (3, 7)]):
        arrays = {kind: [values(kind, shape, rank, op) for rank in range(hvd.size())] for kind in [*INTEGERS, *FLOATS]}
        own = {kind: tf.constant(of_ranks[hvd.rank()]) for kind, of_ranks in arrays.items()}

        def reduce_all(own: dict[str, tf.Tensor], op: str = op) -> dict[str, tf.Tensor]:
            return {kind: hvd.allreduce(own[kind], op=getattr(hvd, op), name=f"{op} {kind}") for kind in own}

        for kind, result in called(reduce_all, way)(own).items():
            assert result.dtype == own[kind].dtype
            assert difference(result.numpy(), reduced(arrays[kind], op), 4.0 * hvd.size()) == "", (op, kind, shape)


@pytest.mark.soak
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("way", [EAGER, GRAPH])
def test_every_dtype_moves(way: str) -> None:
    kinds = [*MOVED, *INTEGERS, *FLOATS]
    arrays = {kind: [values(kind, (rank + 2, 3), rank) for rank in range(hvd.size())] for kind in kinds}
    own = {kind: tf.constant(of_ranks[hvd.rank()]) for kind, of_ranks in arrays.items()}
    root = hvd.size() - 1

    def move(own: dict[str, tf.Tensor]) -> Any:
        gathered = {kind: hvd.allgather(tensor) for kind, tensor in own.items()}
        return gathered, {kind: hvd.broadcast(tensor[:2], root) for kind, tensor in own.items()}

    gathered, sent = called(move, way)(own)
    for kind in kinds:
        assert np.array_equal(gathered[kind].numpy(), np.concatenate(arrays[kind])), kind
        assert np.array_equal(sent[kind].numpy(), arrays[kind][root][:2]), kind


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("way", [EAGER, GRAPH])
def test_alltoall(way: str) -> None:
    own, ranks = hvd.rank(), range(hvd.size())
    # Rank i sends i + j rows of the value 10 i + j to rank j.
    rows = np.concatenate([np.full([own + j, 2], 10 * own + j, np.float32) for j in ranks])
    received, counts = called(hvd.alltoall, way)(tf.constant(rows), [own + j for j in ranks])
    assert counts.numpy().tolist() == [i + own for i in ranks]
    assert np.array_equal(received, np.concatenate([np.full([i + own, 2], 10 * i + own, np.float32) for i in ranks]))
    even = called(hvd.alltoall, way)(tf.range(2 * hvd.size()) + 100 * own)
    assert even.numpy().tolist() == [100 * i + 2 * own + k for i in ranks for k in range(2)]


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("way", [EAGER, GRAPH, XLA])
def test_reducescatter(way: str) -> None:
    arrays = [values("float32", (hvd.size() + 1, 3), rank) for rank in range(hvd.size())]
    result = called(lambda x: hvd.reducescatter(x, op=hvd.Sum), way)(tf.constant(arrays[hvd.rank()]))
    begin = hvd.rank() + min(hvd.rank(), 1)
    np.testing.assert_allclose(result, sum(arrays)[begin : begin + 1 + (hvd.rank() == 0)], rtol=1e-5)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("way", [EAGER, GRAPH, XLA])
def test_groups(way: str) -> None:
    own = [tf.fill([2, 3], float(hvd.rank())), tf.fill([hvd.size()], hvd.rank())]

    def grouped(first: tf.Tensor, second: tf.Tensor) -> Any:
        pair = [first, second]
        return (
            hvd.grouped_allreduce(pair, op=hvd.Sum, name="group"),
            hvd.grouped_allgather(pair),
            hvd.grouped_reducescatter(pair, op=hvd.Max),
        )

    (total, _), (_, numbers), (_, largest) = called(grouped, way)(*own)
    assert np.all(total == sum(range(hvd.size())))
    assert numbers.numpy().tolist() == [rank for rank in range(hvd.size()) for _ in range(hvd.size())]
    assert largest.numpy().tolist() == [hvd.size() - 1]


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("way", [EAGER, GRAPH])
def test_no_elements(way: str) -> None:
    assert called(hvd.allreduce, way)(tf.zeros([0, 3])).shape == (0, 3)
    rows = called(hvd.allgather, way)(tf.ones([hvd.rank(), 3]))
    assert rows.shape == (sum(range(hvd.size())), 3)
    assert called(hvd.allgather, way)(tf.constant(hvd.rank())).numpy().tolist() == list(range(hvd.size()))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("way", [EAGER, GRAPH, XLA])
def test_slices(way: str) -> None:
    indices = tf.constant([hvd.rank(), hvd.rank(), 7])

    def reduce(values: tf.Tensor) -> Any:
        own = tf.IndexedSlices(values, indices, tf.constant([9, 2]))
        dense = tf.ones([2])
        average, one = hvd.grouped_allreduce([own, dense])
        return tf.convert_to_tensor(hvd.allreduce(own, op=hvd.Sum)), tf.convert_to_tensor(average), one

    total, average, one = called(reduce, way)(tf.ones([3, 2]))
    expected = np.zeros([9, 2], np.float32)
    for rank in range(hvd.size()):
        np.add.at(expected, [rank, rank, 7], 1.0)
    assert np.array_equal(total, expected)
    np.testing.assert_allclose(average, expected / hvd.size(), rtol=1e-6)
    assert np.array_equal(one, [1.0, 1.0])

    def average_integers(values: tf.Tensor) -> Any:
        own = tf.IndexedSlices(values, tf.constant([hvd.rank(), hvd.size()]), tf.constant([hvd.size() + 1]))
        return tf.convert_to_tensor(hvd.allreduce(own))

    averages = called(average_integers, way)(tf.constant([-3, 0], tf.int32))
    assert np.array_equal(averages, [int(-3 / hvd.size())] * hvd.size() + [0])


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("way", [EAGER, GRAPH, XLA])
def test_factors_and_compression(way: str) -> None:
    own, ranks = tf.fill([5], float(hvd.rank() + 1)), sum(range(1, hvd.size() + 1))
    scaled = called(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0), way)(own)
    assert np.array_equal(scaled, np.full(5, 2.0 * ranks))
    third = called(lambda x: hvd.allreduce(x, prescale_factor=1 / 3), way)(tf.ones([1], tf.float64))
    assert third.numpy()[0] == 1 / 3  # a factor of float32 would give 0.3333333432674408
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        result = called(lambda x, by=compression: hvd.allreduce(x, compression=by, op=hvd.Sum), way)(own + 0.5)
        assert result.dtype == tf.float32
        np.testing.assert_allclose(result, ranks + 0.5 * hvd.size(), rtol=1e-2)
    small = tf.fill([5], 2e-5)  # denormal in float16, which TensorFlow's own threads would take for zero
    result = called(lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16, op=hvd.Sum), way)(small)
    np.testing.assert_allclose(result, 2e-5 * hvd.size(), rtol=1e-2)


@on_ranks(1, 2, 3)
def test_inputs_stay() -> None:
    own = tf.range(5.0) + hvd.rank()
    variable = tf.Variable(own)
    hvd.allreduce(own)
    called(lambda x: (hvd.allreduce(x), hvd.allreduce(variable)), GRAPH)(own)
    for kept in (own, variable):
        assert np.array_equal(kept, np.arange(5.0) + hvd.rank())


@on_ranks(1, 2, 3)
def test_shapes_of_traced_results() -> None:
    @tf.function(input_signature=[tf.TensorSpec([4, None]), tf.TensorSpec(None), tf.TensorSpec([4], tf.int32)])
    def traced(known: tf.Tensor, unknown: tf.Tensor, splits: tf.Tensor) -> Any:
        assert hvd.allreduce(known).shape.as_list() == [4, None]
        assert hvd.allgather(known).shape.as_list() == [None, None]
        assert hvd.allgather(unknown).shape.rank is None
        assert hvd.broadcast(splits, 0).shape.as_list() == [4]
        assert [part.shape.rank for part in hvd.alltoall(known, splits)] == [2, 1]
        assert hvd.reducescatter(known).shape.as_list() == [None, None]
        assert hvd.rank_op().shape.rank == 0
        return known

    traced.get_concrete_function()


@on_ranks(1, 2, 3)
def test_places_and_barriers_in_functions() -> None:
    own = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), 1, 0]
    nowhere = 99
    asked = (hvd.rank_op, hvd.size_op, hvd.local_rank_op, hvd.local_size_op, hvd.process_set_included_op)
    function = tf.function(lambda: [*(ask() for ask in asked), hvd.process_set_included_op(nowhere)])
    assert [int(value) for value in function()] == own
    hvd.barrier()
    tf.function(lambda: hvd.barrier() and None)()


@on_ranks(1, 2, 3)
def test_refusals() -> None:
    with pytest.raises(hvd.UnsupportedTensorError, match="complex64 is not supported"):
        hvd.allreduce(tf.ones(1, tf.complex64), name="a")
    with pytest.raises(hvd.UnsupportedTensorError, match=r"bool tensors cannot be reduced; pass tf\.cast"):
        hvd.allreduce(tf.constant([True]), name="b")
    with pytest.raises(ValueError, match="both given"):
        hvd.allreduce(tf.ones(1), average=True, op=hvd.Sum, name="c")
    with pytest.raises(ValueError, match="op=Adasum is for allreduce"):
        hvd.reducescatter(tf.ones(1), op=hvd.Adasum, name="d")
    with pytest.raises(ValueError, match="root_rank=9 does not exist"):
        hvd.broadcast(tf.ones(1), 9, name="e")
    with pytest.raises(ValueError, match=r"splits .* add up to the 3 rows"):
        hvd.alltoall(tf.ones(3), splits=[1] * (hvd.size() + 3), name="f")
    with pytest.raises(TypeError, match=r"pass \[tensor\]"):
        hvd.grouped_allreduce(tf.ones(3), name="g")
    with pytest.raises(ValueError, match="at least one"):
        hvd.grouped_allgather([], name="h")
    with pytest.raises(ValueError, match="compression=3 is not a compression"):
        hvd.allreduce(tf.ones(1), compression=3, name="i")
    with pytest.raises(hvd.UnsupportedTensorError, match="op=Max is not for IndexedSlices"):
        hvd.allreduce(tf.IndexedSlices(tf.ones([1, 1]), tf.constant([0])), op=hvd.Max, name="j")
    with pytest.raises(hvd.UnsupportedTensorError, match=r"uint16 tensors cannot be reduced; pass tf\.cast"):
        hvd.allreduce(tf.IndexedSlices(tf.ones([1, 1], tf.uint16), tf.constant([0])), name="l")
    wrapping = [2**63 - 1, 2**63 - 1, 2][: hvd.size()]  # three of them are 0 to who adds them up in 64 bits
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"add up to the 0 rows of the tensor; there are"):
        tf.function(lambda: hvd.alltoall(tf.ones(0), splits=wrapping, name="k"))()


@on_ranks(2, 3)
def test_mismatches_when_executing_eagerly() -> None:
    with pytest.raises(hvd.MismatchError, match=r"'x'.*shape: rank 0 has \(2,\), ranks? 1.* ha(s|ve) \(3,\)"):
        hvd.allreduce(tf.ones([2 + min(hvd.rank(), 1)]), name="x")
    splits = [1] * (hvd.size() - 1) if hvd.rank() == 0 else [1] * hvd.size()
    with pytest.raises(ValueError if hvd.rank() == 0 else hvd.MismatchError, match="add up to the"):
        hvd.alltoall(tf.ones([hvd.size()]), splits=splits, name="y")
    the_engine_goes_on("y")


@on_ranks(2, 3)
def test_a_name_that_is_in_flight() -> None:
    """The rank that finds it refuses, and so no other rank waits for the second operation."""
    if hvd.rank() == 0:
        first = horovodish.allreduce_async(np.ones(3, np.float32), op=hvd.Sum, name="twice")
        with pytest.raises(DuplicateNameError, match=r"'twice' on rank 0: an operation of that name has not"):
            hvd.allreduce(tf.ones(3), op=hvd.Sum, name="twice")
    hvd.barrier()
    if hvd.rank() > 0:
        hvd.allreduce(tf.ones(3), op=hvd.Sum, name="twice")  # with what rank 0 has begun
        with pytest.raises(hvd.MismatchError, match=r"rank 0 cannot take part: allreduce 'twice' on rank 0: an operat"):
            hvd.allreduce(tf.ones(3), op=hvd.Sum, name="twice")
    hvd.barrier()
    if hvd.rank() == 0:
        np.testing.assert_array_equal(first.wait(), hvd.size())
    np.testing.assert_array_equal(hvd.allreduce(tf.ones(3), op=hvd.Sum, name="twice"), hvd.size())


@on_ranks(2, 3)
def test_a_join_that_is_in_flight() -> None:
    """A second one is refused on its rank alone, and does not take the place of the first."""
    from mpi4py import MPI

    if hvd.rank() == 0:
        first = threading.Thread(target=hvd.join)
        first.start()
        until_this_rank_waits()
        with pytest.raises(tf.errors.FailedPreconditionError, match=r"DuplicateNameError: a call of join"):
            tf.function(hvd.join)()
    MPI.COMM_WORLD.Barrier()  # of ranks that have joined, too
    if hvd.rank() == 0:
        first.join()
    else:
        hvd.join()


def until_this_rank_waits() -> None:
    """TensorFlow says of an operation when it has ended, never that it has begun."""
    while not engine().process_set_busy(hvd.global_process_set.process_set_id):
        time.sleep(0.001)


@on_ranks(2, 3)
def test_a_mismatch_in_a_function() -> None:
    """The ranks fail together and go on together, though not all have started the same operations."""

    @tf.function
    def step(wrong: tf.Tensor) -> list[tf.Tensor]:
        first = hvd.allreduce(wrong, name="wrong")
        return [first, *(hvd.allreduce(first[0] + tf.ones([2]), name=f"after {index}") for index in range(3))]

    with pytest.raises(tf.errors.InvalidArgumentError, match=r"MismatchError: .*'wrong'.*rank 0 has \(2,\)"):
        step(tf.ones([2 + min(hvd.rank(), 1)]))
    assert len(step(tf.ones([2]))) == 4


@on_ranks(2, 3)
def test_a_mismatch_while_one_rank_waits_for_something_else() -> None:
    @tf.function
    def uneven(wrong: tf.Tensor) -> tf.Tensor:
        # Rank 0 alone submits something else, and would wait for it when "wrong" fails on all.
        if hvd.rank() > 0:
            return tf.reduce_sum(hvd.allreduce(wrong, name="wrong"))
        other = hvd.allreduce(wrong, name="this rank's alone")
        with tf.control_dependencies([tf.numpy_function(until_this_rank_waits, [], [])]):
            return tf.reduce_sum(other) + tf.reduce_sum(hvd.allreduce(wrong, name="wrong"))

    with pytest.raises(tf.errors.InvalidArgumentError, match=r"MismatchError: .*'wrong'"):
        uneven(tf.ones([2 + min(hvd.rank(), 1)]))
    # Nothing is left of it: the name means what comes now, on every rank.
    assert hvd.allreduce(tf.ones([2]), op=hvd.Sum, name="this rank's alone").numpy().tolist() == [hvd.size()] * 2


@on_ranks(2, 3)
def test_refusals_in_a_function() -> None:
    @tf.function
    def refused(splits: tf.Tensor, value: tf.Tensor) -> Any:
        return hvd.allreduce(value, op=hvd.Sum, name="beside"), hvd.alltoall(value, splits=splits, name="dealt out")

    size = hvd.size()
    for attempt in range(8):
        value = tf.fill([size], float(attempt))
        with pytest.raises(tf.errors.InvalidArgumentError, match="add up to the"):
            refused([1] * size if hvd.rank() > 0 else [1] * (size - 1) + [2], value)
        # What one rank has started beside it, and another rank has not, is not taken for this.
        total, (rows, _) = refused([1] * size, value + 0.5)
        assert total.numpy().tolist() == [(attempt + 0.5) * size] * size
        assert rows.numpy().tolist() == [attempt + 0.5] * size


@on_ranks(2, 3)
def test_refusals_of_two_steps() -> None:
    """Rank 0 refuses something else in the second step before the others have begun the first one."""
    from mpi4py import MPI

    size = hvd.size()

    @tf.function
    def step(first: tf.Tensor, second: tf.Tensor) -> Any:
        ones = tf.ones([size])
        return [hvd.alltoall(ones, given, name=name) for name, given in (("first", first), ("second", second))]

    right, wrong = [1] * size, [1] * (size - 1) + [2]
    if hvd.rank() > 0:
        MPI.COMM_WORLD.Barrier()
    for arguments in ((wrong, right), (right, wrong)):
        given = arguments if hvd.rank() == 0 else (right, right)
        with pytest.raises(tf.errors.InvalidArgumentError, match="add up to the"):
            step(*given)
    if hvd.rank() == 0:
        MPI.COMM_WORLD.Barrier()
    assert [rows.numpy().tolist() for rows, _ in step(right, right)] == [right, right]


@on_ranks(1, 2, 3)
def test_shutting_down() -> None:
    function = tf.function(hvd.size_op)
    assert int(function()) == hvd.size()
    hvd.shutdown()
    assert int(function()) == 0
    with pytest.raises(NotInitializedError):
        hvd.allreduce(tf.ones(1))


def test_small_integers_average_over_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def gathered(_: Any, tensors: Any) -> Any:
        values, indices, mark = tensors
        return (values, indices, tf.repeat(mark, 256)), []

    monkeypatch.setattr(sparse, "gathered", gathered)
    operation = Operation("allreduce", "many", op=hvd.Average)
    for dtype in (tf.int8, tf.uint8):
        slices = tf.IndexedSlices(tf.constant([[100]], dtype), tf.constant([0]))
        assert sparse.reduced_slices(operation, slices, hvd.Compression.none).values.numpy().tolist() == [[0]]


def test_bfloat16_is_the_engines() -> None:
    assert tf.constant(values("bfloat16", 3, 0)).dtype == tf.bfloat16
    assert tf.bfloat16.as_numpy_dtype == dtype_of("bfloat16")
