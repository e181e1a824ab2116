"""Handles: any order, poll, waiting twice, names in use, dropped handles, Ctrl-C."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import numpy as np
import pytest

import horovodish as hvd
from horovodish._native import DTYPES, REDUCE_OPS
from horovodish.collectives.array_adapter import ARRAYS
from horovodish.collectives.operation import Operation
from horovodish.collectives.submission import Handle, submit
from horovodish.runtime import basics
from support.expect import the_engine_goes_on
from support.model import PLANES
from support.on_ranks import on_ranks

COUNT = 100


@on_ranks(1, 3, planes=PLANES)
def test_any_order() -> None:
    """Each rank submits and waits in an order of its own."""
    order = random.Random(hvd.rank())
    for _ in range(5):
        turns = list(range(COUNT))
        order.shuffle(turns)
        handles = {
            turn: hvd.allreduce_async(np.full(turn * 50, turn + hvd.rank()), op=hvd.Sum, name=f"any {turn}")
            for turn in turns
        }
        order.shuffle(turns)
        for turn in turns:
            expected = sum(turn + rank for rank in range(hvd.size()))
            np.testing.assert_array_equal(hvd.synchronize(handles[turn]), np.full(turn * 50, expected))


@on_ranks(1, 3, planes=PLANES)
def test_results_stay() -> None:
    handle = hvd.allreduce_async(np.full(3, 2.0), op=hvd.Sum, name="stays")
    while not hvd.poll(handle):
        time.sleep(0.001)
    assert "settled" in repr(handle)
    first = handle.wait()
    assert hvd.poll(handle)
    assert hvd.synchronize(handle) is first
    np.testing.assert_array_equal(first, np.full(3, 2.0 * hvd.size()))


@on_ranks(1, 3, planes=PLANES)
def test_waiting_from_several_threads() -> None:
    results: dict[int, np.ndarray] = {}

    def reduce(number: int) -> None:
        for turn in range(20):
            name = f"thread {number} turn {turn}"
            results[number] = hvd.allreduce(np.full(10, number), op=hvd.Sum, name=name)

    threads = [threading.Thread(target=reduce, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, result in results.items():
        np.testing.assert_array_equal(result, np.full(10, number * hvd.size()))


@on_ranks(1)
def test_two_threads_make_the_result_once() -> None:
    both_wait, made = threading.Barrier(2), []

    def make(_: object) -> str:
        made.append(threading.current_thread())
        with suppress(threading.BrokenBarrierError):
            both_wait.wait(1.0)  # the other thread, if it makes a result, too
        return "the result"

    handle = ARRAYS.one(Operation("allreduce", "once", op=hvd.Sum), np.ones(3))
    handle._finish = make
    results: list[object] = []
    threads = [threading.Thread(target=lambda: results.append(handle.wait())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["the result"] * 2
    assert len(made) == 1


@on_ranks(1, 3, planes=PLANES)
def test_a_name_in_use() -> None:
    hvd.barrier()
    # Rank 0 alone cannot complete "twice" before the others submit it, which they do after the next broadcast.
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(np.ones(2), op=hvd.Sum, name="twice")
        if hvd.size() > 1:
            with pytest.raises(hvd.DuplicateNameError, match="twice"):
                hvd.allreduce_async(np.ones(2), op=hvd.Sum, name="twice")
            with pytest.raises(hvd.DuplicateNameError, match="twice"):
                hvd.broadcast(np.ones(2), 0, name="twice")
        hvd.broadcast(np.zeros(1), 0, name="go")
    else:
        hvd.broadcast(np.zeros(1), 0, name="go")
        handle = hvd.allreduce_async(np.ones(2), op=hvd.Sum, name="twice")
    np.testing.assert_array_equal(hvd.synchronize(handle), np.full(2, hvd.size()))
    np.testing.assert_array_equal(hvd.allreduce(np.ones(2), op=hvd.Sum, name="twice"), np.full(2, hvd.size()))


@on_ranks(1, 3, planes=PLANES)
def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match=r"expected a handle from an \.\.\._async function, got int"):
        hvd.synchronize(7)  # type: ignore[arg-type]
    with pytest.raises(hvd.UnsupportedTensorError, match=r"^x: the array .* is not C-contiguous"):
        hvd.allreduce(np.zeros((4, 4))[:, 1], name="x")
    with pytest.raises(hvd.UnsupportedTensorError, match=r"^x: dtype complex128 is not supported"):
        hvd.allreduce(np.zeros(4, complex), name="x")
    with pytest.raises(hvd.UnsupportedTensorError, match=r"^x: bool arrays cannot be reduced"):
        hvd.allreduce(np.zeros(4, bool), name="x")
    with pytest.raises(hvd.UnsupportedTensorError, match=r"^x: op=Adasum needs floating-point numbers, not int64"):
        hvd.allreduce(np.zeros(4, np.int64), op=hvd.Adasum, name="x")
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    for in_place in (hvd.allreduce_, lambda array: hvd.broadcast_(array, 0)):
        with pytest.raises(hvd.UnsupportedTensorError, match=r"is read-only"):
            in_place(frozen)
    the_engine_goes_on()


@on_ranks(1, 3, planes=PLANES)
def test_names_are_counted_alike() -> None:
    handles = [hvd.allreduce_async(np.zeros(1)), hvd.allreduce_async(np.zeros(1)), hvd.allgather_async(np.zeros(1))]
    for handle in handles:
        handle.wait()
    kinds = [handle.name.split(".")[:2] for handle in handles]
    assert kinds == [["allreduce", "noname"], ["allreduce", "noname"], ["allgather", "noname"]]
    numbers = [int(handle.name.split(".")[2]) for handle in handles]
    assert numbers[1] == numbers[0] + 1


@on_ranks(1, 3, planes=PLANES)
def test_arrays_of_dropped_handles_stay() -> None:
    """The arrays are the engine's alone; freed too early, they would be overwritten with the next ones."""
    for turn in range(30):
        for part in range(5):
            hvd.allreduce_async_(np.full(20_000, 1.0), op=hvd.Sum, name=f"dropped {turn} {part}")
        gc.collect()
        junk = [np.full(20_000, -1.0) for _ in range(5)]
        result = hvd.allreduce(np.full(20_000, 3.0), op=hvd.Sum, name=f"kept {turn}")
        assert np.all(result == 3.0 * hvd.size())
        assert all(np.all(array == -1.0) for array in junk)


class Owner:
    """Something that can be watched while it is kept alive."""


def submit_for(owner: Owner, array: np.ndarray, name: str) -> Handle[None]:
    """An allreduce of float64 in place that keeps `owner` alive."""
    tensor = (array.ctypes.data, array.ctypes.data, DTYPES["float64"], array.shape)
    return submit(Operation("allreduce", name), [tensor], keep_alive=owner, result=lambda _: None)


@on_ranks(1, 3, planes=PLANES)
def test_memory_is_given_back() -> None:
    owner, array = Owner(), np.ones(4)
    watched = weakref.ref(owner)
    handle = submit_for(owner, array, "watched")
    del owner
    handle.wait()
    assert watched() is None, "still referenced after wait()"
    source = np.ones(4)
    seen = weakref.ref(source)
    handle = hvd.allreduce_async(source, name="an input")
    del source
    handle.wait()
    assert seen() is None, "the handle keeps the input"


@contextmanager
def interrupted_once_handed_over() -> Iterator[None]:
    """Raises KeyboardInterrupt in `submit` before the line that follows the engine's call."""

    def trace_lines(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and "native" in frame.f_locals:
            raise KeyboardInterrupt
        return trace_lines

    before = sys.gettrace()
    sys.settrace(lambda frame, *_: trace_lines if frame.f_code is submit.__code__ else None)
    try:
        yield
    finally:
        sys.settrace(before)


@on_ranks(1, 3, planes=PLANES)
def test_memory_stays_when_a_submission_is_interrupted() -> None:
    """Ctrl-C may come as soon as the engine has the operation, before the caller has its handle."""
    array = np.ones(1000)
    watched = weakref.ref(array)
    if hvd.rank() == 0:
        with pytest.raises(KeyboardInterrupt), interrupted_once_handed_over():
            hvd.allreduce_async_(array, op=hvd.Sum, name="interrupted")
        del array
        gc.collect()
        assert watched() is not None
    hvd.barrier()
    if hvd.rank() > 0:
        np.testing.assert_array_equal(hvd.allreduce_(array, op=hvd.Sum, name="interrupted"), np.full(1000, hvd.size()))
    hvd.barrier()
    hvd.barrier()  # on its way the engine is asked what has settled
    assert watched() is None or hvd.rank() > 0


@on_ranks(2)
def test_a_dropped_handle_keeps_what_the_engine_needs() -> None:
    owner, array = Owner(), np.ones(4)
    watched = weakref.ref(owner)
    if hvd.rank() == 1:
        hvd.broadcast(np.zeros(1), 0, name="go")
        submit_for(owner, array, "dropped").wait()
        hvd.barrier()
        hvd.barrier()
        return
    submit_for(owner, array, "dropped")
    del owner
    gc.collect()
    assert watched() is not None
    hvd.broadcast(np.zeros(1), 0, name="go")
    hvd.barrier()
    hvd.barrier()  # a submission learns what has settled before it
    assert watched() is None


@on_ranks(2)
def test_a_plan_keeps_what_is_left_to_it_until_its_operations_have_ended() -> None:
    owner, array = Owner(), np.ones(4)
    watched = weakref.ref(owner)
    plan = basics.engine().plan("left", REDUCE_OPS["sum"], 1.0, 1.0, [("x", DTYPES["float64"], (4,), 0)], [-1])
    if hvd.rank() == 1:
        hvd.broadcast(np.zeros(1), 0, name="go")
    plan.submit(0, array.ctypes.data, array.ctypes.data)
    plan.keep(owner)
    del owner
    if hvd.rank() == 0:
        gc.collect()
        assert watched() is not None
        hvd.broadcast(np.zeros(1), 0, name="go")
    while not plan.wait(1):
        pass
    np.testing.assert_array_equal(array, np.full(4, 2.0))
    plan.reset()
    hvd.barrier()  # a submission lets go of what is no longer needed
    assert watched() is None


@on_ranks(2, planes=PLANES)
def test_control_c_interrupts_a_wait_and_loses_nothing() -> None:
    """Rank 1 submits nothing before rank 0 has been interrupted."""
    if hvd.rank() == 1:
        hvd.broadcast(np.zeros(1), 0, name="go")
        hvd.allreduce(np.full(2, 1.0), op=hvd.Sum, name="late")
        return
    handle = hvd.allreduce_async(np.full(2, 1.0), op=hvd.Sum, name="late")

    def wait_until_control_c() -> None:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        handle.wait()

    with pytest.raises(KeyboardInterrupt):
        wait_until_control_c()
    hvd.broadcast(np.zeros(1), 0, name="go")
    np.testing.assert_array_equal(handle.wait(), [2.0, 2.0])
