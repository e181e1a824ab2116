"""The meeting of the ranks of a host, with a peer that is gone before it has begun."""

from __future__ import annotations

import socket

import pytest

from horovodish.errors import LaunchError
from horovodish.local_peers import connect


class WithAPeerThatLeaves:
    """Stands for the communicator of two ranks, of which the other one connects and dies."""

    def Get_rank(self) -> int:  # noqa: N802, mpi4py's name
        return 0

    def Get_size(self) -> int:  # noqa: N802, mpi4py's name
        return 2

    def allgather(self, address: bytes) -> list[bytes]:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(address)
        return [address, b""]


def test_a_peer_that_leaves_at_once() -> None:
    with pytest.raises(LaunchError, match=r"local rank 0 could not exchange memory .* a rank left before it had said"):
        connect(WithAPeerThatLeaves(), 4096, timeout_seconds=5)
