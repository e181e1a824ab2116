"""Orders that hold for the predictions of any cluster: what makes a step longer never makes it shorter."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from horovodish.predictions.cluster import Cluster
from horovodish.predictions.steps import (
    CHUNK_BYTES,
    LARGEST_CHUNK_BYTES,
    SEGMENT_BYTES,
    STRATEGIES,
    Prediction,
    Strategy,
    chunk_bytes,
    predict,
    steps_and_bytes,
    wire_bytes,
)
from horovodish.predictions.workload import Bucket, Workload
from horovodish.settings import Settings

NAMED = {strategy.name: strategy for strategy in STRATEGIES}
ROUNDING = 1 - 1e-9

rates = st.floats(1e5, 1e13)
seconds = st.floats(0, 0.01)
clusters = st.builds(
    Cluster,
    ranks_per_host=st.integers(1, 64),
    bandwidth=rates,
    latency=seconds,
    memory=rates,
    wake=seconds,
    operation=seconds,
    efficiency=st.floats(0.01, 1),
    encode=rates,
    processing=st.one_of(st.just(0.0), rates),
)
buckets = st.lists(
    st.builds(Bucket, st.floats(0, 1), st.floats(1, 1e10), st.sampled_from([2, 4, 8])), min_size=1, max_size=6
)
workloads = st.builds(
    lambda work, buckets, spread: Workload(work, tuple(sorted(buckets, key=lambda its: its.ready)), spread),
    st.floats(1e-6, 100),
    buckets,
    st.floats(0, 1),
)
numbers = st.one_of(st.integers(1, 70), st.integers(1, 4096))
WORSE = {
    "bandwidth": 0.4,
    "latency": 3.0,
    "memory": 0.3,
    "wake": 2.0,
    "operation": 2.0,
    "efficiency": 0.5,
    "encode": 0.1,
    "processing": 0.5,
}


@settings(max_examples=300)
@given(clusters, workloads, numbers, st.sampled_from(STRATEGIES), st.booleans())
def test_a_worse_machine_or_model_is_never_faster(
    cluster: Cluster, workload: Workload, ranks: int, strategy: Strategy, strong: bool
) -> None:
    its = predict(workload, cluster, ranks, strategy, strong=strong)
    own = workload.work / (ranks if strong else 1)
    assert its.step == pytest.approx(own + its.exposed + its.late) and min(its.exposed, its.late) >= 0
    assert 0 < its.efficiency <= 1
    for attribute, times in WORSE.items():
        worse = replace(cluster, **{attribute: times * getattr(cluster, attribute)})
        assert predict(workload, worse, ranks, strategy, strong=strong).step >= its.step * ROUNDING, attribute
    uneven = replace(workload, spread=workload.spread + 0.5)
    assert predict(uneven, cluster, ranks, strategy, strong=strong).step >= its.step
    longer = replace(workload, buckets=(*workload.buckets, replace(workload.buckets[-1], tensors=2)))
    assert predict(longer, cluster, ranks, strategy, strong=strong).step >= its.step * ROUNDING


@settings(max_examples=300)
@given(clusters, workloads, numbers)
@example(Cluster(ranks_per_host=8, bandwidth=125e6, latency=50e-6), Workload(1e-3, (Bucket(0, 11228),)), 512)
def test_strategies_are_in_order(cluster: Cluster, workload: Workload, ranks: int) -> None:
    def of(name: str, machines: Cluster = cluster) -> Prediction:
        return predict(workload, machines, ranks, NAMED[name])

    # Fewer bytes can take longer, since the engine chooses a schedule by the length, whatever the link.
    short = tuple(replace(its, bytes=its.bytes * 2 / its.element_bytes, element_bytes=2) for its in workload.buckets)
    halves = predict(replace(workload, buckets=short), cluster, ranks, NAMED["allreduce"])
    assert of("bfloat16").exposed == pytest.approx(halves.exposed)
    assert of("DiLoCo(100)").step <= of("LocalSGD(8)").step / ROUNDING
    assert of("ZeRO-3").exposed >= of("allreduce").exposed * ROUNDING
    # A codec has its price in encoding and in a second step, and nowhere else.
    free = replace(cluster, encode=1e30, latency=0.0)
    assert of("int8", free).exposed <= of("allreduce", free).exposed / ROUNDING
    memory = [of(name).memory for name in ("allreduce", "ZeRO-1", "ZeRO-2", "ZeRO-3")]
    assert memory == sorted(memory, reverse=True)
    more = predict(workload, cluster, ranks + 1, NAMED["ZeRO-3"]).memory
    assert more <= memory[-1]
    assert predict(workload, cluster, ranks + 1, NAMED["allreduce"]).late >= of("allreduce").late


def test_chunks_begin_with_the_default_setting() -> None:
    assert Settings().chunk_kb << 10 == CHUNK_BYTES
    assert chunk_bytes(2, 2, 1e9) == 4 * SEGMENT_BYTES
    assert chunk_bytes(16, 8, 1e9) == LARGEST_CHUNK_BYTES


@given(st.integers(2, 300), st.floats(1, 1e9))
def test_no_host_sends_much_more_than_it_has_to(hosts: int, length: float) -> None:
    least = 2 * (hosts - 1) / hosts
    assert steps_and_bytes(hosts, length, coded=True) == (2, least)
    assert least * ROUNDING <= steps_and_bytes(hosts, length)[1]
    if length > 1 << 24:
        assert wire_bytes(hosts, length) == least * length
