"""broadcast_object and allgather_object: whatever pickle or cloudpickle carries, from every root, over both planes."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest

import horovodish as hvd
from support.expect import the_engine_goes_on
from support.model import PLANES
from support.on_ranks import on_ranks


@dataclass
class State:
    epoch: int
    weights: list[float]


def objects(rank: int) -> list[Any]:
    return [
        None,
        rank,
        f"rank {rank} " + "ä" * rank,
        b"",
        {"rank": rank, "nested": [{"deep": (rank, None)}]},
        State(rank, [0.5 * rank] * 3),
        os.urandom if rank % 2 else len,
        "x" * (rank * 700_000),  # nothing on rank 0, more than a chunk on the others
    ]


@on_ranks(1, 3, 4, planes=PLANES)
def test_broadcast_from_every_root() -> None:
    own = hvd.rank()
    for root in range(hvd.size()):
        for mine, theirs in zip(objects(own), objects(root), strict=True):
            received = hvd.broadcast_object(mine, root_rank=root)
            assert received == theirs
            assert own != root or received is mine


@on_ranks(1, 3, 4, planes=PLANES)
def test_allgather() -> None:
    own, size = hvd.rank(), hvd.size()
    for turn, mine in enumerate(objects(own)):
        gathered = hvd.allgather_object(mine, name=f"turn {turn}")
        assert gathered == [objects(rank)[turn] for rank in range(size)]
    arrays = hvd.allgather_object(np.arange(own))
    assert [array.tolist() for array in arrays] == [list(range(rank)) for rank in range(size)]


@on_ranks(1, 3, 4, planes=PLANES)
def test_what_is_given_is_copied() -> None:
    mine = [hvd.rank()]
    gathered = hvd.allgather_object(mine)
    gathered[hvd.rank()].append("changed")
    assert mine == [hvd.rank()]


@on_ranks(1, 3, 4, planes=PLANES)
def test_what_only_cloudpickle_carries() -> None:
    own, size = hvd.rank(), hvd.size()

    class Local:
        rank = own

    functions = hvd.allgather_object(lambda: own)
    assert [function() for function in functions] == list(range(size))
    assert hvd.broadcast_object(Local() if own == 0 else None).rank == 0
    assert [local.rank for local in hvd.allgather_object(Local)] == list(range(size))


@on_ranks(1, 3, 4, planes=PLANES)
def test_only_the_root_needs_an_object() -> None:
    """On the other ranks it may be left out, or be something that cannot be pickled."""
    assert hvd.broadcast_object("from 0" if hvd.rank() == 0 else lambda: None) == "from 0"
    assert hvd.broadcast_object("named" if hvd.rank() == 0 else None, 0, name="a name") == "named"


@on_ranks(3, 4, planes=PLANES)
def test_process_sets() -> None:
    evens = hvd.add_process_set(range(0, hvd.size(), 2))
    if evens.included():
        assert hvd.allgather_object(hvd.rank(), process_set=evens) == evens.ranks
        root = evens.ranks[-1]
        mine = {"root": hvd.rank()}
        assert hvd.broadcast_object(mine, root_rank=root, process_set=evens) == {"root": root}
        with pytest.raises(ValueError, match=r"root_rank=1 is not in the process set of ranks \[0"):
            hvd.broadcast_object(mine, root_rank=1, process_set=evens)
    else:
        for call in (hvd.allgather_object, hvd.broadcast_object):
            with pytest.raises(ValueError, match=f"rank {hvd.rank()} is not in process set"):
                call(None, process_set=evens)
    assert hvd.remove_process_set(evens)


@on_ranks(1, 3, 4, planes=PLANES)
def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=f"root_rank={hvd.size()} does not exist"):
        hvd.broadcast_object(1, root_rank=hvd.size())
    with pytest.raises(TypeError, match=r"cannot pickle '_thread.lock' object"):
        hvd.allgather_object(threading.Lock())
    needed = pytest.raises(pickle.PicklingError, match=r"lambda.*pip install cloudpickle")
    with mock.patch.dict(sys.modules, {"cloudpickle": None}), needed:
        hvd.allgather_object(lambda: None)
    the_engine_goes_on()


class ReadOnOneRankAlone:
    def __reduce__(self) -> Any:
        return fail_on_the_last_rank, ()


class WrittenNowhere:
    def __reduce__(self) -> Any:
        raise ModuleNotFoundError("no module named 'absent'")


def fail_on_the_last_rank() -> str:
    if hvd.rank() == hvd.size() - 1:
        raise ModuleNotFoundError("no module named 'absent'")
    return "read"


@on_ranks(3)
def test_an_object_that_one_rank_cannot_read_or_write() -> None:
    """Every rank raises, also when the calls have names, and goes on."""
    last, size = hvd.size() - 1, hvd.size()
    for named in (True, False, True):
        for name, call in [
            ("read one", lambda name: hvd.broadcast_object(ReadOnOneRankAlone(), name=name)),
            ("read all", lambda name: hvd.allgather_object(ReadOnOneRankAlone() if hvd.rank() == 1 else 0, name=name)),
            ("write one", lambda name: hvd.broadcast_object(WrittenNowhere(), last, name=name)),
            ("write all", lambda name: hvd.allgather_object(WrittenNowhere() if hvd.rank() == last else 0, name=name)),
        ]:
            error = ModuleNotFoundError if hvd.rank() == last else hvd.MismatchError
            with pytest.raises(error, match="no module named 'absent'"):
                call(name if named else None)
    the_engine_goes_on()
    assert hvd.allgather_object(1) == [1] * size
