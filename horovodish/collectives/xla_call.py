"""An operation of a program that XLA compiles, as the engine reads it: `hand_over()` in `csrc/xla/xla_call.cc`."""

from __future__ import annotations

from horovodish import _native
from horovodish.collectives.operation import Family, Operation, text_of
from horovodish.collectives.process_sets import checked_id
from horovodish.collectives.reduce_ops import Sum
from horovodish.runtime import basics

_NO_FAMILY = Family("", 0, 0)


def start_attributes(
    operation: Operation, horovods_gradients: bool | None, follows: int = 0
) -> dict[str, int | float | str]:
    """The attributes of the call that begins an operation, but for its place in the program.

    Args:
        operation: with its name and the names of its members.
        horovods_gradients: for a gradient, what it was computed for, see `derivatives`; None for other operations.
        follows: how many operands of the call, behind the members, only have to be computed before it.

    Raises:
        ValueError: this rank is not in the process set, or the set is not in use.
    """
    family = operation.family or _NO_FAMILY
    return {
        "kind": _native.KINDS[operation.kind],
        "op": int(Sum if operation.op is None else operation.op),
        "root": int(operation.root_rank),
        "process_set": checked_id(operation.process_set),
        "rank": basics.rank(),
        "gradients": -1 if horovods_gradients is None else int(horovods_gradients),
        "ranks": ",".join(map(str, operation.process_set.ranks)),
        "prescale": float(operation.prescale_factor),
        "postscale": float(operation.postscale_factor),
        "by_elements": int(operation.by_elements),
        "ends": "".join(f"{end}\n" for end in operation.ends),
        "codec": text_of(operation.codec),
        "name": str(operation.name),
        "tree": family.name,
        "leaves": family.members,
        "structure": family.structure,
        "follows": follows,
        "members": "".join(f"{member}\n" for member in operation.member_names),
    }


def group_of(first: Operation) -> str:
    """An identifier, within the program, of operations that belong together; `first` is the first of them."""
    return f"{checked_id(first.process_set)} {first.name}"
