"""Which gradients are reduced together: the plan of the buckets. Pure; every rank computes the same plan."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

__all__ = ["FIRST_BUCKET_BYTES", "plan_buckets"]

FIRST_BUCKET_BYTES = 2**20
"""The bucket that is complete first is kept small, so that reduction starts early in the backward pass."""


def plan_buckets(
    sizes_bytes: Sequence[int],
    dtypes: Sequence[Hashable],
    threshold_bytes: int,
    first_bytes: int = FIRST_BUCKET_BYTES,
    groups: Sequence[Hashable | None] | None = None,
) -> list[int]:
    """Put tensors into buckets, each of which is negotiated and reduced as a unit. Not collective.

    A bucket holds tensors of one dtype and is filled in the order given, up to `threshold_bytes`; the one that is
    opened first, up to `first_bytes` if that is less. A tensor of `threshold_bytes` or more travels alone, and the
    tensors around it still share a bucket. With a threshold of 0 every tensor travels alone. The tensors of a group are
    a bucket of their own, whatever their sizes and dtypes.

    Args:
        sizes_bytes: the size of each tensor, in the order in which the tensors are expected to be ready.
        dtypes: the dtype of each tensor; only equality counts.
        threshold_bytes: the most that several tensors may have together.
        first_bytes: the same for the first bucket.
        groups: the group of each tensor, None where it has none; None when there are no groups.

    Returns:
        For each tensor the number of its bucket. Buckets are numbered from 0 in the order in which they are complete.

    Raises:
        ValueError: there are not as many sizes as dtypes or groups.

    Example:
        >>> plan_buckets([4, 4, 4, 100, 4], ["float32"] * 5, threshold_bytes=10, first_bytes=4)
        [0, 1, 1, 2, 3]
    """
    open_buckets: dict[Hashable, _Bucket] = {}
    buckets: list[_Bucket] = []
    groups = [None] * len(sizes_bytes) if groups is None else groups
    grouped: dict[Hashable, _Bucket] = {}
    for index, (size, dtype, group) in enumerate(zip(sizes_bytes, dtypes, groups, strict=True)):
        if group is not None:
            if group not in grouped:
                grouped[group] = _Bucket(threshold_bytes)
                buckets.append(grouped[group])
            grouped[group].members.append(index)
            continue
        bucket = open_buckets.get(dtype)
        alone = size >= threshold_bytes
        if bucket is None or alone or bucket.size_bytes + size > bucket.limit_bytes:
            bucket = _Bucket(threshold_bytes if buckets else min(first_bytes, threshold_bytes))
            buckets.append(bucket)
            if not alone:
                open_buckets[dtype] = bucket
        bucket.members.append(index)
        bucket.size_bytes += size
    numbers = [0] * len(sizes_bytes)
    for number, bucket in enumerate(sorted(buckets, key=lambda bucket: bucket.members[-1])):
        for index in bucket.members:
            numbers[index] = number
    return numbers


class _Bucket:
    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self.members: list[int] = []
