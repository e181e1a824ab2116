"""The planner of the buckets, against what it promises."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovodish.fusion import plan_buckets

TENSORS = st.lists(st.tuples(st.integers(0, 40), st.sampled_from("fhi")), max_size=60)
THRESHOLD = st.integers(0, 100)
FIRST = st.integers(0, 100)


def planned(tensors, threshold, first):
    sizes = [size for size, _ in tensors]
    dtypes = [dtype for _, dtype in tensors]
    numbers = plan_buckets(sizes, dtypes, threshold, first)
    members = {number: [i for i, n in enumerate(numbers) if n == number] for number in sorted(set(numbers))}
    return sizes, dtypes, numbers, members


@given(TENSORS, THRESHOLD, FIRST)
def test_every_tensor_has_a_bucket_and_the_numbers_have_no_gap(tensors, threshold, first):
    _, _, numbers, members = planned(tensors, threshold, first)
    assert len(numbers) == len(tensors)
    assert list(members) == list(range(len(members)))


@given(TENSORS, THRESHOLD, FIRST)
def test_a_bucket_has_one_dtype(tensors, threshold, first):
    _, dtypes, _, members = planned(tensors, threshold, first)
    assert all(len({dtypes[i] for i in bucket}) == 1 for bucket in members.values())


@given(TENSORS, THRESHOLD, FIRST)
def test_tensors_together_stay_within_the_threshold(tensors, threshold, first):
    sizes, _, _, members = planned(tensors, threshold, first)
    for bucket in members.values():
        assert len(bucket) == 1 or sum(sizes[i] for i in bucket) <= threshold


@given(TENSORS, THRESHOLD, FIRST)
def test_the_bucket_of_the_first_tensor_stays_within_its_own_limit(tensors, threshold, first):
    sizes, _, numbers, members = planned(tensors, threshold, first)
    if tensors:
        bucket = members[numbers[0]]
        assert len(bucket) == 1 or sum(sizes[i] for i in bucket) <= first


@given(TENSORS, THRESHOLD, FIRST)
def test_buckets_are_numbered_as_they_become_complete(tensors, threshold, first):
    _, _, _, members = planned(tensors, threshold, first)
    assert all(a[-1] < b[-1] for a, b in pairwise(members.values()))


@given(TENSORS, THRESHOLD)
def test_no_bucket_ends_while_the_next_tensor_of_its_dtype_fits(tensors, threshold):
    sizes, dtypes, _, members = planned(tensors, threshold, threshold)
    for bucket in members.values():
        filled = sum(sizes[i] for i in bucket)
        following = [i for i in range(bucket[-1] + 1, len(tensors)) if dtypes[i] == dtypes[bucket[0]]]
        small = [i for i in following if sizes[i] < threshold]
        if small and sizes[bucket[0]] < threshold:
            assert filled + sizes[small[0]] > threshold


@given(TENSORS, FIRST)
def test_a_threshold_of_zero_sends_each_alone(tensors, first):
    _, _, numbers, _ = planned(tensors, 0, first)
    assert numbers == list(range(len(tensors)))


def test_a_large_tensor_leaves_the_open_bucket_open():
    assert plan_buckets([1, 100, 1], ["f", "f", "f"], 10) == [1, 0, 1]


def test_the_first_bucket_is_small():
    assert plan_buckets([2, 2, 2, 2], ["f"] * 4, threshold_bytes=100, first_bytes=4) == [0, 0, 1, 1]


def test_sizes_and_dtypes_must_correspond():
    with pytest.raises(ValueError, match="zip"):
        plan_buckets([1, 2], ["f"], 10)


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from("fh"), st.sampled_from([None, 0, 1]))), THRESHOLD)
def test_a_group_is_a_bucket_and_the_others_are_planned_as_without_it(tensors, threshold):
    sizes, dtypes, groups = ([tensor[i] for tensor in tensors] for i in range(3))
    numbers = plan_buckets(sizes, dtypes, threshold, groups=groups)
    for group in (0, 1):
        assert len({number for number, its in zip(numbers, groups, strict=True) if its == group}) <= 1
    mixed = {number for number, its in zip(numbers, groups, strict=True) if its is None}
    assert not mixed & {number for number, its in zip(numbers, groups, strict=True) if its is not None}
    assert sorted(set(numbers)) == list(range(len(set(numbers))))
