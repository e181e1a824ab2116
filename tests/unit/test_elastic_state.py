"""States: what `commit()` keeps, what `restore()` puts back, and which rank's state `sync()` gives to all."""

from __future__ import annotations

import errno
import os
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import horovodish as hvd
from horovodish import elastic
from horovodish.elastic import HostsUpdatedInterrupt, ObjectState, State, exchange, membership
from horovodish.elastic import state as elastic_state
from horovodish.elastic.memory import Schedule
from horovodish.elastic.snapshots import Held, Reference
from horovodish.gradients import windows
from horovodish.runtime.process import part
from support.on_ranks import on_ranks
from support.ranks import run_ranks


class Counter:
    """An object that keeps its own state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Holder:
    """An object that holds one."""

    def __init__(self, counter: Counter) -> None:
        self.counter = counter


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


@pytest.mark.usefixtures("always_copied")
def test_the_last_commit_counts() -> None:
    state = ObjectState(value=0)
    for value in range(5):
        state.value = value
        state.commit()
        state.value = -1
        state.restore()
        assert state.value == value


def test_an_object_that_keeps_its_own_state_stays_the_same_wherever_it_is() -> None:
    one, other, third = Counter(), Counter(), Counter()
    holder = Holder(third)
    state = State(alone=one, several=[one, {"other": other}], holder=holder)
    for number, each in enumerate((one, other, third)):
        each.count = number + 1
    state.commit()
    for each in (one, other, third):
        each.count = 9
    state.several.append("more")
    state.restore()
    assert [each.count for each in (one, other, third)] == [1, 2, 3]
    assert state.several == [one, {"other": other}]
    assert state.holder.counter is third


def test_other_objects_than_were_kept_are_refused() -> None:
    state = State(several=[Counter(), Counter()])
    state.commit()
    state.several = [Counter()]
    message = (
        r"state\.several cannot go back to a commit: object number 2 of the state was a Counter, and now there are C"
    )
    with pytest.raises(ValueError, match=message):
        state.restore()


def test_what_attributes_share_stays_shared() -> None:
    array, counter = np.zeros(3), Counter()
    state = State(array=array, buffers={"array": array}, counter=counter, counters=[counter])
    state.commit()
    state.restore()
    assert state.array is state.buffers["array"]
    assert state.counter is state.counters[0] is counter


def test_what_was_added_since_goes() -> None:
    state = State(value=1)
    state.commit()
    state.value, state.more = 2, 3
    state.restore()
    assert state.value == 1
    assert not hasattr(state, "more")


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


def test_callbacks_are_called_in_their_order_after_reset() -> None:
    called: list[str] = []

    class Noting(State):
        def reset(self) -> None:
            called.append("reset")

    state = Noting()
    state.register_reset_callbacks([lambda: called.append("first"), lambda: called.append("second")])
    state.register_reset_callbacks([lambda: called.append("third")])
    state.on_reset()
    assert called == ["reset", "first", "second", "third"]


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


class Named(State):
    """Refers to arrays of NumPy, as other classes refer to tensors that tell whether they were written to."""

    def __init__(self, **attributes: Any) -> None:
        self._sums = 0
        super().__init__(**attributes)

    def _reference_to(self, value: object) -> Reference | None:
        return Reference(value, value.sum()) if isinstance(value, np.ndarray) else None

    def _is_unchanged(self, held: Held) -> bool:
        return all(value.sum() == token for value, token in held.references)

    def _bytes_of(self, value: Any) -> np.ndarray:
        return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


@pytest.fixture
def always_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each commit is copied, whatever that costs."""
    copy_always(monkeypatch)


def copy_always(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(Schedule, "is_due", lambda *_: True)


@pytest.fixture
def never_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits are held, and not copied unless they must be."""
    hold_only(monkeypatch)


def hold_only(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(Schedule, "is_due", lambda *_: False)
    patched.setattr(elastic_state._Budget, "allows", lambda _: True)


@pytest.mark.usefixtures("never_copied")
def test_a_commit_that_was_not_copied_is_there_while_nobody_writes() -> None:
    array = np.arange(4.0)
    state = Named(array=array, epoch=1, losses=[1])
    state.commit()
    state.epoch, state.losses = 2, [1, 2]
    state.restore()
    assert (state.epoch, state.losses) == (1, [1])
    assert state.array is array, "not even then a copy"
    state.epoch = 2
    state.restore()
    assert state.epoch == 1, "it is still held"
    array += 1
    with pytest.raises(RuntimeError, match=r"commit 1 was not copied, .* call save\(\) in place of commit\(\)"):
        state.restore()
    state.save()
    array += 1
    state.restore()
    np.testing.assert_array_equal(state.array, np.arange(4.0) + 1)


@pytest.mark.usefixtures("never_copied")
def test_within_a_window_of_accumulation_nothing_is_committed() -> None:
    class Window:
        passes = 1

        def is_open(self) -> bool:
            return self.passes > 0

    window = Window()
    windows.follow(window)
    state = State(done=0)
    for _ in range(elastic_state.WARN_AFTER_SKIPPED - 1):
        state.commit()
    with pytest.warns(RuntimeWarning, match=r"1000 calls of commit\(\) in a row were within a window"):
        state.commit()
    with pytest.raises(RuntimeError, match=r"save\(\) was called within a window of gradient accumulation, or a round"):
        state.save()
    assert not state._position[2]
    window.passes = 0
    state.commit()
    assert state._position[2] == 1
    del window


@on_ranks(3)
def test_sync() -> None:
    """All ranks get the newest commit of any of them, whatever way it takes."""
    rank = hvd.rank()
    loaded: list[str] = []

    class Counted(Named):
        def _load(self, position: Any) -> None:
            loaded.append("copy")
            super()._load(position)

        def _put_held_back(self) -> None:
            loaded.append("held")
            super()._put_held_back()

    def seen_by_all(state: State) -> list[Any]:
        seen = hvd.allgather_object((state.value, np.asarray(state.array).tolist(), list(loaded)))
        loaded.clear()
        assert len({repr(each[:2]) for each in seen}) == 1, seen
        return [seen[0][0], seen[0][1], *(each[2] for each in seen)]

    with pytest.MonkeyPatch.context() as patched:
        state = Counted(value=f"of rank {rank}", array=np.full(2, float(rank)))
        state.sync()
        assert seen_by_all(state) == ["of rank 0", [0, 0], ["copy"], ["copy"], ["copy"]]

        hold_only(patched)
        state.value = "held"
        state.commit()
        state.value = f"changed on {rank}"
        state.sync()
        assert seen_by_all(state) == ["held", [0, 0], ["held"], ["held"], ["held"]]

        state.value = "newest"
        if rank == 1:  # the others have not come so far
            state.commit()
        state.value = "in the middle of the next step"
        state.sync()
        assert seen_by_all(state) == ["newest", [0, 0], ["copy"], ["copy"], ["copy"]]

        state.commit()
        if rank == 2:  # it had come to its next step
            state.array += 1
        state.sync()
        assert seen_by_all(state) == ["newest", [0, 0], ["copy"], ["copy"], ["copy"]]

        state.commit()
        state.array += 1  # all of them have written to the last commit
        state.sync()
        assert seen_by_all(state) == ["newest", [0, 0], ["copy"], ["copy"], ["copy"]]

        state.array = np.zeros(2) + (rank == 1)  # a mistake of the script's: commits that are not alike
        state.commit()
        state.sync()
        assert seen_by_all(state) == ["newest", [0, 0], ["copy"], ["copy"], ["copy"]]

        if rank == 0:  # a commit at which another rank hears of new hosts
            patched.setattr(membership, "hosts_updated", lambda: True)
            with pytest.raises(HostsUpdatedInterrupt):
                state.commit()
        state.sync()
        assert not state._is_interrupted
        hvd.barrier()


@on_ranks(3)
def test_copies_of_several_memories_are_compared() -> None:
    """Ranks that differ in what is not reduced, such as statistics, have the bits of one rank afterwards."""
    state = State(value=0, statistics=np.zeros(5))
    state.sync()
    for number in (1, 2):
        state.statistics = np.full(5, float(hvd.rank() if number == 1 else number))
        state.save()  # each into memory of its own, as on hosts of their own
        state.sync()
        np.testing.assert_array_equal(state.statistics, np.full(5, 0.0 if number == 1 else 2.0))


@on_ranks(2)
def test_a_large_state_travels_in_pieces() -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(exchange, "CHUNK_BYTES", 1000)
        state = State(array=np.arange(10_007) + hvd.rank(), rank=hvd.rank())
        state.sync()
        np.testing.assert_array_equal(state.array, np.arange(10_007))
        assert state.rank == 0


@on_ranks(3)
def test_states_that_not_all_ranks_bring_along_wait_for_their_next_block() -> None:
    first, second = State(x=hvd.rank()), State(y=hvd.rank())
    exchange.exchange([first])
    first.x = 5
    first.save()
    exchange.exchange([first, second] if hvd.rank() == 1 else [first], in_recovery=True)
    assert first.is_synced and not second.is_synced
    second.sync()
    assert (first.x, second.y) == (5, 0)
    with pytest.raises(
        hvd.MismatchError, match=r"at different states, .*: rank 0: \d+; rank 1: \d+; rank 2: \d+\. Make"
    ):
        (first if hvd.rank() == 1 else second).sync()


def test_new_processes_take_what_earlier_ones_have_left(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(membership, "state_folder", lambda: tmp_path)
        patched.setattr(part(elastic_state.OfAll), "made", 0)
        state = State(value="left")
        state._enter_job()
        state._position = (0, 3, 7)
        state.save()
        state._copies.memory.write((b"", []))  # it dies in the middle of its next copy
    results = run_ranks(begin_in_new_processes, 2, args=(str(tmp_path),))
    assert results == [["left", "left", 9]] * 2


def begin_in_new_processes(folder: str) -> list[Any]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(membership, "state_folder", lambda: Path(folder))
        patched.setattr(membership, "start", lambda: 1)
        patched.setattr(part(elastic_state.OfAll), "made", 0)
        copy_always(patched)
        hvd.init()
        state = State(value="new")
        state.commit()  # it is not further than what earlier processes have left
        state.sync()
        seen: list[Any] = [state.value]
        assert state._position == (1, 1, 8)
        state.value = None
        state.restore()
        seen.append(state.value)
        state.commit()
        hvd.barrier()
        assert state._copies.newest == (1, 1, 9), "one of them has copied it"
        seen.append(state._position[2])
        hvd.barrier()
        return seen


@pytest.mark.parametrize("without", ["one rank", "all ranks"])
def test_ranks_without_room_receive_the_state_in_their_own_memory(without: str, tmp_path: Path) -> None:
    assert run_ranks(sync_without_room, 3, args=(without, str(tmp_path)), fresh=True) == [[0, 7, 8]] * 3


def sync_without_room(without: str, folder: str) -> list[int]:
    hvd.init()

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    seen = []
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        patched.setattr(membership, "state_folder", lambda: Path(folder))
        state = State(value=hvd.rank())
        if without == "all ranks" or hvd.rank() == 0:
            patched.setattr(os, "posix_fallocate", refuse)
        state.sync()
        seen.append(state.value)
        for value in (7, 8):
            state.value = value
            state.commit()
            state.value = -1
            hvd.barrier()
            state.sync()
            seen.append(state.value)
    return seen


def test_only_the_rank_that_sends_is_asked_for_what_cannot_be_pickled() -> None:
    messages = run_ranks(sync_what_cannot_be_pickled, 2, fresh=True)
    assert messages[0].startswith("state.lock cannot be kept: ")
    assert messages[1] == ""


def sync_what_cannot_be_pickled() -> str:
    hvd.init()
    state = State(lock=threading.Lock())
    if hvd.rank() == 1:
        hvd.allgather_object(exchange._Told(0, 0, {}, False, None), "elastic.exchange")
        return ""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "horovodish.elastic.exchange.allgather_object", lambda told, name: hvd.allgather_object(told, name)[:1] * 2
        )
        with pytest.raises(TypeError) as raised:
            state.sync()
    return str(raised.value)


class Own(State):
    """A state as Horovod's guide writes them."""

    def save(self) -> None:
        self._saved = 1


def test_a_state_with_methods_that_no_recovery_calls_is_refused() -> None:
    message = (
        r"Own has a save\(\) of its own, which a recovery would not call\. Put its data into attributes of the state"
    )
    with pytest.raises(TypeError, match=message):
        elastic.run(lambda _: None)(Own())
    hvd.shutdown()


def test_another_state_cannot_be_committed_in_a_block() -> None:
    run_ranks(commit_another, 1)


def commit_another() -> None:
    state, another = State(value=1), State(value=2)
    message = "put all values that change in a step into one state"
    with elastic.attempt(state):
        for commits in (another.commit, another.save):
            with pytest.raises(RuntimeError, match=message):
                commits()


def test_blocks_within_blocks_are_refused() -> None:
    assert run_ranks(nest_blocks, 1) == [["A recovery goes back to the beginning of a block"] * 2]


def nest_blocks() -> list[str]:
    said = []
    for inner in (lambda: elastic.attempt(State()).__enter__(), lambda: elastic.run(lambda _: None)(State())):
        with pytest.raises(RuntimeError) as raised, elastic.attempt(State()):
            inner()
        said.append(str(raised.value).partition(". ")[2].partition(",")[0])
    with elastic.attempt(State(value=1)):
        pass
    return said
