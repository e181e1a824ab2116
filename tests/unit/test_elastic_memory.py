"""The two slots of a rank: what is written is there when one of them is torn, and other processes find it."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from horovodish.elastic.memory import NOWHERE, Memory, Parts, Position, Slot, forget_older, newest_in


def parts(**values: object) -> Parts:
    made: dict[str, tuple[bytes, Sequence[pickle.PickleBuffer]]] = {}
    for name, value in values.items():
        buffers: list[pickle.PickleBuffer] = []
        made[name] = pickle.dumps(value, 5, buffer_callback=buffers.append), buffers
    return made


def write(memory: Memory, position: Position, **values: object) -> Slot:
    slot = memory.next
    slot.write(position, parts(**values))
    return slot


def loaded(slot: Slot | None) -> dict[str, object]:
    assert slot is not None
    return slot.load()


@pytest.fixture(params=["private", "files"])
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> Memory:
    return Memory(tmp_path if request.param == "files" else None, 0, 0)


def test_what_is_written_is_read(memory: Memory) -> None:
    assert memory.newest is None
    values = {
        "numbers": np.arange(1000.0),
        "transposed": np.arange(6).reshape(2, 3).T,
        "empty": np.zeros((0, 3)),
        "several": [np.ones(3, np.int8), "text", np.ones(65, np.int8)],
    }
    write(memory, (0, 1, 2), **values)
    assert memory.newest is not None
    assert memory.newest.position == (0, 1, 2)
    first, second = loaded(memory.newest), loaded(memory.newest)
    for name, value in values.items():
        np.testing.assert_equal(first[name], value)
    array = first["numbers"]
    assert isinstance(array, np.ndarray)
    array[:] = 0
    np.testing.assert_equal(second["numbers"], values["numbers"])


def test_slots_take_turns_also_where_nothing_has_happened_in_between(memory: Memory) -> None:
    slots = [write(memory, (0, 1, 7), value=number) for number in range(5)]
    assert slots[0] is slots[2] is slots[4]
    assert slots[1] is slots[3] is not slots[0]
    assert loaded(memory.newest) == {"value": 4}
    assert loaded(slots[3]) == {"value": 3}


def test_a_state_may_grow_and_shrink(memory: Memory) -> None:
    for number, length in enumerate([10, 100_000, 5, 200_000, 0]):
        write(memory, (0, 1, number), values=np.full(length, number))
        np.testing.assert_equal(loaded(memory.newest), {"values": np.full(length, number)})


def test_a_torn_write_is_not_taken(memory: Memory, tmp_path: Path) -> None:
    write(memory, (0, 1, 1), value=1)
    write(memory, (0, 1, 2), value=2)
    write(memory, (0, 1, 3), value=3)
    memory.next.room(100, 1_000_000)[:] = 1  # in place of the second one
    assert loaded(memory.newest) == {"value": 3}
    if any(tmp_path.iterdir()):
        assert loaded(newest_in(tmp_path, 0)) == {"value": 3}


def test_other_processes_find_the_furthest_one(tmp_path: Path) -> None:
    assert newest_in(None, 0) is None
    assert newest_in(tmp_path, 0) is None
    (tmp_path / "0-empty.state").touch()
    (tmp_path / "0-torn.state").write_bytes(bytes(4096))
    (tmp_path / "other").write_bytes(b"x" * 4096)
    write(Memory(tmp_path, 2, 0), NOWHERE, value="before the first sync")
    assert newest_in(tmp_path, 0) is None
    positions = [(0, 2, 9), (1, 2, 3), (0, 30, 1), (1, 2, 2)]
    for position in positions:
        write(Memory(tmp_path, position[0], 0), position, value=position)
    assert loaded(newest_in(tmp_path, 0)) == {"value": (1, 2, 3)}


def test_files_of_earlier_starts_are_given_back(tmp_path: Path) -> None:
    first, tenth = Memory(tmp_path, 0, 0), Memory(tmp_path, 10, 0)
    write(first, (0, 1, 1), value=1)
    write(first, (0, 1, 2), value=2)
    write(tenth, (10, 1, 1), value=3)
    forget_older(None, 10, 0)
    forget_older(tmp_path, 0, 0)
    assert len(list(tmp_path.iterdir())) == 3
    forget_older(tmp_path, 9, 0)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("10-")
    assert loaded(first.newest) == {"value": 2}, "the process that has it goes on with it"


def test_a_state_is_taken_over_without_a_copy_and_not_written_to(tmp_path: Path) -> None:
    write(Memory(tmp_path, 0, 0), (0, 1, 1), value="left")
    later = [Memory(tmp_path, 1, 0) for _ in range(2)]
    for memory in [*later, later[0], later[0]]:  # the first of them had to begin again, twice
        left = newest_in(tmp_path, 0)
        assert left is not None
        memory.next.take_over(left)
    own = later[0].next
    own.take_over(own)  # what a process finds may be its own
    assert {path.stat().st_ino for path in tmp_path.iterdir()} == {next(tmp_path.iterdir()).stat().st_ino}
    forget_older(tmp_path, 1, 0)
    assert all(path.name.startswith("1-") for path in tmp_path.iterdir())
    for value in range(3):
        write(later[0], (1, 1, value), value=value)
    assert loaded(later[0].newest) == {"value": 2}
    assert loaded(later[1].newest) == {"value": "left"}


def test_files_are_for_this_user_alone(tmp_path: Path) -> None:
    write(Memory(tmp_path, 0, 0), (0, 1, 1), value=1)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o077 == 0


def test_a_state_without_room_is_refused_and_the_last_one_stays(tmp_path: Path) -> None:
    memory = Memory(tmp_path, 0, 0)
    write(memory, (0, 1, 1), value=1)
    with pytest.raises(OSError, match=r"a state of \d+ bytes is kept twice by each rank.*more room"):
        memory.next.room(100, 2**60)
    assert loaded(memory.newest) == {"value": 1}
    write(memory, (0, 1, 2), value=2)
    assert loaded(newest_in(tmp_path, 0)) == {"value": 2}
