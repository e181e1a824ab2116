"""`TensorFlowState`, functions after the ranks have changed, and steps that write all or nothing."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import horovodish.tensorflow as hvd
from horovodish.runtime import basics
from horovodish.tensorflow.elastic import TensorFlowState
from support.elastic import Scene, run_elastic
from support.processes import wait_until
from support.ranks import run_ranks_to_their_ends
from support.scripts import output_of
from support.sources import ROOT

STEPS = 8


def test_variables_are_kept() -> None:
    alone, nested = tf.Variable(1.0), [tf.Variable([1, 2]), {"deep": tf.Variable([0.5], dtype=tf.bfloat16), "n": 3}]
    module = tf.Module()
    module.weight = tf.Variable(tf.ones([2, 2]))
    of_keras = keras.Variable([1.0, 2.0])
    state = TensorFlowState(
        [alone, of_keras], nested=nested, module=module, text=tf.Variable("a"), pair=(alone, 1), tensor=tf.ones(2), n=0
    )
    state.commit()
    for variable in (alone, nested[0], nested[1]["deep"], module.weight, of_keras):
        variable.assign(variable + 1)
    state.text.assign("b")
    nested[1]["n"], state.tensor, state.n = 4, None, 1
    state.restore()
    assert state.variables[0] is state.pair[0] is alone and state.module is module
    assert state.nested[1]["deep"] is nested[1]["deep"]
    assert (alone.numpy(), of_keras.numpy().tolist(), nested[0].numpy().tolist()) == (1, [1, 2], [1, 2])
    assert (nested[1]["deep"].numpy(), module.weight.numpy().tolist()) == ([0.5], [[1, 1]] * 2)
    assert (state.text.numpy(), state.nested[1]["n"], state.pair[1], state.n) == (b"a", 3, 1, 0)
    assert state.tensor.numpy().tolist() == [1, 1]


def test_other_variables_than_before_are_refused() -> None:
    state = TensorFlowState([tf.Variable(1.0)])
    state.commit()
    state.variables = []
    with pytest.raises(
        ValueError, match=r"state\.variables cannot go back to a commit: object number 1 of the state was a Res"
    ):
        state.restore()
    state.variables = module = tf.Module()
    module.weight = tf.Variable(1.0)
    state.commit()
    module.bias = tf.Variable(2.0)
    with pytest.raises(ValueError, match="it has 2 variables where 1 values are to be put back; make the same"):
        state.restore()


def test_a_session_is_refused() -> None:
    with pytest.raises(ValueError, match=r"put session\.run\(variables\) into an attribute of an ObjectState"):
        TensorFlowState(session=object())


def test_functions_are_traced_anew() -> None:
    seen: list[int] = []

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        seen.append(1)
        return inner(x) + 1

    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:
        seen.append(2)
        return x * 2

    for _ in range(2):
        assert inner(tf.ones([])) == 2
        assert step(tf.ones([])) == 3
    assert seen == [2, 1]
    TensorFlowState([]).reset()
    assert step(tf.ones([])) == 3
    assert seen == [2, 1, 1, 2]


def lose_a_rank_in_a_step(kind: str, folder: str) -> tuple[str, int, bool]:
    """The last rank dies when the other one has the first of two gradients: it may have written nothing."""
    hvd.init()
    fails = False
    is_victim = hvd.rank() == hvd.size() - 1
    there = Path(folder, f"has the first gradient {hvd.rank()}")
    variables = [tf.Variable(tf.ones([3])), tf.Variable(tf.ones([2], tf.float64))]
    counter = tf.Variable(0)
    optimizer: Any = keras.optimizers.AdamW(0.1)
    if kind == "optimizer":
        optimizer = hvd.DistributedOptimizer(optimizer)
    optimizer.build(variables)

    def fault(value: np.ndarray) -> np.ndarray:
        if fails and is_victim:
            for rank in range(hvd.size() - 1):
                wait_until(Path(folder, f"has the first gradient {rank}").exists)
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    @tf.custom_gradient
    def perilous(x: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            after = tf.numpy_function(fault, [upstream], upstream.dtype)
            after.set_shape(upstream.shape)
            return after

        return tf.identity(x), gradient

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variables[0] ** 2) + tf.cast(tf.reduce_sum(perilous(variables[1]) ** 2), tf.float32)
        if kind == "tape":
            tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        counter.assign_add(1)

    step()
    fails = True
    before, done = [v.numpy() for v in [*variables, *optimizer.variables, counter]], basics.engine().completed()
    assert counter.numpy() == 1 and not np.array_equal(before[0], np.ones(3))

    def watch() -> None:
        wait_until(lambda: basics.engine().completed() == done + 1)
        there.touch()

    watcher = threading.Thread(target=watch)
    watcher.start()
    with pytest.raises(tf.errors.InternalError) as raised:
        step()
    watcher.join()
    after = [v.numpy() for v in [*variables, *optimizer.variables, counter]]
    same = [np.array_equal(one, other) for one, other in zip(before, after, strict=True)]
    return str(raised.value), basics.engine().completed() - done, all(same)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["tape", "optimizer"])
def test_a_step_that_loses_a_rank_has_written_nothing(kind: str, tmp_path: Path) -> None:
    survivor, lost = run_ranks_to_their_ends(lose_a_rank_in_a_step, 2, args=(kind, str(tmp_path)))
    assert lost.ended == "died", lost.output
    assert survivor.ended == "returned", survivor.output
    said, done, is_same = survivor.result
    assert "RankLostError" in said and done == 1 and is_same


def train_through_a_loss(scene: Scene, computes: bool) -> dict[str, Any]:
    """Process 1 dies while the others are in a step or compute before one. The sums do not depend on the ranks."""
    sizes: list[int] = []
    total, counter = tf.Variable(tf.zeros([3])), tf.Variable(0)
    halves = tf.Variable(tf.zeros([2], tf.float64))

    @tf.function
    def step(number: tf.Tensor) -> None:
        sizes.append(hvd.size())
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(total * number) + tf.cast(tf.reduce_sum(halves) * 0.5, tf.float32)
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, [total, halves])
        total.assign_add(gradients[0])
        halves.assign_add(gradients[1])
        counter.assign_add(1)

    @hvd.elastic.run
    def train(state: TensorFlowState) -> None:
        while state.step < STEPS:
            if scene.me == 1 and state.step == 4 and scene.first_time("dies"):
                scene.die("dies")
            if computes and state.step == 4 and scene.first_time("computes"):
                wait_until(basics.is_cut_off)  # the launcher has told this rank, which has no collective under way
            step(tf.constant(float(state.step)))
            state.step += 1
            state.commit()

    state = TensorFlowState([total, counter], halves=halves, step=0)
    train(state)
    return {
        "values": [total.numpy().tolist(), halves.numpy().tolist(), counter.numpy(), state.step],
        "start": scene.start,
        "sizes": sizes,
    }


def check_loss(tmp_path: Path, ranks: int, *, computes: bool) -> Any:
    ended = run_elastic(train_through_a_loss, tmp_path, ranks, computes, flags=["--min-np", "2"])
    assert ended.status == 0, ended.said
    assert ended.fired == {"dies 1"}
    assert len(ended.results) == 2, ended.said
    for result in ended.results:
        assert result["values"] == [[float(sum(range(STEPS)))] * 3, [STEPS / 2] * 2, STEPS, STEPS], "no step is lost"
    return ended.results


@pytest.mark.soak
def test_survivors_go_on(tmp_path: Path) -> None:
    results = check_loss(tmp_path, 3, computes=True)
    assert [(result["start"], result["sizes"]) for result in results] == [(0, [3, 2])] * 2


@pytest.mark.soak
def test_new_processes_go_on(tmp_path: Path) -> None:
    results = check_loss(tmp_path, 2, computes=False)
    assert [(result["start"], result["sizes"]) for result in results] == [(1, [2])] * 2


@pytest.mark.soak
def test_the_example() -> None:
    output = output_of(ROOT / "examples/elastic_tensorflow.py", np=2, flags=["--min-np", "1"])
    accuracy = re.search(r"^test accuracy (\d\.\d+) on 2 ranks$", output, re.MULTILINE)
    assert accuracy is not None, output
    assert float(accuracy[1]) >= 0.93
