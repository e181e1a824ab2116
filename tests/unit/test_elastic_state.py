"""States: what `commit()` keeps, what `restore()` puts back, and which rank's state `sync()` gives to all."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import horovodish as hvd
from horovodish import elastic
from horovodish.elastic import HostsUpdatedInterrupt, ObjectState, State, membership
from horovodish.elastic.memory import Memory, newest_in
from support.ranks import run_ranks


class Counter:
    """An object that keeps its own state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_mutable_attributes_are_restored() -> None:
    counter = Counter()
    state = ObjectState(epoch=0, losses=[], nested={"a": [1]}, array=np.zeros(3), counter=counter)
    state.extra = {1}
    state.losses.append(0.5)
    counter.count = 7
    state.commit()
    state.losses.append(0.25)
    state.nested["a"].append(2)
    state.array += 1
    state.epoch, counter.count = 3, 9
    state.extra.add(2)
    for _ in range(2):  # what was restored is not what is kept
        state.restore()
        assert (state.epoch, state.losses, state.nested, state.extra) == (0, [0.5], {"a": [1]}, {1})
        np.testing.assert_array_equal(state.array, np.zeros(3))
        assert state.counter is counter
        assert counter.count == 7
        state.losses.append(1.0)
        state.array += 1


def test_what_is_no_state_is_refused() -> None:
    message = r"hvd\.elastic\.run and attempt need a state, such as .*, not a Counter"
    with pytest.raises(TypeError, match=message):
        hvd.elastic.run(lambda state: None)(Counter())  # type: ignore[type-var]
    with pytest.raises(TypeError, match=message), hvd.elastic.attempt(Counter()):  # type: ignore[arg-type]
        pass
    assert not hvd.is_initialized()


def test_the_last_commit_counts() -> None:
    state = ObjectState(value=0)
    for value in range(5):
        state.value = value
        state.commit()
        state.value = -1
        state.restore()
        assert state.value == value


def test_restore_without_commit_does_nothing() -> None:
    state = State(value=1)
    state.value = 2
    state.restore()
    assert state.value == 2


def test_horovods_arguments_are_taken() -> None:
    assert ObjectState(lambda obj: obj, get_rank=lambda: 0, batch=3).batch == 3


def test_attributes_with_an_underscore_are_not_kept() -> None:
    state = State(value=1)
    state._lock = threading.Lock()
    state.commit()
    lock = state._lock = threading.Lock()
    state.restore()
    assert state._lock is lock


def test_what_cannot_be_pickled_is_named_and_the_last_commit_stays() -> None:
    state = State(value=1)
    state.commit()
    state.value = 2
    state.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"state\.lock cannot be kept: .*lock.* Leave it out of the state, or name it"):
        state.commit()
    state.restore()
    assert state.value == 1


def test_callbacks_are_called_in_their_order_and_then_reset() -> None:
    called: list[str] = []

    class Noting(State):
        def reset(self) -> None:
            called.append("reset")

    state = Noting()
    state.register_reset_callbacks([lambda: called.append("first"), lambda: called.append("second")])
    state.register_reset_callbacks([lambda: called.append("third")])
    state.on_reset()
    assert called == ["first", "second", "third", "reset"]


def test_new_hosts_interrupt_a_commit_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    state = State(value=1)
    state.check_host_updates()
    monkeypatch.setattr(membership, "hosts_updated", lambda: True)
    with pytest.raises(HostsUpdatedInterrupt, match="new hosts"):
        state.check_host_updates()
    with pytest.raises(HostsUpdatedInterrupt):
        state.commit()
    state.value = 2
    state.restore()
    assert state.value == 1


def test_errors_that_do_not_come_of_other_ranks_are_raised_as_they_are() -> None:
    assert run_ranks(raise_things, 1) == [["ZeroDivisionError", "MismatchError", "ValueError"]]


def raise_things() -> list[str]:
    raised = []
    for error in (ZeroDivisionError(), hvd.MismatchError("a tensor"), ValueError("rank 1 was not lost")):

        @elastic.run
        def train(state: State, error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error)) as caught:
            train(State())
        assert caught.value is error
        with pytest.raises(type(error)) as caught, elastic.attempt(State()):
            raise error
        assert caught.value is error
        raised.append(type(error).__name__)
    return raised


class Sent(State):
    """Counts how often it is sent and put back."""

    def __init__(self, **attributes: Any) -> None:
        self._sent = self._loaded = 0
        super().__init__(**attributes)

    def _send(self, *args: Any) -> None:
        self._sent += 1
        super()._send(*args)

    def _put_back(self, name: str, captured: Any) -> None:
        self._loaded += name == "value"
        super()._put_back(name, captured)


def test_sync() -> None:
    results = run_ranks(sync_in_all_cases, 3)
    for seen in results:
        assert seen["first"] == seen["equal"] == [0]
        assert seen["furthest"] == [0, "mutable"]
        assert seen["restored"] == [0, "mutable"]
        assert seen["interrupted"] == "at the commit"
        assert seen["alone"] == 2
    assert [seen["traffic"] for seen in results] == [(1, 0), (0, 1), (0, 1)], "once, from rank 0"
    assert [seen["later traffic"] for seen in results] == [(0, 1), (1, 0), (0, 0)], "rank 2 is as far as rank 1"


def sync_in_all_cases() -> dict[str, Any]:
    hvd.init()
    rank = hvd.rank()
    seen: dict[str, Any] = {}
    state = Sent(value=[rank])
    state.sync()
    seen["first"] = list(state.value)
    state.sync()
    seen["equal"] = list(state.value)
    seen["traffic"] = state._sent, state._loaded

    state._sent = state._loaded = 0
    if rank == 0:  # the others have done one more step
        state.cut_off()
    hvd.barrier()
    hvd.allreduce(np.ones(1))
    if rank > 0:
        state.value.append("mutable")
        state.cut_off()
    state.sync()
    seen["furthest"] = list(state.value)
    seen["later traffic"] = state._sent, state._loaded
    if rank == 0:
        state.value = None
        state.restore()
    seen["restored"] = list(state.value)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(membership, "hosts_updated", lambda: rank == 0)
        state.value = "at the commit"
        try:
            state.commit()
        except HostsUpdatedInterrupt:
            assert rank == 0
        else:  # has not heard of them, and goes on until the next operation, which cannot be
            state.value = "after the commit"
        state.cut_off()
    state.sync()
    seen["interrupted"] = state.value

    if rank == 1:  # no message: no other rank takes part
        state.value = 2
        state.commit()
        state.value = 3
        state.restore()
    seen["alone"] = hvd.broadcast_object(state.value, 1)
    return seen


def test_new_processes_take_what_earlier_ones_have_left(tmp_path: Path) -> None:
    memory = Memory(tmp_path, 0, 0)
    state = State(value="older")
    state._memory, state._synced = memory, (0, 1, 0)
    state.save()
    state._synced, state.value = (0, 2, 0), "left"
    state.save()
    results = run_ranks(begin_in_new_processes, 2, args=(str(tmp_path),))
    assert results == [["left", "left", ("goes on", 1)]] * 2
    slot = newest_in(tmp_path, 0)
    assert slot is not None
    assert slot.position is not None
    assert slot.position[0] == 2
    assert not list(tmp_path.glob("0-*")), "what was taken over is given back"


def begin_in_new_processes(folder: str) -> list[Any]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(membership, "state_folder", lambda: Path(folder))
        patched.setattr(membership, "start", lambda: 1)
        hvd.init()
        state = State(value="new")
        state.commit()  # it is not further than what earlier processes have left
        state.sync()
        seen: list[Any] = [state.value]
        newest = state._kept.newest
        assert newest is not None
        assert not newest.content.flags.writeable, "all ranks of a host share what was left there"
        state.value = None
        state.restore()
        seen.append(state.value)

        # Now rank 0 is another process, which finds the last commit of rank 1. Rank 1 lives and has changed since.
        state.counter = 1
        state.commit()
        hvd.barrier()
        if hvd.rank() == 0:
            patched.setattr(membership, "start", lambda: 2)
            state = State(value="newer", counter=None)
        else:
            state.value = "goes on"
        state.cut_off()
        state.sync()
        seen.append((state.value, state.counter))
        assert state._synced is not None
        starts = hvd.allgather_object(state._synced[:2])
        assert starts[0] == starts[1], starts
        state.commit()
        hvd.barrier()
        return seen


def test_only_the_furthest_rank_is_asked_for_what_cannot_be_pickled() -> None:
    messages = run_ranks(sync_what_cannot_be_pickled, 2)
    assert messages[0].startswith("state.lock cannot be kept: ")
    assert messages[1] == ""


def sync_what_cannot_be_pickled() -> str:
    hvd.init()
    state = State(lock=threading.Lock())
    if hvd.rank() == 1:
        hvd.allgather_object(None)  # in the place of the first part of sync()
        return ""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("horovodish.elastic.state.allgather_object", lambda told, _: hvd.allgather_object(told)[:1])
        with pytest.raises(TypeError) as raised:
            state.sync()
    return str(raised.value)
