"""Handles, and what is kept alive for how long, with an engine that does what the test says."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import pytest

from horovodish.collectives import submission
from horovodish.collectives.operation import Operation
from horovodish.collectives.submission import Handle, generated_name, poll, submit, synchronize
from horovodish.errors import MismatchError, NotInitializedError, RankLostError
from horovodish.runtime.process import Process


class Owner:
    """Something that can be watched while it is kept alive."""


class ScriptedHandle:
    """A native handle that is settled when the test says so."""

    def __init__(self, number: int):
        self.id = number
        self.settled = False
        self.failure: tuple[str, str] | None = None
        self.abandoned = False
        self.slices = 0

    def poll(self) -> bool:
        return self.settled

    def wait(self, seconds: float) -> bool:
        assert 0 < seconds <= 0.2, "Ctrl-C would have to wait too long"
        self.slices += 1
        self.settled = self.settled or self.slices == 3
        return self.settled

    def error(self) -> tuple[str, str] | None:
        return self.failure

    def release(self, kept: dict[int, object]) -> None:
        if not self.abandoned:
            kept.pop(self.id, None)


class ScriptedEngine:
    """An engine whose operations go on only when the test settles them."""

    def __init__(self) -> None:
        self.operations: list[ScriptedHandle] = []
        self.news: list[int] = []

    def enqueue(self, *arguments: Any) -> ScriptedHandle:
        *_, kept, keep_alive = arguments
        self.release_settled(kept)
        kept[len(self.operations)] = keep_alive
        self.operations.append(ScriptedHandle(len(self.operations)))
        return self.operations[-1]

    def release_settled(self, kept: dict[int, object]) -> None:
        for number in self.news:
            kept.pop(number, None)
        self.news.clear()

    def settle(self, number: int) -> None:
        self.operations[number].settled = True
        self.news.append(number)


class Current:
    """Which engine `init()` has last started."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine()


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Iterator[Current]:
    current = Current()
    monkeypatch.setattr(submission.basics, "engine", lambda: current.engine)
    with Process().entered():
        submission._begin_session(None)
        yield current


@pytest.fixture
def engine(current: Current) -> ScriptedEngine:
    return current.engine


def start(owner: object, result: object = "the result") -> Handle[Any]:
    return submit(Operation("allreduce", "x"), [(0, 0, 0, (1,))], keep_alive=owner, result=lambda _: result)


def test_wait_goes_on_in_slices_until_it_is_settled(engine: ScriptedEngine) -> None:
    assert synchronize(start(None)) == "the result"
    assert engine.operations[0].slices == 3


def test_the_result_is_made_once(engine: ScriptedEngine) -> None:
    made = []
    handle = submit(Operation("allreduce", "x"), [], keep_alive=None, result=made.append)
    assert handle.wait() is handle.wait() is None
    assert len(made) == 1


def test_poll_does_not_wait(engine: ScriptedEngine) -> None:
    handle = start(None)
    assert not poll(handle)
    assert "pending" in repr(handle)
    engine.settle(0)
    assert poll(handle)
    assert engine.operations[0].slices == 0


def test_an_error_is_raised_each_time(engine: ScriptedEngine) -> None:
    handle = start(None)
    engine.operations[0].failure = ("MismatchError", "the ranks disagree")
    for _ in range(2):
        with pytest.raises(MismatchError, match="the ranks disagree"):
            handle.wait()


def test_a_dropped_handle_keeps_its_owner_until_the_engine_is_done(engine: ScriptedEngine) -> None:
    owner = Owner()
    watched = weakref.ref(owner)
    start(owner)
    del owner
    start(None)
    gc.collect()
    assert watched() is not None
    engine.settle(0)
    start(None)
    assert watched() is None


def test_wait_releases_the_owner_at_once(engine: ScriptedEngine) -> None:
    owner = Owner()
    watched = weakref.ref(owner)
    handle = start(owner)
    del owner
    handle.wait()
    assert watched() is None


def test_a_stopped_engine_keeps_what_was_abandoned_and_nothing_else(engine: ScriptedEngine) -> None:
    owners = [Owner(), Owner(), Owner()]
    watched = [weakref.ref(owner) for owner in owners]
    handles = [start(owner) for owner in owners]
    del owners
    for operation in engine.operations[1:]:
        operation.abandoned = True
        operation.failure = ("RankLostError", "rank 1 has died")
    with pytest.raises(RankLostError):
        handles[1].wait()
    engine.settle(0)
    submission._end_session()
    del handles
    gc.collect()
    assert [owner() is not None for owner in watched] == [False, True, True]


def test_names_are_counted_by_kind_and_anew_with_each_engine(current: Current) -> None:
    names = [generated_name("allreduce"), generated_name("broadcast"), generated_name("allreduce")]
    assert names == ["allreduce.noname.1", "broadcast.noname.1", "allreduce.noname.2"]
    current.engine = ScriptedEngine()
    submission._begin_session(None)
    assert generated_name("allreduce") == "allreduce.noname.1"


def test_a_thread_that_submits_while_another_is_within_init_is_told(current: Current) -> None:
    current.engine = ScriptedEngine()  # it has started, but its session has not begun
    with pytest.raises(NotInitializedError, match=r"another thread is within init\(\) or shutdown\(\)"):
        start(None)
    assert current.engine.operations == []


def test_an_operation_that_settles_while_it_is_submitted_keeps_nothing(current: Current) -> None:
    """Another thread may hear of it, and lets go of its memory, before the thread that submits has the handle."""
    session = submission._running_session()
    with ThreadPoolExecutor(1) as other:

        class SettlesAtOnce(ScriptedEngine):
            def enqueue(self, *arguments: Any) -> ScriptedHandle:
                operation = super().enqueue(*arguments)
                if operation.id == 0:
                    self.settle(0)
                    other.submit(copy_context().run, start, None).result(60)
                return operation

        current.engine = session.engine = SettlesAtOnce()
        start(Owner())
    assert list(session.kept) == [1]


@pytest.mark.parametrize("function", [poll, synchronize])
def test_what_is_no_handle_is_refused(function: Any) -> None:
    with pytest.raises(TypeError, match=r"expected a handle from an \.\.\._async function, got int"):
        function(7)
