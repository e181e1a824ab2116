"""Process sets: what ranks 0 and 2 of three do among themselves, and what rank 1 is told that has no part in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovodish.tensorflow as hvd
from horovodish.launch.environment import launcher_environment
from horovodish.tensorflow.sets import attribute_of, set_of
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from support.tensorflow_tensors import EAGER, GRAPH, XLA, called

PAIR = [0, 2]


def operations(process_set: hvd.ProcessSet) -> dict[str, tuple[Callable[[], Any], Any]]:
    """Calls, and what each gives for a set whose ranks pass their own number twice."""
    own, ranks = tf.fill([2], float(hvd.rank())), [float(rank) for rank in process_set.ranks]
    slices = tf.IndexedSlices(tf.reshape(own[:1], [1, 1]), tf.constant([hvd.rank()]), tf.constant([3, 1]))
    among: dict[str, Any] = {"process_set": process_set}
    members, total, last = len(ranks), sum(ranks), process_set.ranks[-1]
    rows = 2 if members == 1 else 1
    dense = [[rank] if rank in ranks else [0.0] for rank in range(3)]
    even = own[:members]
    return {
        "allreduce": (lambda: hvd.allreduce(own, **among), [total / members] * 2),
        "of slices": (lambda: tf.convert_to_tensor(hvd.allreduce(slices, op=hvd.Sum, **among)), dense),
        "grouped_allreduce": (lambda: hvd.grouped_allreduce([own, own[0]], op=hvd.Max, **among)[1], max(ranks)),
        "allgather": (lambda: hvd.allgather(own[:1], **among), ranks),
        "grouped_allgather": (lambda: hvd.grouped_allgather([own[:1], own[0]], **among)[1], ranks),
        "broadcast": (lambda: hvd.broadcast(own, last, **among), [float(last)] * 2),
        "alltoall": (lambda: hvd.alltoall(even, **among), ranks),
        "reducescatter": (lambda: hvd.reducescatter(own, op=hvd.Sum, **among), [total] * rows),
        "grouped_reducescatter": (lambda: hvd.grouped_reducescatter([own], **among)[0], [total / members] * rows),
        "barrier": (lambda: hvd.barrier(**among) and None, None),
    }


@pytest.mark.soak
@on_ranks(3)
@pytest.mark.parametrize("way", [EAGER, GRAPH, XLA])
def test_every_operation(way: str) -> None:
    pair, single = hvd.add_process_set(PAIR), hvd.add_process_set([1])
    if pair.included():
        every_operation(way, pair)
    else:
        every_refusal(way, pair)
        every_operation(way, single)


def every_operation(way: str, process_set: hvd.ProcessSet) -> None:
    for name, (call, expected) in operations(process_set).items():
        if name == "barrier" and way == XLA:
            continue
        result = called(call, way)()
        if expected is not None:
            assert result.numpy().tolist() == expected, (name, way)
    last = process_set.ranks[-1]
    for send in (hvd.broadcast_variables, hvd.broadcast_):
        variable = tf.Variable(float(hvd.rank()))
        called(lambda v=variable, send=send: send([v], last, process_set=process_set) and None, way)()
        assert variable.numpy() == last
    assert hvd.broadcast_object(hvd.rank(), last, process_set=process_set) == last
    assert hvd.broadcast_object_fn(last, process_set=process_set)(hvd.rank()) == last
    assert hvd.allgather_object(hvd.rank(), process_set=process_set) == process_set.ranks
    outside = next(rank for rank in range(3) if rank not in process_set.ranks)
    with pytest.raises(ValueError, match=r"root_rank=\d is not in the process set of ranks"):
        called(lambda: hvd.broadcast(1.0, outside, process_set=process_set), way)()


def every_refusal(way: str, process_set: hvd.ProcessSet) -> None:
    calls = {name: call for name, (call, _) in operations(process_set).items()}
    for send in (hvd.broadcast_variables, hvd.broadcast_):
        calls[send.__name__] = lambda send=send: send([tf.Variable(1.0)], 0, process_set=process_set)
    calls["broadcast_object"] = lambda: hvd.broadcast_object(1, process_set=process_set)
    for name, call in calls.items():
        with pytest.raises(ValueError, match=r"rank 1 is not in process set 1 of ranks \[0, 2\]\. Make the call on"):
            called(call, EAGER if name.startswith("broadcast_") else way)()


@pytest.mark.soak
@on_ranks(3)
def test_attributes_of_operations() -> None:
    """Their length does not depend on the number of all ranks."""
    pair = hvd.add_process_set(PAIR)
    assert attribute_of(hvd.global_process_set) == "0"
    assert set_of(b"0") is hvd.global_process_set
    if pair.included():
        assert attribute_of(pair) == "1 0,2"
        assert set_of(b"1 0,2") is pair


@on_ranks(3)
@pytest.mark.parametrize("way", [EAGER, GRAPH])
def test_places(way: str) -> None:
    pair = hvd.add_process_set(PAIR)
    identity = pair.process_set_id
    included, size = called(lambda: (hvd.process_set_included_op(identity), hvd.size_op(identity)), way)()
    assert (int(included), int(size)) == ((1, 2) if pair.included() else (0, 0))


@on_ranks(3)
@pytest.mark.parametrize("way", [EAGER, GRAPH, XLA])
def test_tapes(way: str) -> None:
    """A rank outside keeps its own gradients."""
    pair = hvd.add_process_set(PAIR)
    table, common, local = tf.Variable(tf.zeros([3, 1])), tf.Variable([1.0, 1.0]), tf.Variable(1.0)

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = (hvd.rank() + 1.0) * (tf.reduce_sum(common) + tf.reduce_sum(tf.gather(table, [0])) + local)
        tape = hvd.DistributedGradientTape(tape, process_set=pair)
        tape.register_local_source(local)
        return tape.gradient(loss, [table, common, local])

    rows, of_common, of_local = called(step, way)()
    average = 2.0  # of 1 and 3, and rank 1's own
    assert tf.convert_to_tensor(rows).numpy().tolist() == [[average], [0.0], [0.0]]
    assert of_common.numpy().tolist() == [average, average]
    assert of_local.numpy() == (hvd.rank() + 1.0) / (2 if pair.included() else 1)


@on_ranks(3)
@pytest.mark.parametrize("way", [EAGER, GRAPH, XLA])
def test_optimizers(way: str) -> None:
    pair = hvd.add_process_set(PAIR)
    variable = tf.Variable(0.0)
    optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0), process_set=pair)

    def step() -> None:
        optimizer.minimize(lambda: (hvd.rank() + 1.0) * variable, var_list=[variable])

    function = called(step, way)
    for _ in range(2):
        function()
    assert variable.numpy() == -2.0 * 2


@on_ranks(3)
def test_batch_normalization() -> None:
    """The batches of the pair count as one; rank 1 normalizes its own."""
    pair = hvd.add_process_set(PAIR)
    layer = hvd.SyncBatchNormalization(process_set=pair, momentum=0.0)
    layer(tf.fill([2, 1], float(hvd.rank())), training=True)
    assert np.allclose(layer.moving_mean, 1.0) and np.allclose(layer.moving_variance, 1.0 if pair.included() else 0.0)


@on_ranks(3)
def test_two_sets_at_once() -> None:
    """A function reduces among all and among some; its ranks do not come to both in one order."""
    pair = hvd.add_process_set(PAIR)

    @tf.function
    def both(x: tf.Tensor) -> Any:
        some = hvd.allreduce(x, op=hvd.Sum, name="some", process_set=pair) if pair.included() else x
        return hvd.allreduce(x, op=hvd.Sum, name="all"), some

    of_all, of_some = both(tf.constant(float(hvd.rank())))
    assert (of_all.numpy(), of_some.numpy()) == (3.0, 2.0 if pair.included() else 1.0)


@on_ranks(3)
def test_a_function_of_a_set_that_was_removed() -> None:
    added = hvd.add_process_set([1, 2])
    function = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name="x", process_set=added))
    if added.included():
        assert function(tf.constant(float(hvd.rank()))).numpy() == 3.0
    hvd.remove_process_set(added)
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match=r"the process set of ranks \[1, 2\] is not in use"):
            function(tf.ones([]))
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"ValueError: x: .* the set is not in use"):
            function(tf.ones([]))
    hvd.barrier()


@on_ranks(3)
@pytest.mark.parametrize("way", [EAGER, GRAPH])
def test_functions_that_outlive_their_process_set(way: str) -> None:
    """Functions, and a tape, of a set whose number now stands for other ranks."""
    old = hvd.add_process_set([0, 1])
    kept: dict[str, Callable[[], Any]] = {}
    if old.included():
        if way == EAGER:
            kept["gradient"] = gradient_of_an_allreduce(old)
        else:
            kept = {name: called(call, way) for name, (call, _) in operations(old).items()}
            for function in kept.values():
                function()
    number = old.process_set_id
    hvd.shutdown()
    hvd.init()
    new = hvd.add_process_set([1, 2])
    assert new.process_set_id == number
    now = "the ranks 0,1, and that number now stands for 1,2" if hvd.rank() == 1 else "rank 0 is not in process set"
    for name, function in kept.items():
        with pytest.raises((tf.errors.OpError, hvd.HorovodInternalError, ValueError)) as raised:
            function()
        assert now in str(raised.value), (name, str(raised.value))
    if new.included():
        assert hvd.allreduce(1.0, op=hvd.Sum, name="goes on", process_set=new).numpy() == 2.0


def gradient_of_an_allreduce(process_set: hvd.ProcessSet) -> Callable[[], Any]:
    x = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        y = hvd.allreduce(x, process_set=process_set)
    return lambda: tape.gradient(y, x)


def outlive_a_world() -> None:
    """A function of all ranks works for those of the next `init()`."""

    @tf.function
    def gradient(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = hvd.allreduce(x, op=hvd.Sum)
        return y, tape.gradient(y, x)

    launched = launcher_environment()
    assert launched is not None
    for ranks in ([0, 1, 2], [0, 1]):
        if launched.rank in ranks:
            hvd.init(comm=ranks)
            assert [value.numpy() for value in gradient(tf.constant(1.0))] == [len(ranks)] * 2
            hvd.barrier()
            hvd.shutdown()


def test_a_function_of_all_ranks_works_in_another_world() -> None:
    run_ranks(outlive_a_world, 3)
