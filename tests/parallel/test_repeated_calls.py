"""A call like an earlier one leaves checks out. It must find what a first call would find."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import horovodish as hvd
from horovodish.collectives import adapter
from horovodish.collectives.repeated_calls import _MOST, _Calls
from horovodish.runtime.process import part
from support.expect import the_engine_goes_on
from support.model import PLANES
from support.on_ranks import on_ranks

SUM_OF_ALL = {2: 3.0, 3: 6.0}  # of rank + 1


def _own(*shape: int, dtype: Any = np.float32) -> Any:
    return np.full(shape, hvd.rank() + 1, dtype)


def _summed(tensor: Any, **options: Any) -> Any:
    return hvd.allreduce(tensor, op=hvd.Sum, name="repeated", **options)


@on_ranks(2, 3, planes=PLANES)
def test_results_of_repeated_calls() -> None:
    """Results are new arrays, whatever changes from call to call: values, shape, dtype, op, factors, name, or set."""
    total = SUM_OF_ALL[hvd.size()]
    first = _summed(_own(4))
    for step in range(3):
        np.testing.assert_array_equal(_summed(_own(4) * step), np.full(4, total * step, np.float32))
    np.testing.assert_array_equal(first, np.full(4, total, np.float32))
    calls: list[Callable[[], Any]] = [
        lambda: _summed(_own(2, 2)),
        lambda: _summed(_own(4, dtype=np.int64)),
        lambda: _summed(_own(4), prescale_factor=2.0) / 2,
        lambda: _summed(_own(4), prescale_factor=np.float64(4.0)) / 4,
        lambda: hvd.allreduce(_own(4), average=True, name="repeated") * hvd.size(),
        lambda: hvd.allreduce(_own(4), op=hvd.Max, name="repeated") / hvd.size() * total,
        lambda: hvd.allreduce(_own(4), op=hvd.Sum),
        lambda: hvd.allreduce_(_own(4), op=hvd.Sum, name="repeated"),
        lambda: hvd.allreduce(_own(8)[::2].copy(), op=hvd.Sum, name="repeated"),
        lambda: hvd.broadcast(_own(4), 1, name="repeated") / 2 * total,
    ]
    for _ in range(3):
        for call in calls:
            np.testing.assert_allclose(np.ravel(call()), np.full(4, total))


@on_ranks(2)
def test_a_factor_that_changes_in_place() -> None:
    factor = np.array(1.0)
    for value in (1.0, 2.0, 3.0):
        factor[...] = value
        np.testing.assert_array_equal(_summed(_own(1), prescale_factor=factor), [3.0 * value])


@on_ranks(2)
def test_options_that_python_takes_for_equal() -> None:
    """What a first call refuses is refused after a call with the right option, and minus zero is no zero."""
    for _ in range(2):
        _summed(_own(2), prescale_factor=2.0)
        _summed(_own(2), prescale_factor=0.0)
        hvd.broadcast(_own(2), 1, name="repeated")
    wrong: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: hvd.broadcast(_own(2), 1.0, name="repeated"), TypeError, "root_rank must be an int"),  # type: ignore[arg-type]
        (lambda: hvd.allreduce(_own(2), op=1, name="repeated", prescale_factor=2.0), ValueError, "no.* reduce op"),  # type: ignore[arg-type]
        (lambda: _summed(_own(2), prescale_factor=2 + 0j), ValueError, "is not a number"),
    ]
    for call, error, text in wrong:
        with pytest.raises(error, match=text):
            call()
    assert np.signbit(_summed(_own(2), prescale_factor=-0.0)).all()
    assert not np.signbit(_summed(_own(2), prescale_factor=0.0)).any()
    the_engine_goes_on()


@on_ranks(2)
def test_a_repeated_call_is_refused_as_a_first_one() -> None:
    """One rank makes a mistake in the second call: it says which, and the other rank raises its reason."""
    array = _own(4)
    read_only = array.copy()
    read_only.flags.writeable = False
    mistakes: list[tuple[Callable[[Any], Any], Any, str]] = [
        (lambda it: hvd.allreduce_(it, op=hvd.Sum, name="mistake 0"), read_only, "read-only"),
        (lambda it: _summed(it), np.ones(8, np.float32)[::2], "not C-contiguous"),
        (lambda it: _summed(it), np.ones(4, bool), "cannot be reduced"),
        (lambda it: _summed(it), [1.0, 2.0, 3.0, 4.0], "got list"),
        (lambda it: hvd.broadcast_(it, 0, name="mistake 4"), read_only, "read-only"),
    ]
    for call, mistake, text in mistakes:
        call(array.copy())
        call(array.copy())
        with pytest.raises((hvd.UnsupportedTensorError, hvd.MismatchError), match=text) as caught:
            call(mistake if hvd.rank() == 1 else array.copy())
        expected = hvd.UnsupportedTensorError if hvd.rank() == 1 else hvd.MismatchError
        assert caught.type is expected
        the_engine_goes_on()


@on_ranks(2)
def test_ranks_disagree_in_a_repeated_call() -> None:
    for _ in range(2):
        _summed(_own(4))
    with pytest.raises(hvd.MismatchError, match="repeated"):
        _summed(_own(5 if hvd.rank() else 4))
    np.testing.assert_array_equal(_summed(_own(4)), np.full(4, 3.0, np.float32))


@on_ranks(3)
def test_a_process_set_that_is_gone() -> None:
    """Also if another set takes its place."""
    gone = hvd.add_process_set([0, 1])
    if gone.included():
        for _ in range(2):
            np.testing.assert_array_equal(_summed(_own(4), process_set=gone), np.full(4, 3.0, np.float32))
    hvd.remove_process_set(gone)
    other = hvd.add_process_set([0, 2])
    with pytest.raises(ValueError, match="not in use"):
        _summed(_own(4), process_set=gone)
    if other.included():
        np.testing.assert_array_equal(_summed(_own(4), process_set=other), np.full(4, 4.0, np.float32))


@on_ranks(2)
def test_a_new_engine_knows_no_earlier_call() -> None:
    _summed(_own(4))
    hvd.shutdown()
    assert not part(_Calls)
    with pytest.raises(hvd.NotInitializedError):
        _summed(_own(4))
    hvd.init()
    np.testing.assert_array_equal(_summed(_own(4)), np.full(4, 3.0, np.float32))


@on_ranks(2)
def test_a_call_that_is_kept_after_another_thread_has_started_a_new_engine() -> None:
    began, may_end = threading.Event(), threading.Event()
    keep = adapter.keep_call

    def late(*key_and_handle: Any) -> None:
        began.set()
        may_end.wait()
        keep(*key_and_handle)

    adapter.keep_call = late
    try:
        thread = threading.Thread(target=_summed, args=[_own(4)])
        thread.start()
        assert began.wait(60)
        hvd.shutdown()
        hvd.init()
        may_end.set()
        thread.join()
    finally:
        adapter.keep_call = keep
    for _ in range(2):
        np.testing.assert_array_equal(_summed(_own(4)), np.full(4, 3.0, np.float32))


@on_ranks(1)
def test_names_that_are_new_each_time_need_no_more_memory() -> None:
    for step in range(2 * _MOST):
        hvd.allreduce(_own(1), name=f"step {step}")
    assert len(part(_Calls)) <= _MOST
