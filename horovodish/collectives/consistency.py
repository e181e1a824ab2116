"""Whether ranks hold the same values: checksums of them, and what to say where they differ."""

from __future__ import annotations

import re
import types
import zlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from horovodish import _native
from horovodish.collectives import comparison
from horovodish.collectives.process_sets import ProcessSet, checked_id
from horovodish.collectives.submission import Handle, gather_objects_async
from horovodish.launch import failures
from horovodish.runtime import basics
from horovodish.runtime.process import part

__all__ = [
    "Checksums",
    "are_equal",
    "checksum_of",
    "checksum_of_object",
    "details",
    "difference",
    "is_due",
    "summands",
    "warn_of_difference",
    "without_addresses",
]

Checksums = dict[str, tuple[str, int]]
"""By the name of a value, what it is, such as its dtype and shape, and a checksum."""

_WORD_BITS = 24
FIRST_APART = 4
"""From this step on, parameters that differ are taken for parted: those that differ when training begins were found."""
_APART = (
    "every rank must take the same steps with the same learning rates and optimizer state, and what one rank loads or "
    "sets must be broadcast. If each rank is to have its own parameters, ignore this warning. Processors of different "
    "kinds may also round in different ways"
)


def is_due(reduction: int, first: int) -> bool:
    """Whether ranks compare their parameters at a reduction: at the `first`, then as `compares_at` says."""
    return reduction == first or (reduction > first and _native.compares_at(reduction))


def summands(checksums: Checksums) -> list[int]:
    """Return the numbers that ranks add up for `are_equal()`. The sums fit 64 bits for up to 32768 ranks.

    Sums tell whether numbers x are equal on n ranks, because n times the sum of x^2 is the square of the sum of x only
    then. Names do not count: Keras numbers its layers on each rank.
    """
    total = zlib.crc32(repr([*checksums.values()]).encode())
    words = total >> _WORD_BITS, total & ((1 << _WORD_BITS) - 1)
    return [number for word in words for number in (word, word * word)]


def are_equal(sums: Sequence[int], ranks: int) -> bool:
    """Whether the ranks had equal checksums.

    Args:
        sums: over the ranks, of what `summands()` has given.
        ranks: how many have taken part.
    """
    return all(ranks * squares == total * total for total, squares in zip(sums[::2], sums[1::2], strict=True))


def checksum_of(array: np.ndarray) -> tuple[str, int]:
    """A description of an array, and a checksum of its bytes."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return f"{array.dtype} of shape {array.shape}", zlib.crc32(data)


def checksum_of_object(
    value: Any, of_tensor: Callable[[Any], int | None], known: dict[int, tuple[Any, int]] | None = None
) -> int:
    """A checksum of what an object holds, as pickle sees it. Its own `repr()` may leave values out.

    The order of sets and dicts does not count: a set of strings has another order in each process.

    Args:
        value: anything. Functions, classes, modules and objects that cannot be pickled count by their `repr()`, without
            addresses.
        of_tensor: gives the checksum of a framework's tensor, and None for any other object.
        known: of a recursive call: by id, the objects that were visited and their checksums.
    """
    known = {} if known is None else known
    if id(value) not in known:
        known[id(value)] = value, 0  # for an object that holds itself; keeps the object, so that its id stays in use
        checksum = of_tensor(value)
        if checksum is None:
            checksum = zlib.crc32(repr(_held(value, lambda part: checksum_of_object(part, of_tensor, known))).encode())
        known[id(value)] = value, checksum
    return known[id(value)][1]


def _held(value: Any, checksum: Callable[[Any], int]) -> Any:
    """What an object holds, as text, numbers and nested tuples and lists of them."""
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        # An object in an array counts by its value, since its bytes are an address.
        return (
            (str(array.dtype), array.shape, checksum(array.tolist())) if array.dtype.hasobject else checksum_of(array)
        )
    if isinstance(value, set | frozenset):
        return sorted(map(checksum, value))
    if isinstance(value, dict):
        return sorted((checksum(key), checksum(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return [*map(checksum, value)]
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return repr(value)
    if not isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.ModuleType):
        try:
            reduced = value.__reduce_ex__(2)
        except Exception:  # it says in its own way that it cannot be pickled
            return without_addresses(value)
        if isinstance(reduced, str):
            return reduced
        function, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        return [*map(checksum, (function, arguments, state, list(items or ()), dict(pairs or ())))]
    return without_addresses(value)


def without_addresses(value: Any) -> str:
    """The `repr()` of a value without addresses, which differ by process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def details(own: Checksums, gradients: str, process_set: ProcessSet) -> Handle[dict[int, Checksums]]:
    """The checksums of all ranks, by index in the set. Collective; does not block.

    Call it on all ranks once they know that their checksums differ.

    Args:
        own: of this rank's parameters.
        gradients: the name of the reduction that is about to start, the same on every rank.
        process_set: the ranks that reduce.
    """
    return gather_objects_async(own, f"{gradients}: checksums of the parameters, which differ", checked_id(process_set))


def warn_of_difference(
    of_places: dict[int, Checksums],
    gradients: str,
    process_set: ProcessSet,
    remedy: str,
    place: failures.Place | None = None,
    step: int = 1,
) -> None:
    """Warn, on the first rank and once for these gradients, that parameters differ. Not collective.

    Args:
        of_places: what `details()` gives.
        gradients, process_set: as for `details()`.
        remedy: what to do if they differ when training begins.
        place: the line of the script that trains; None: the one that has called.
        step: at which they have compared. After the first comparison, at least `FIRST_APART`.
    """
    members, warned = process_set.ranks, part(_Warned).sets
    key = process_set.process_set_id, gradients
    if basics.rank() != members[0] or key in warned:
        return
    of_ranks = {members[place]: checksums for place, checksums in of_places.items()}
    of_ranks = _named_alike(of_ranks)
    common = set[str].intersection(*map(set, of_ranks.values()))
    if step >= FIRST_APART and common:  # which are there on some rank only may be that rank's own
        of_ranks = {rank: {name: sums[name] for name in sums if name in common} for rank, sums in of_ranks.items()}
        if len({*map(str, of_ranks.values())}) == 1:
            return
    (first, ours), *others = ((rank, _kinds(checksums)) for rank, checksums in of_ranks.items())
    for rank, theirs in others:
        if theirs != ours:
            found = comparison.difference(ours, theirs, first, rank)
            warned.add(key)
            failures.warn(f"the ranks' models differ: {found}. Remedy: {comparison.SAME_MODEL}", place)
            return
    warned.add(key)
    found = difference(of_ranks)
    if step < FIRST_APART:
        remedy += ", and after all that loads or sets parameters"
        failures.warn(f"the ranks begin to train with different parameters: {found} Remedy: {remedy}", place)
    else:
        failures.warn(f"the ranks train different parameters at step {step}: {found} Remedy: {_APART}", place)


class _Warned:
    """Attributes:
    sets: a process set and what was reduced in it, for each warning since the last `init()`.
    """

    def __init__(self) -> None:
        self.sets: set[Hashable] = set()


basics.follow(stopped=lambda: part(_Warned).sets.clear())


def _kinds(checksums: Checksums) -> list[comparison.Named]:
    return [comparison.Named(kind, name) for name, (kind, _) in checksums.items()]


def _named_alike(of_ranks: dict[int, Checksums]) -> dict[int, Checksums]:
    """The checksums under the names that the first rank has, if the ranks have the same model under other names.

    Keras numbers the layers of a process, so the first layer of one rank may have the name of another's second layer.
    """
    models = [[kind for kind, _ in checksums.values()] for checksums in of_ranks.values()]
    names = {frozenset(checksums) for checksums in of_ranks.values()}
    if len(names) == 1 or any(model != models[0] for model in models):
        return of_ranks
    first = next(iter(of_ranks.values()))
    return {rank: dict(zip(first, checksums.values(), strict=True)) for rank, checksums in of_ranks.items()}


def difference(of_ranks: dict[int, Checksums]) -> str:
    """The first value that differs, which ranks have which value, and how many more differ.

    Args:
        of_ranks: by rank. Not all of them are equal.
    """
    everything = dict.fromkeys(name for checksums in of_ranks.values() for name in checksums)
    different = [name for name in everything if len({checksums.get(name) for checksums in of_ranks.values()}) > 1]
    if not different:
        return "they have the same tensors in another order."
    first = different[0]
    holders: dict[tuple[str, int] | None, list[int]] = defaultdict(list)
    for rank, checksums in of_ranks.items():
        holders[checksums.get(first)].append(rank)
    values = "; ".join(f"{_ranks(those)} {_value(value)}" for value, those in holders.items())
    more = f" {len(different) - 1} more differ." if len(different) > 1 else ""
    return f"{first} differs: {values}.{more}"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"


def _value(value: tuple[str, int] | None) -> str:
    return "none of it" if value is None else f"{value[0]} with checksum {value[1]:08x}"
