"""The cores of the engine's threads, where the user has chosen them."""

import contextlib
import os
from collections.abc import Iterator

from horovodish.errors import SettingError
from horovodish.runtime.topology import Topology

__all__ = ["core_of", "new_threads_on"]


def core_of(topology: Topology, thread_affinity: str) -> int | None:
    """The core for the engine's threads on this rank; None: any.

    Args:
        topology: of this rank.
        thread_affinity: the setting of that name.

    Raises:
        SettingError: it has no core for every rank of a host, or one that this rank may not use.
    """
    if not thread_affinity or topology.size == 1:
        return None
    setting = f"HOROVODISH_THREAD_AFFINITY={thread_affinity!r}"
    cores, most = thread_affinity.split(","), max(map(len, topology.hosts))
    if len(cores) < most or not all(core.strip().isdecimal() for core in cores):
        raise SettingError(f"{setting} is not accepted: it is the numbers of {most} cores, one for each rank of a host")
    core, usable = int(cores[topology.local_rank]), os.sched_getaffinity(0)
    if core not in usable:
        names = ", ".join(map(str, sorted(usable)))
        raise SettingError(f"{setting} gives core {core} to rank {topology.rank}, which may use {names}")
    return core


@contextlib.contextmanager
def new_threads_on(core: int | None) -> Iterator[None]:
    """Threads that the calling thread starts meanwhile run on that core, because they inherit it. None: as they are."""
    if core is None:
        yield
        return
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, usable)
