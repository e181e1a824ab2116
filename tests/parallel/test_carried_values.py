"""Small tensors: their values travel with the negotiation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import horovodish as hvd
from support.carried import the_second_time_gives_the_bits_of_the_first
from support.model import PLANES
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from support.traces import tracks_of


@on_ranks(2, 3, 10, planes=PLANES)
def test_the_bits_are_those_of_the_plane() -> None:
    the_second_time_gives_the_bits_of_the_first()


@on_ranks(3, planes=PLANES)
def test_they_change_from_call_to_call() -> None:
    for step in range(5):
        own = np.arange(6, dtype=np.float64) * (hvd.rank() + 1) + step
        assert hvd.allreduce_(own, name="x", op=hvd.Sum) is own
        np.testing.assert_array_equal(own, np.arange(6) * 6 + 3 * step)


@on_ranks(3, planes=PLANES)
def test_what_ranks_without_data_do_not_send() -> None:
    """A rank has joined, then none has, and the same tensor is cached throughout."""
    own = np.array(hvd.rank() + 1.0)
    for _ in range(2):
        assert hvd.allreduce(own, name="x", op=hvd.Sum) == 6
    for _ in range(2):
        if hvd.rank() != 1:
            for _ in range(2):
                assert hvd.allreduce(own, name="x", op=hvd.Sum) == 4
                assert hvd.broadcast(own, 2, "y") == 3
        hvd.join()
        assert hvd.allreduce(own, name="x", op=hvd.Sum) == 6


def reduce_small_and_large(path: str) -> None:
    hvd.init()
    hvd.start_timeline(path)
    for _ in range(2):
        hvd.allreduce(np.ones(4), name="small")
        hvd.allreduce(np.ones(100_000), name="large")
    hvd.stop_timeline()


@pytest.mark.parametrize("plane", PLANES)
def test_between_hosts_no_plane_takes_part(plane: str, tmp_path: Path) -> None:
    """With the plane of hosts, every rank counts as a host of its own."""
    run_ranks(reduce_small_and_large, 2, args=(str(tmp_path / "trace.json"),), env={"HOROVODISH_PLANE": plane})
    tracks = tracks_of(tmp_path / "trace.rank-0.json", 0)
    first, second = (slice_.phases() for slice_ in tracks["small"])
    assert "pack" in first
    assert ("pack" in second) == (plane == "auto")
    if plane != "auto":
        assert second == ["negotiate", "queue", "reduce"]
    assert all("pack" in slice_.phases() for slice_ in tracks["large"])
