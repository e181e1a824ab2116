"""Graphs of TensorFlow 1: collectives, optimizers and the hook in sessions, with both behaviors of TensorFlow."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import tensorflow
from tensorflow.compat import v1 as tf

import horovodish.tensorflow as hvd
from support.documents import python_blocks
from support.ranks import run_ranks

STEPS = 4


def with_the_behavior_of_tensorflow_2() -> None:
    with_both_behaviors()
    with pytest.raises(RuntimeError, match=r"Use broadcast_variables\(variables, root_rank\)"):
        hvd.broadcast_global_variables(0)


def with_the_behavior_of_tensorflow_1() -> None:
    tf.disable_v2_behavior()
    with_both_behaviors()
    gradients()
    in_any_order()
    a_mismatch()
    a_mismatch_in_a_monitored_session()
    training(start_of_a_monitored_session, lambda: tf.train.MomentumOptimizer(0.1, 0.9))
    the_guide()


def with_both_behaviors() -> None:
    hvd.init()
    every_collective()
    two_graphs_at_once()
    training(start_by_hand, lambda: tf.train.AdamOptimizer(0.1))


def session() -> Any:
    return tf.Session(config=tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=2))


def every_collective() -> None:
    rank, size = hvd.rank(), hvd.size()
    rows = [np.arange(2 * size * (each + 1), step=each + 1, dtype=np.float32).reshape(size, 2) for each in range(size)]
    with tf.Graph().as_default(), session() as running:
        own = tf.constant(rows[rank])
        found = {
            "sum": hvd.allreduce(own, op=hvd.Sum),
            "group": hvd.grouped_allreduce([own, own + 1.0], op=hvd.Sum)[1],
            "gathered": hvd.allgather(own[: rank + 1]),
            "sent": hvd.broadcast(own, root_rank=size - 1),
            "received": hvd.alltoall(own, splits=[1] * size)[0],
            "scattered": hvd.reducescatter(own, op=hvd.Sum),
            "slices": hvd.allreduce(tensorflow.IndexedSlices(own, tf.range(size), tf.constant([size, 2])), op=hvd.Sum),
            "place": hvd.rank_op(),
        }
        found["slices"] = tf.convert_to_tensor(found["slices"])
        expected = {
            "sum": sum(rows),
            "group": sum(rows) + size,
            "gathered": np.concatenate([each[: number + 1] for number, each in enumerate(rows)]),
            "sent": rows[size - 1],
            "received": np.stack([each[rank] for each in rows]),
            "scattered": sum(rows)[rank : rank + 1],
            "slices": sum(rows),
            "place": rank,
        }
        for _ in range(2):
            for key, value in running.run(found).items():
                np.testing.assert_allclose(value, expected[key], err_msg=key)


def gradients() -> None:
    with tf.Graph().as_default(), session() as running:
        own = tf.constant([float(hvd.rank())])
        result = hvd.allgather(own) * tf.range(1.0, hvd.size() + 1)
        (gradient,) = tf.gradients(tf.reduce_sum(result), own)
        np.testing.assert_allclose(running.run(gradient), [hvd.size() * (hvd.rank() + 1)])


def in_any_order() -> None:
    """What one run asks for may run in any order on each rank, and so may what several threads ask of one session."""
    with tf.Graph().as_default(), session() as running:
        results = [hvd.allreduce(tf.constant(float(number)), op=hvd.Sum) for number in range(6)]
        asked = results if hvd.rank() % 2 else results[::-1]
        assert sorted(running.run(asked)) == [hvd.size() * float(number) for number in range(6)]
        in_threads([lambda: running.run(results[0]), lambda: running.run(results[1])])


def two_graphs_at_once() -> None:
    # The graphs are made in one order, and then run at the same time. Their functions have one name.
    graphs = [tf.Graph(), tf.Graph()]
    results = []
    for number, graph in enumerate(graphs):
        with graph.as_default():
            reduced = tensorflow.function(lambda x: hvd.allreduce(x), autograph=False)
            results.append(reduced(hvd.allreduce(tf.constant(number + 1.0))))

    def run(number: int) -> None:
        with tf.Session(graph=graphs[number]) as running:
            for _ in range(10):
                assert running.run(results[number]) == number + 1.0

    in_threads([lambda: run(0), lambda: run(1)])


def in_threads(calls: list[Any]) -> None:
    failures: list[BaseException] = []

    def guarded(call: Any) -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def a_mismatch() -> None:
    with tf.Graph().as_default(), session() as running:
        wrong = hvd.allreduce(tf.zeros([2 + hvd.rank()]), name="wrong")
        right = hvd.allreduce(tf.ones([2]), name="right")
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"MismatchError: .*wrong"):
            running.run([wrong])
        np.testing.assert_array_equal(running.run(right), [1.0, 1.0])


def a_mismatch_in_a_monitored_session() -> None:
    """The program gets the error: whichever operation's comes first, no rank begins a new session by itself."""
    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        wrong = hvd.allreduce(tf.zeros([2 + hvd.rank()]), name="wrong")
        beside = [hvd.allreduce(tf.ones([2]), name=f"beside {number}") for number in range(20)]
        refused = pytest.raises(tf.errors.InvalidArgumentError, match=r"MismatchError: .*wrong")
        with start_of_a_monitored_session() as running, refused:
            running.run([wrong, beside])


def the_guide() -> None:
    (code,) = (block for block in python_blocks("docs/tensorflow.md") if "MonitoredTrainingSession" in block)

    def build_model() -> Any:
        return tf.square(tf.get_variable("weight", initializer=float(hvd.rank())) - 3.0)

    code = code.replace("1000", "5").replace("session.run(train)", "_, last = session.run([train, loss])")
    names: dict[str, Any] = {"build_model": build_model}
    exec(code, names)
    assert hvd.allgather_object(names["last"])[0] == names["last"] < 9.0  # what it begins with


def data(rank: int, step: int) -> np.ndarray:
    return np.random.default_rng([rank, step]).uniform(-1, 1, (3, 2)).astype(np.float32)


def network(batches: list[Any], rank: int) -> tuple[list[Any], list[Any]]:
    """The losses of some batches, and weights that begin otherwise on each rank; the table has sparse gradients."""
    weights = tf.get_variable("weights", initializer=tf.constant([[0.5], [-0.25]]) + rank)
    table = tf.get_variable("table", initializer=tf.constant([[1.0], [2.0], [3.0]]) + rank)
    rows = tf.reduce_sum(tf.square(tf.nn.embedding_lookup(table, [0, 2])))
    return [tf.reduce_mean(tf.square(batch @ weights)) + rows for batch in batches], [weights, table]


def start_of_a_monitored_session() -> Any:
    return tf.train.MonitoredTrainingSession(hooks=[hvd.BroadcastGlobalVariablesHook(0)])


def start_by_hand() -> Any:
    initializer, broadcast = tf.global_variables_initializer(), hvd.broadcast_global_variables(0)
    running = session()
    running.run(initializer)
    running.run(broadcast)
    return running


def training(start: Any, optimizer: Any) -> None:
    """Several ranks train to what one process does with the batches of all of them."""
    with tf.Graph().as_default():
        batch = tf.placeholder(tf.float32, [3, 2])
        (loss,), weights = network([batch], hvd.rank())
        wrapped = hvd.DistributedOptimizer(optimizer())
        counted = tf.train.get_or_create_global_step()
        train = wrapped.minimize(loss, global_step=counted)
        with start() as running:
            for step in range(STEPS):
                running.run(train, {batch: data(hvd.rank(), step)})
            found = running.run(weights)
            assert running.run(counted) == STEPS
    for value, expected in zip(found, alone(optimizer), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)


def alone(optimizer: Any) -> list[np.ndarray]:
    """The weights of one process that starts with rank 0's."""
    with tf.Graph().as_default(), session() as running:
        batches = [tf.placeholder(tf.float32, [3, 2]) for _ in range(hvd.size())]
        losses, weights = network(batches, 0)
        train = optimizer().minimize(sum(losses) / hvd.size())
        running.run(tf.global_variables_initializer())
        for step in range(STEPS):
            running.run(train, {batch: data(rank, step) for rank, batch in enumerate(batches)})
        return running.run(weights)


def test_sessions_beside_tensorflow_2() -> None:
    run_ranks(with_the_behavior_of_tensorflow_2, 2)


@pytest.mark.soak
def test_sessions_of_tensorflow_1() -> None:
    run_ranks(with_the_behavior_of_tensorflow_1, 2, fresh=True)
