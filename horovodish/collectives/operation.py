"""A rank's requests to the engine: an operation on tensors, and the family that it belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from horovodish.collectives.process_sets import ProcessSet, global_process_set
from horovodish.collectives.reduce_ops import ReduceOp

__all__ = ["Codec", "Family", "Member", "Operation", "codec_of", "text_of"]

Member = tuple[int, int, int, tuple[int, ...]]
"""A tensor as the engine takes it: the address of its input, the address of its output (the same in place, 0 where the
engine allocates it), its dtype (a value of `_native.DTYPES`) and its shape."""


class Codec(NamedTuple):
    """The encoding of floating-point values between hosts.

    Attributes:
        kind: a value of `_native.CODECS`.
        share: the fraction of the values that travel, for the codecs that leave some out.
        error_feedback: this rank adds the encoding error to the next values that it encodes of the same tensor.
        start: how many uses of each tensor's name come before the first one that is encoded.
        owner: of the tensors, where another owner may have tensors of the same names.
        encodes: False where an optimizer with this codec sends the tensor as it is.
    """

    kind: int
    share: float
    error_feedback: bool
    start: int
    owner: str = ""
    encodes: bool = True


def text_of(codec: Codec | None) -> str:
    """A codec as the engine and the attributes of graphs have it; empty for None."""
    if codec is None:
        return ""
    kind, share, error_feedback, start, owner, encodes = codec
    return f"{kind} {float(share)!r} {int(error_feedback)} {start} {int(encodes)} {owner}"


def codec_of(text: str) -> Codec | None:
    """The opposite of `text_of`."""
    if not text:
        return None
    kind, share, error_feedback, start, encodes, owner = text.split(" ", 5)
    return Codec(int(kind), float(share), error_feedback == "1", int(start), owner, encodes == "1")


class Family(NamedTuple):
    """Operations that belong together, such as the buckets of a tree: where the ranks disagree about one, all fail.

    Attributes:
        name: of all of it.
        members: how many tensors there are in all its operations.
        structure: a digest, 64 bits signed, of what must be equal on every rank.
        run: tells the uses of this rank apart; 0 in a compiled program, which numbers its runs by itself.
    """

    name: str
    members: int
    structure: int
    run: int = 0


class Operation(NamedTuple):
    """A collective, a send or a receive: everything but the tensors, from its caller to the engine.

    Apart from `splits` and the run of the family a collective is the same on every rank. A caller may leave out the
    name, the op and the splits; `Adapter.start` fills them in and checks all attributes.

    Attributes:
        kind: a key of `_native.KINDS`.
        name: None: counted.
        process_set: the ranks that take part.
        op, average, prescale_factor, postscale_factor: of a reduction, as for `horovodish.allreduce`.
        root_rank: of a broadcast; of a send or a receive, the other rank.
        splits: of an alltoall, how many rows go to each rank; None: as many to each.
        in_place: the results are written into the tensors.
        member_names: what messages call each tensor; `name` and a number when not given.
        family: the group of operations that this one belongs to; None where it stands alone.
        by_elements: of an allgather or a reducescatter: a rank's part is a range of elements at its place in the whole
            tensor, cut as evenly as possible. Both addresses of a member point to the whole tensor; only the elements
            that a rank has are read, and only the elements that it gets are written. Otherwise parts are rows.
        ends: where each rank's part of the elements ends, if the parts are not even. All members have one dtype.
        tag: of a send or a receive; the two that belong together have the same.
        codec: of an allreduce by Sum or Average; None: values travel as they are.
        function: of the caller, if several of its functions make operations of this kind. The ranks must agree on it.
    """

    kind: str
    name: str | None = None
    process_set: ProcessSet = global_process_set
    op: ReduceOp | None = None
    average: bool | None = None
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    root_rank: int = 0
    splits: Any = None
    in_place: bool = False
    member_names: Sequence[str] = ()
    family: Family | None = None
    by_elements: bool = False
    ends: tuple[int, ...] = ()
    tag: int = 0
    codec: Codec | None = None
    function: str = ""
