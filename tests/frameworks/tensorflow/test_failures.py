"""Ranks that are lost, raise or part while others are inside a `tf.function`: each gets one error, and none hangs."""

from __future__ import annotations

import os
import signal
import time

import pytest
import tensorflow as tf

import horovodish.tensorflow as hvd
from support.ranks import run_ranks_to_their_ends

STALLS = {
    "HOROVODISH_STALL_CHECK_WARNING_TIME_SECONDS": "0.5",
    "HOROVODISH_STALL_CHECK_SHUTDOWN_TIME_SECONDS": "2",
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def divide() -> None:
    raise ZeroDivisionError("a reason of its own")


ACTS = {"dies": die, "raises": divide}


def lose_a_rank(act: str) -> str:
    """The last rank fails within the function, when it has begun what the others wait for, and not all of it."""
    hvd.init()

    @tf.function
    def step(x: tf.Tensor, fails: bool) -> tf.Tensor:
        begun = [hvd.allreduce(x + float(number), name=f"begun {number}") for number in range(10)]
        between = [hvd.allreduce(x, name="between")]
        if fails:
            with tf.control_dependencies(between):
                between.append(tf.numpy_function(ACTS[act], [], []))
        with tf.control_dependencies(between):
            return tf.add_n([hvd.allreduce(each, name=f"needed {number}") for number, each in enumerate(begun)])

    assert step(tf.ones(3), False).numpy().tolist() == [55.0] * 3
    if hvd.rank() == hvd.size() - 1:
        step(tf.ones(3), True)
    with pytest.raises(tf.errors.InternalError) as inside:
        step(tf.ones(3), False)
    with pytest.raises(hvd.RankLostError, match=f"rank {hvd.size() - 1}"):
        hvd.allreduce(tf.ones(1))
    return str(inside.value)


@pytest.mark.soak
def test_a_rank_that_dies() -> None:
    *others, lost = run_ranks_to_their_ends(lose_a_rank, 3, args=("dies",))
    assert lost.ended == "died", lost.output
    for outcome in others:
        assert outcome.ended == "returned", outcome.output
        assert "RankLostError: allreduce '" in outcome.result and "rank 2 " in outcome.result


@pytest.mark.soak
def test_a_rank_that_raises() -> None:
    other, lost = run_ranks_to_their_ends(lose_a_rank, 2, args=("raises",))
    assert lost.ended == "raised" and "ZeroDivisionError: a reason of its own" in lost.output
    assert other.ended == "returned", other.output
    for part in ("RankLostError: allreduce '", "rank 1 raised", "ZeroDivisionError: a reason of its own"):
        assert part in other.result


def take_a_branch_alone() -> str:
    hvd.init()

    @tf.function
    def step(x: tf.Tensor, flag: tf.Tensor) -> tf.Tensor:
        if flag:
            x = hvd.allreduce(x, name="branch")
        return hvd.allreduce(x, name="always")

    for both in (True, False):
        step(tf.ones(3), tf.constant(both))
    # Tracing takes one rank longer than another; the limit is for what comes after it.
    hvd.shutdown()
    os.environ.update(STALLS)
    hvd.init()
    with pytest.raises(tf.errors.DeadlineExceededError) as raised:
        step(tf.ones(3), tf.constant(hvd.rank() == 0))
    return str(raised.value)


@pytest.mark.soak
def test_a_branch_that_only_one_rank_takes() -> None:
    inside, outside = run_ranks_to_their_ends(take_a_branch_alone, 2)
    assert inside.ended == outside.ended == "returned", inside.output + outside.output
    assert "StallError: allreduce 'branch' failed on rank 0" in inside.result
    assert "StallError: allreduce 'always' failed on rank 1" in outside.result
    assert "'branch' was submitted by rank 0 but not by rank 1" in inside.result


def wait_in_different_functions() -> str:
    hvd.init()
    names = ("b", "c") if hvd.rank() == 0 else ("c", "b")

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        first = hvd.allreduce(x, name=names[0])
        # The other rank's function waits for what comes after it.
        slept = tf.py_function(lambda: tf.constant(time.sleep(8) is None), [], tf.bool)
        with tf.control_dependencies([slept]):
            return first + hvd.allreduce(x, name=names[1])

    step(tf.ones(3))
    own = tf.function(lambda x: hvd.allreduce(x, name=f"of rank {hvd.rank()}"))
    with pytest.raises(tf.errors.DeadlineExceededError) as raised:
        own(tf.ones(3))
    return str(raised.value)


@pytest.mark.soak
def test_ranks_that_wait_in_different_functions_raise() -> None:
    """Within seconds, and not while an operation of TensorFlow's sleeps before what the others wait for."""
    for outcome in run_ranks_to_their_ends(wait_in_different_functions, 2):
        assert outcome.ended == "returned", outcome.output
        assert "every rank waits, but not for the same tensors" in outcome.result
        assert "'of rank 0' was submitted by rank 0 but not by rank 1" in outcome.result
        assert "ranks have waited for others" not in outcome.output
