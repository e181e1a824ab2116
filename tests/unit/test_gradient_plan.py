"""The planner of the buckets, against what it promises."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from horovodish.gradients.plan import Payload, plan_buckets

TENSORS = st.lists(st.tuples(st.integers(0, 40), st.sampled_from("fhi")), max_size=60)
THRESHOLD = st.integers(0, 100)
FIRST = st.integers(0, 100)


def planned(tensors, threshold, first):
    sizes = [size for size, _ in tensors]
    dtypes = [dtype for _, dtype in tensors]
    return sizes, dtypes, plan_buckets([Payload(*tensor) for tensor in tensors], threshold, first)


@given(TENSORS, THRESHOLD, FIRST)
def test_every_tensor_is_in_one_bucket(tensors, threshold, first):
    _, _, buckets = planned(tensors, threshold, first)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(tensors)))


@given(TENSORS, THRESHOLD, FIRST)
def test_a_bucket_has_one_dtype(tensors, threshold, first):
    _, dtypes, buckets = planned(tensors, threshold, first)
    assert all(len({dtypes[i] for i in bucket}) == 1 for bucket in buckets)


@given(TENSORS, THRESHOLD, FIRST)
def test_tensors_together_stay_within_the_threshold(tensors, threshold, first):
    sizes, _, buckets = planned(tensors, threshold, first)
    for bucket in buckets:
        assert len(bucket) == 1 or sum(sizes[i] for i in bucket) <= threshold


@given(TENSORS, THRESHOLD, FIRST)
def test_the_bucket_of_the_first_tensor_stays_within_its_own_limit(tensors, threshold, first):
    sizes, _, buckets = planned(tensors, threshold, first)
    for bucket in buckets:
        if 0 not in bucket:
            continue
        assert len(bucket) == 1 or sum(sizes[i] for i in bucket) <= first


@given(TENSORS, THRESHOLD, FIRST)
def test_buckets_come_in_the_order_in_which_they_are_complete(tensors, threshold, first):
    _, _, buckets = planned(tensors, threshold, first)
    assert all(a[-1] < b[-1] for a, b in pairwise(buckets))


@given(TENSORS, THRESHOLD)
def test_no_bucket_ends_while_the_next_tensor_of_its_dtype_fits(tensors, threshold):
    sizes, dtypes, buckets = planned(tensors, threshold, threshold)
    for bucket in buckets:
        filled = sum(sizes[i] for i in bucket)
        following = [i for i in range(bucket[-1] + 1, len(tensors)) if dtypes[i] == dtypes[bucket[0]]]
        small = [i for i in following if sizes[i] < threshold]
        if small and sizes[bucket[0]] < threshold:
            assert filled + sizes[small[0]] > threshold


@given(TENSORS, FIRST)
def test_a_threshold_of_zero_sends_each_alone(tensors, first):
    _, _, buckets = planned(tensors, 0, first)
    assert buckets == [[index] for index in range(len(tensors))]


def test_a_large_tensor_leaves_the_open_bucket_open():
    assert plan_buckets([Payload(size, "f") for size in (1, 100, 1)], 10) == [[1], [0, 2]]


def test_the_first_bucket_is_small():
    assert plan_buckets([Payload(2, "f")] * 4, threshold_bytes=100, first_bytes=4) == [[0, 1], [2, 3]]


def test_a_bucket_is_on_one_device():
    assert plan_buckets([Payload(1, "f", device) for device in (0, 1, 0)], 10) == [[1], [0, 2]]
    assert plan_buckets([Payload(1, "f", device, 7) for device in (0, 1, 0)], 10) == [[1], [0, 2]]


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from("fh"), st.sampled_from([None, 0, 1]))), THRESHOLD)
def test_a_group_is_a_bucket_and_the_others_are_planned_as_without_it(tensors, threshold):
    payloads = [Payload(size, dtype, group=group) for size, dtype, group in tensors]
    groups_of = [{payloads[index].group for index in bucket} for bucket in plan_buckets(payloads, threshold)]
    assert all(len(groups) == 1 for groups in groups_of)
    for group in (0, 1):
        assert groups_of.count({group}) == any(payload.group == group for payload in payloads)
