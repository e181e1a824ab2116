"""Which elements of an optimizer's parameters each rank steps, where the ranks share the optimizer's state (ZeRO).

The gradients of a bucket are reduce-scattered by elements, each rank steps its part, and the parts of the parameters
are all-gathered. So as many bytes travel as in an all-reduce.

Source: Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models", 2020.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["CUTS", "WAYS", "checked_cut", "checked_way", "own_parts", "owned_ends", "owners"]

WAYS = ("", "states", "gradients")
CUTS = ("element", "parameter")


def checked_way(shard: str) -> str:
    """Check `shard=`: the kind of state that the ranks shard.

    Raises:
        ValueError: it is none of the known words.
    """
    if shard not in WAYS:
        raise ValueError(f'shard={shard!r} is not known. Remedy: "states", "gradients", or leave it out')
    return shard


def checked_cut(shard_by: str) -> str:
    """How the ranks share out what they shard.

    Raises:
        ValueError: it is none of the known words.
    """
    if shard_by not in CUTS:
        raise ValueError(f'shard_by={shard_by!r} is not known. Remedy: "element", the default, or "parameter"')
    return shard_by


def owners(counts: Sequence[int], loads: list[int]) -> list[int]:
    """The rank that gets each parameter as a whole: the largest goes first, to the rank that has the least.

    Args:
        counts: the elements of each parameter.
        loads: the elements that each rank has. What it gets is added.

    Example:
        >>> owners([3, 5, 2], loads=[0, 0])
        [1, 0, 1]
    """
    found = [0] * len(counts)
    for index in sorted(range(len(counts)), key=lambda each: (-counts[each], each)):
        found[index] = loads.index(min(loads))
        loads[found[index]] += counts[index]
    return found


def owned_ends(counts: Sequence[int], owned_by: Sequence[int], ranks: int) -> list[int]:
    """Where each rank's part of a bucket ends, whose tensors are in the order of the ranks that own them. Pure."""
    owned = list(zip(counts, owned_by, strict=True))
    return [sum(count for count, owner in owned if owner <= rank) for rank in range(ranks)]


def own_parts(counts: Sequence[int], place: int, ranks: int, ends: Sequence[int] = ()) -> list[tuple[int, int]]:
    """The part of each tensor of a bucket that a rank has, as the engine cuts them. Pure.

    Args:
        counts: the elements of each tensor. All are of one dtype.
        place: the number of the rank among those that reduce.
        ranks: how many these are.
        ends: where each rank's part of the bucket ends. Empty: the parts are as even as possible.

    Returns:
        Where the part begins and ends in each tensor, in elements. It may be empty.

    Example:
        >>> own_parts([3, 5, 2], place=1, ranks=2)
        [(3, 3), (2, 5), (0, 2)]
    """
    total = sum(counts)
    ends = ends or [total // ranks * each + total % ranks * each // ranks for each in range(1, ranks + 1)]
    begin, end = (0, *ends)[place : place + 2]
    parts, at = [], 0
    for count in counts:
        parts.append((min(max(begin - at, 0), count), max(min(end - at, count), 0)))
        at += count
    return parts
