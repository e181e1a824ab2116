"""The duplicates of communicators that horovodish works on, kept from one `init()` to the next."""

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from horovodish import _native
from horovodish.mpi import binding, late_ranks
from horovodish.settings import Settings

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["Communicator", "last", "of"]


@dataclass
class Communicator:
    """Duplicates of a communicator, kept for the next `init()` on the same one.

    Attributes:
        engine: the engine's alone: it has receives posted there at any time.
        control: for what Python does at start-up and with process sets.
        generation: how often an engine was started on it before.
        start_timeout_seconds: the setting of the last engine on it.
    """

    engine: "Intracomm"
    control: "Intracomm"
    generation: int = -1
    start_timeout_seconds: int = Settings.start_timeout_seconds

    @property
    def is_used_up(self) -> bool:
        """True if all tags are used: the next start would read stale messages of the first start as its own."""
        return self.generation + 1 == _native.GENERATIONS


_by_ranks: dict[tuple[int, ...], Communicator] = {}
_attribute: int | None = None  # under which any other communicator holds its Communicator
_last: Communicator | None = None


def of(comm: "Intracomm | Iterable[int] | None") -> Communicator:
    """The duplicates of `comm`, to be used for one more `init()`. Every rank of it must call this; blocks.

    Args:
        comm: None for all ranks, ranks of MPI's world, or a communicator.

    Raises:
        LaunchError: no MPI, or a launcher of another MPI than mpi4py's.
        ValueError: the ranks are none, repeat a rank, or lack the calling rank.
        TypeError: `comm` is something else.
    """
    ranks = None if comm is None or hasattr(comm, "Get_attr") else _ranks(comm)
    library = binding.load()
    binding.check_pairing(library)
    with late_ranks.reported("another rank, which has not called init() yet, has failed, or is stopped"):
        return _used_once_more(_kept(library, comm, ranks))


def _kept(library: Any, comm: "Intracomm | Iterable[int] | None", ranks: tuple[int, ...] | None) -> Communicator:
    world = library.COMM_WORLD
    if ranks is not None:
        own = world.Get_rank()
        if own not in ranks or len(set(ranks)) < len(ranks):
            raise ValueError(
                f"init(comm={comm}) on rank {own}: the list must name every rank once, and only these ranks may call it"
            )
        return _of_ranks(library, ranks)
    return _of_communicator(library, world if comm is None else cast("Intracomm", comm))


def last() -> Communicator | None:
    """The communicator of the last `init()` under MPI."""
    return _last


def _ranks(comm: Any) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, comm))
    except TypeError:
        raise TypeError(
            f"init(comm={comm!r}): comm is None for all ranks, ranks such as [0, 1], or an mpi4py communicator"
        ) from None


def _of_ranks(library: Any, ranks: tuple[int, ...]) -> Communicator:
    if ranks not in _by_ranks or _by_ranks[ranks].is_used_up:
        world = library.COMM_WORLD
        group = world.Get_group().Incl(ranks)
        if binding.tolerates_faults():  # Open MPI makes no communicator from a world that has a rank known to be dead
            comm = library.Intracomm.Create_from_group(group, f"horovodish {ranks}")
        else:
            comm = world.Create_group(group)
        _by_ranks[ranks] = Communicator(binding.private(comm), binding.private(comm))
    return _by_ranks[ranks]


def _of_communicator(library: Any, comm: "Intracomm") -> Communicator:
    """Kept by the communicator itself: when the user frees it, another one may get the same handle."""
    global _attribute
    if _attribute is None:
        _attribute = library.Comm.Create_keyval()
    kept = cast("Communicator | None", comm.Get_attr(_attribute))
    if kept is None or kept.is_used_up:
        comm.Set_attr(_attribute, Communicator(binding.private(comm), binding.private(comm)))
    return cast(Communicator, comm.Get_attr(_attribute))


def _used_once_more(communicator: Communicator) -> Communicator:
    global _last
    communicator.generation += 1
    _last = communicator
    return communicator
