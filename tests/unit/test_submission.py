"""Handles and names, with an engine that does what the test says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from horovodish.collectives import submission
from horovodish.collectives.operation import Operation
from horovodish.collectives.submission import Handle, generated_name, poll, submit, synchronize
from horovodish.errors import MismatchError, NotInitializedError
from horovodish.runtime.process import Process


class ScriptedHandle:
    """A native handle that is settled when the test says so."""

    def __init__(self) -> None:
        self.settled = False
        self.failure: tuple[str, str] | None = None
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

    def release(self) -> None:
        pass


class ScriptedEngine:
    """An engine whose operations go on only when the test settles them."""

    def __init__(self) -> None:
        self.operations: list[ScriptedHandle] = []

    def enqueue(self, *arguments: Any) -> ScriptedHandle:
        self.operations.append(ScriptedHandle())
        return self.operations[-1]

    def settle(self, number: int) -> None:
        self.operations[number].settled = True


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


def test_names_are_counted_by_kind_and_anew_with_each_engine(current: Current) -> None:
    names = [generated_name("allreduce"), generated_name("broadcast"), generated_name("allreduce")]
    assert names == ["allreduce.noname.1", "broadcast.noname.1", "allreduce.noname.2"]
    current.engine = ScriptedEngine()
    submission._begin_session(None)
    assert generated_name("allreduce") == "allreduce.noname.1"


def test_what_messages_call_an_operation() -> None:
    names = ("loss", "allreduce.noname.12.bucket", "process group 0.noname.slot 5")
    assert [submission.shown(name) for name in names] == ["loss", "call 12 of allreduce", "a call of process group 0"]


def test_a_thread_that_submits_while_another_is_within_init_is_told(current: Current) -> None:
    current.engine = ScriptedEngine()  # it has started, but its session has not begun
    with pytest.raises(NotInitializedError, match=r"another thread is within init\(\) or shutdown\(\)"):
        start(None)
    assert current.engine.operations == []


@pytest.mark.parametrize("function", [poll, synchronize])
def test_what_is_no_handle_is_refused(function: Any) -> None:
    with pytest.raises(TypeError, match=r"expected a handle from an \.\.\._async function, got int"):
        function(7)
