"""Names that Horovod has and horovodish has not: what takes their place, for the error that says so."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["error"]

_INSTEAD = {
    "elastic": "elastic training is not there yet; after the loss of a rank, "
    "horovodish.surviving_communicator() lets the others go on",
    "mpi_ops": "its functions are those of this module",
    "check_extension": "nothing is compiled for a framework, so there is nothing to check",
}


def error(module: str, name: str, instead: Mapping[str, str] | None = None) -> AttributeError:
    """What a module raises that lacks a name.

    Args:
        module: its name.
        name: what was asked for.
        instead: what takes the place of names that Horovod has in this module alone.
    """
    remedy = {**_INSTEAD, **(instead or {})}.get(name)
    # Python itself adds the name, and then asks whether another one was meant.
    return AttributeError(f"module {module!r} has no attribute {name!r}" + (f": {remedy}" if remedy else ""))
