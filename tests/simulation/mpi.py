"""MPI of a simulated world: `mpi.cc` as a library, and its communicators."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulation.world import World

_HANDLES = 4096
"""A communicator's handle is its number times this plus the rank in it; see `mpi.cc`."""


@functools.cache
def simulated_mpi() -> tuple[ctypes.CDLL, str]:
    """The library, and its path."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "mpi.so")
        source = Path(__file__).with_name("mpi.cc")
        flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra"]
        subprocess.run(["g++", *flags, str(source), "-o", str(library)], check=True)
        loaded = ctypes.CDLL(str(library))
    loaded.simulated_communicator.argtypes = [ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int]
    return loaded, str(library)


class Communicator:
    """Some ranks of the world, as mpi4py's communicators and groups."""

    def __init__(self, world: World, ranks: Sequence[int], *key: Any):
        self.ranks, self.number = tuple(ranks), world.numbered((tuple(ranks), *key))
        self._world = world
        world.mpi.simulated_communicator(self.number, (ctypes.c_int * len(ranks))(*ranks), len(ranks))

    def Get_group(self) -> Communicator:
        return self

    def Incl(self, ranks: Sequence[int]) -> Communicator:
        return Communicator(self._world, [self.ranks[rank] for rank in ranks])

    def Create_group(self, group: Communicator, tag: int) -> Communicator:
        # A new one each time, in which nothing arrives that was sent in another one.
        own = self._world.acting()
        key = group.ranks, tag, own.world
        own.created[key] += 1
        return Communicator(self._world, *key, own.created[key])

    def Free(self) -> None:
        pass

    def private(self) -> Communicator:
        return Communicator(self._world, self.ranks, self.number)

    def native_table(self, generation: int) -> dict[str, Any]:
        rank = self._world.acting()
        return {
            "library": self._world.library,
            "comm": self.number * _HANDLES + self.ranks.index(rank.id),
            "byte": 0,
            "request_bytes": 8,
            "status_bytes": 8,
            "tolerates_faults": False,
            "generation": generation,
        }
