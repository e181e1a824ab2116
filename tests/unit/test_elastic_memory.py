"""The two slots of a state: one is whole at any time, all ranks of a host find it, and copies cost their share."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovodish.elastic.copies import Copies
from horovodish.elastic.memory import (
    LONGEST_PERIOD,
    SHARE_OF_TIME,
    Memory,
    Position,
    Schedule,
    Snapshot,
    checksum,
)


def parts(**values: object) -> Snapshot:
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(values, 5, buffer_callback=buffers.append), buffers


def write(memory: Memory, position: Position, **values: object) -> None:
    memory.seal(memory.write(parts(**values)), position)


def newest(memory: Memory) -> dict[str, object]:
    assert memory.newest is not None
    data, buffers = memory.load(memory.newest)
    values: dict[str, object] = pickle.loads(data, buffers=buffers)
    return values


@pytest.fixture(params=["private", "files"])
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> Memory:
    return Memory(tmp_path if request.param == "files" else None, 0)


def test_what_is_written_is_read(memory: Memory) -> None:
    assert memory.newest is None
    values = {
        "numbers": np.arange(1000.0),
        "transposed": np.arange(6).reshape(2, 3).T,
        "empty": np.zeros((0, 3)),
        "several": [np.ones(3, np.int8), "text", np.ones(65, np.int8)],
    }
    write(memory, (0, 1, 2), **values)
    assert memory.newest == (0, 1, 2)
    first, second = newest(memory), newest(memory)
    for name, value in values.items():
        np.testing.assert_equal(first[name], value)
    array = first["numbers"]
    assert isinstance(array, np.ndarray)
    array[:] = 0
    np.testing.assert_equal(second["numbers"], values["numbers"])


def test_the_older_slot_is_written_and_the_newer_one_stays(memory: Memory) -> None:
    for number in range(5):
        write(memory, (0, 1, number), value=number)
        assert newest(memory) == {"value": number}
        assert memory.has((0, 1, number - 1)) == (number > 0)
        assert not memory.has((0, 1, number - 2))


def test_a_state_may_grow_and_shrink(memory: Memory) -> None:
    for number, length in enumerate([10, 100_000, 5, 200_000, 0]):
        write(memory, (0, 1, number), values=np.full(length, number))
        np.testing.assert_equal(newest(memory), {"values": np.full(length, number)})


def test_a_torn_copy_is_not_taken(memory: Memory, tmp_path: Path) -> None:
    for number in range(4):
        write(memory, (0, 1, number), value=number)
    memory.write(parts(value=np.zeros(100_000)))  # the rank dies before it is sealed
    assert newest(memory) == {"value": 3}
    if any(tmp_path.iterdir()):
        assert newest(Memory(tmp_path, 0)) == {"value": 3}
    write(memory, (0, 1, 4), value=4)
    assert newest(memory) == {"value": 4}


def test_all_ranks_of_a_host_read_and_write_the_same_slots(tmp_path: Path) -> None:
    one, other, another_state = Memory(tmp_path, 0), Memory(tmp_path, 0), Memory(tmp_path, 1)
    assert one.place == other.place
    assert one.place != Memory(None, 0).place != Memory(None, 0).place
    for number in range(6):
        writer, reader = (one, other) if number % 2 else (other, one)
        write(writer, (0, 1, number), values=np.full(10 ** (number % 4), number))
        np.testing.assert_equal(newest(reader)["values"], np.full(10 ** (number % 4), number))
    assert another_state.newest is None
    assert len({path.stat().st_ino for path in tmp_path.glob("0.*")}) == 3, "two slots for a host, and their header"


def test_one_rank_of_a_host_copies_a_commit(tmp_path: Path) -> None:
    one, other = Copies(tmp_path, 0), Copies(tmp_path, 0)
    made = []

    def copy(copies: Copies, position: Position, value: str, *, waits: bool = False) -> None:
        copies.write(position, lambda: made.append(value) or parts(value=value), waits=waits)  # type: ignore[func-returns-value]

    copy(one, (0, 1, 1), "one")
    copy(other, (0, 1, 1), "other")
    assert made == ["one"]
    with one.memory.claimed(waits=False) as is_mine:
        assert is_mine
        copy(other, (0, 1, 2), "while the other one writes")
    assert made == ["one"]
    copy(other, (0, 1, 2), "later")
    assert other.newest == one.newest == (0, 1, 2)
    assert made == ["one", "later"]


def test_a_commit_gets_another_position(memory: Memory) -> None:
    write(memory, (0, 1, 7), value=7)
    write(memory, (0, 1, 8), value=8)
    memory.renumber((0, 1, 8), (1, 2, 8))
    memory.renumber((0, 1, 9), (9, 9, 9))
    assert memory.newest == (1, 2, 8)
    assert newest(memory) == {"value": 8}
    assert memory.has((0, 1, 7))


def test_where_there_is_no_room_the_rank_keeps_copies_itself(tmp_path: Path) -> None:
    copies = Copies(tmp_path, 0)
    copies.write((0, 1, 1), lambda: parts(value=1), waits=False)
    large = parts(value=np.zeros(100_000))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "posix_fallocate", refuse)
        with pytest.warns(RuntimeWarning, match=r"its own memory, where new processes cannot take them: .*more room"):
            copies.write((0, 1, 2), lambda: large, waits=False)
    assert copies.newest == (0, 1, 2)
    copies.write((0, 1, 3), lambda: parts(value=3), waits=False)
    assert copies.newest == (0, 1, 3)
    assert Copies(tmp_path, 0).newest == (0, 1, 1)


def refuse(*_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user: sudo make test")
@pytest.mark.parametrize("name", ["0.index", "0.0"])
def test_files_of_another_user_are_refused(name: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    write(Memory(tmp_path, 0), (0, 1, 1), value="planted")
    file = tmp_path / name
    os.chown(file, 65534, 65534)
    with pytest.raises(PermissionError, match=r"belongs to user 65534 with mode 600"):
        newest(Memory(tmp_path, 0))
    file.unlink()
    file.symlink_to("/etc/passwd")
    with pytest.raises(OSError, match=name):
        newest(Memory(tmp_path, 0))


def test_files_are_for_this_user_alone(tmp_path: Path) -> None:
    write(Memory(tmp_path, 0), (0, 1, 1), value=1)
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o600] * 2


@given(
    took=st.floats(1e-6, 10),
    between=st.floats(1e-5, 10),
    commits=st.integers(1, 300),
)
def test_copies_take_their_share_of_the_time(took: float, between: float, commits: int) -> None:
    before = Schedule(period=1, commit=8, copied_at=100.0)
    after = before.after(8 + commits, 100.0 + commits * between, took)
    assert after.period & (after.period - 1) == 0, "a power of two"
    if after.period < LONGEST_PERIOD and took > 1e-3:
        assert took <= after.period * between * SHARE_OF_TIME * 1.01
        assert after.period == 1 or took >= after.period / 2 * between * SHARE_OF_TIME * 0.99


def test_hosts_copy_at_the_same_commits() -> None:
    often, rarely = Schedule(period=4), Schedule(period=16)
    assert [n for n in range(1, 33) if rarely.is_due(n)] == [16, 32]
    assert all(often.is_due(n) for n in range(1, 33) if rarely.is_due(n))


@given(st.data())
def test_a_checksum_sees_where_words_are(data: st.DataObject) -> None:
    words = np.random.default_rng(0).integers(0, 5, data.draw(st.integers(2, 3000)))
    one, other = data.draw(st.integers(0, len(words) - 1)), data.draw(st.integers(0, len(words) - 1))
    swapped = words.copy()
    swapped[[one, other]] = words[[other, one]]
    same = words[one] == words[other]
    assert (checksum(words.view(np.uint8)) == checksum(swapped.view(np.uint8))) == same


def test_a_checksum_sees_rows_and_signs_that_change_places() -> None:
    """The table is as wide as the checksum's own, so plain sums of its rows and columns would stay the same."""
    width = 509
    rows, numbers = np.eye(width), np.arange(1.0, 4 * width + 1).reshape(4, width)
    signs, low = numbers.copy(), numbers.copy()
    signs[np.ix_([1, 2], [3, 5])] *= -1
    low.view(np.int64)[np.ix_([1, 2], [3, 5])] += [[1, -1], [-1, 1]]
    assert len({checksum(each.reshape(-1).view(np.uint8)) for each in (numbers, signs, low)}) == 3
    orders = [rows, rows[::-1].copy(), np.roll(rows, 1, 0), rows[np.random.default_rng(0).permutation(width)]]
    for first in range(0, 500, 10):  # of numbers whose upper bits alone are set
        orders.append(rows.copy())
        orders[-1][[first, first + 8]] = rows[[first + 8, first]]
    assert len({checksum(each.reshape(-1).view(np.uint8)) for each in orders}) == len(orders)
