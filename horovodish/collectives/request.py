"""An operation as the engine takes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from horovodish.collectives.reduce_ops import ReduceOp, Sum

__all__ = ["Family", "Member", "Request"]

Member = tuple[int, int, int, tuple[int, ...]]
"""A tensor as the engine takes it: the address of its input, the address of its output (the same in place, 0 where the
engine allocates it), its dtype (a value of `_native.DTYPES`) and its shape."""


class Family(NamedTuple):
    """What operations belong to together, as the buckets of a tree do: where the ranks disagree about one, all fail.

    Attributes:
        name: of all of it.
        members: how many tensors there are in all its operations.
        structure: a digest, 64 bits signed, of what must be equal on every rank.
        run: tells the uses of this rank apart.
    """

    name: str
    members: int
    structure: int
    run: int


class Request(NamedTuple):
    """An operation as the engine takes it. Apart from `splits` and the run of the family it is the same on every rank.

    Attributes:
        kind: a key of `_native.KINDS`.
        name: the operation's name.
        process_set_id: of the process set, which contains this rank.
        op: how to reduce.
        prescale_factor: multiplies each input of a reduction.
        postscale_factor: multiplies its result.
        root_rank: whose value a broadcast sends.
        splits: of an alltoall, how many rows go to each rank.
        member_names: what messages call each tensor; `name` and a number when not given.
        family: what the operation is a part of; None where it stands alone.
    """

    kind: str
    name: str
    process_set_id: int = 0
    op: ReduceOp = Sum
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    root_rank: int = 0
    splits: Sequence[int] = ()
    member_names: Sequence[str] = ()
    family: Family | None = None
