"""`horovodish predict`: against what can be worked out by hand, and what it says of files that make no sense."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovodish.predictions.cluster import Cluster, read_cluster
from horovodish.predictions.presets import GPUS, INSIDE, LINKS
from horovodish.predictions.quantities import QuantityError
from horovodish.predictions.steps import PRECISIONS, STRATEGIES, Case, predict, predicted
from horovodish.predictions.workload import Bucket, Workload, read_workload, recut
from horovodish.reports.page import report
from horovodish.reports.prediction import numbers_of_ranks, run
from support.recorded import Bucket as Recorded
from support.recorded import write_run


def run_on(models: list[str], cluster: str | None, most: int, **how: Any) -> int:
    usual: dict[str, Any] = {"strong": False, "ranks_per_host": None, "steps": None, "output": None}
    return run(models, cluster, most, **{**usual, **how})


DAMAGED = '<script type="application/json" id="report">{}</script>'
NAMED = {strategy.name: strategy for strategy in STRATEGIES}
ALL = NAMED["allreduce"]
FAST = Cluster(ranks_per_host=4, bandwidth=1e9, latency=1e-6, memory=10e9, wake=1e-6, operation=1e-6, efficiency=1.0)
ALONE = replace(FAST, ranks_per_host=1)
ONE_BUCKET = Workload(0.1, (Bucket(0.0, 100e6),))


def test_one_rank_only_works() -> None:
    for strategy in STRATEGIES:
        assert predict(ONE_BUCKET, FAST, 1, strategy).step == 0.1


def test_within_a_host_memory_is_the_limit() -> None:
    assert predict(ONE_BUCKET, FAST, 4, ALL).step == pytest.approx(0.1 + 100e6 / 10e9, rel=0.01)


@pytest.mark.parametrize(("hosts", "times"), [(2, 1.0), (4, 1.5), (64, 2 * 63 / 64)])
def test_between_hosts_the_link_is_the_limit(hosts: int, times: float) -> None:
    its = predict(ONE_BUCKET, ALONE, hosts, ALL)
    assert its.exposed == pytest.approx(times * 100e6 / 1e9, rel=0.02)
    assert its.efficiency == pytest.approx(0.1 / (0.1 + its.exposed))


def test_what_the_backward_pass_hides_is_not_paid_for() -> None:
    early = Workload(1.0, (Bucket(0.0, 100e6), Bucket(0.5, 1e6)))
    assert predict(early, ALONE, 2, ALL).exposed == pytest.approx(1e6 / 1e9, rel=0.1)
    late = Workload(1.0, (Bucket(0.0, 1e6), Bucket(0.5, 100e6)))
    assert predict(late, ALONE, 2, ALL).exposed == pytest.approx(100e6 / 1e9, rel=0.02)


def test_small_operations_cost_one_after_the_other() -> None:
    tiny = Workload(0.01, tuple(Bucket(0.0, 100.0) for _ in range(1000)))
    assert predict(tiny, replace(FAST, operation=20e-6), 4, ALL).exposed > 1000 * 20e-6


def test_bfloat16_is_half_as_long_in_memory_and_a_code_is_not() -> None:
    slow_link = replace(FAST, processing=0.2e9)
    for cluster, ranks in ((FAST, 4), (slow_link, 8)):
        exposed = {name: predict(ONE_BUCKET, cluster, ranks, NAMED[name]).exposed for name in ("bfloat16", "int8")}
        plain = predict(ONE_BUCKET, cluster, ranks, ALL).exposed
        assert exposed["bfloat16"] == pytest.approx(plain / 2, rel=0.02)
    assert predict(ONE_BUCKET, FAST, 4, NAMED["int8"]).exposed == pytest.approx(100e6 / 10e9, rel=0.01)


def test_strategies() -> None:
    exposed = {name: predict(ONE_BUCKET, ALONE, 2, strategy).exposed for name, strategy in NAMED.items()}
    assert exposed["bfloat16"] == pytest.approx(exposed["allreduce"] / 2, rel=0.01)
    assert exposed["LocalSGD(8)"] == pytest.approx(exposed["allreduce"] / 8, rel=0.01)
    assert exposed["ZeRO-3"] == pytest.approx(exposed["allreduce"] * 1.5, rel=0.01)
    assert exposed["int8"] > predict(ONE_BUCKET, replace(ALONE, encode=1e12), 2, NAMED["int8"]).exposed
    halves = replace(ONE_BUCKET, buckets=(Bucket(0.0, 100e6, element_bytes=2),))
    assert predict(halves, ALONE, 2, NAMED["bfloat16"]) == predict(halves, ALONE, 2, ALL), "it is bfloat16 already"
    memory = {name: predict(ONE_BUCKET, ALONE, 4, strategy).memory for name, strategy in NAMED.items()}
    assert memory["allreduce"] == 400e6  # weights, gradients and two states
    assert memory["ZeRO-1"] == 250e6 and memory["ZeRO-2"] == 175e6 and memory["ZeRO-3"] == 100e6


def test_weights_are_gathered_when_nothing_hides_them() -> None:
    hidden = Workload(10.0, (Bucket(0.0, 100e6), Bucket(5.0, 1e3)))
    assert predict(hidden, ALONE, 2, ALL).exposed == pytest.approx(0, abs=1e-4)
    assert predict(hidden, ALONE, 2, NAMED["ZeRO-1"]).exposed == pytest.approx(0.5 * 100e6 / 1e9, rel=0.02)


def test_processors_are_a_limit_where_ranks_share_them() -> None:
    slow = replace(FAST, processing=1e9)
    assert predict(ONE_BUCKET, slow, 4, ALL) == predict(ONE_BUCKET, FAST, 4, ALL), "one host has no link"
    exposed = predict(ONE_BUCKET, slow, 8, ALL).exposed
    assert exposed == pytest.approx(predict(ONE_BUCKET, FAST, 8, ALL).exposed + 100e6 / 1e9, rel=0.02)
    alone = replace(slow, ranks_per_host=1)
    assert predict(ONE_BUCKET, alone, 2, ALL) == predict(ONE_BUCKET, ALONE, 2, ALL)


def test_ranks_that_differ_wait_for_the_slowest() -> None:
    varying = replace(ONE_BUCKET, spread=0.1)
    drawn = np.random.default_rng(0).normal(size=(20000, 16))
    for ranks in (2, 4, 16):
        slowest = 0.1 * 0.1 * drawn[:, :ranks].max(axis=1).mean()
        assert predict(varying, FAST, ranks, ALL).late == pytest.approx(slowest, rel=0.06)
    rounds = drawn.reshape(-1, 8, 16).mean(axis=1)  # of 8 steps between two meetings
    assert predict(varying, FAST, 16, NAMED["LocalSGD(8)"]).late == pytest.approx(
        0.1 * 0.1 * rounds.max(axis=1).mean(), rel=0.06
    )


def test_strong_scaling_shares_the_work() -> None:
    assert predict(replace(ONE_BUCKET, ranks=2), FAST, 4, ALL, strong=True).step < 0.1 / 2 + 0.012


@given(
    st.lists(st.tuples(st.floats(0, 0.1), st.floats(1, 1e9)), min_size=1, max_size=8),
    st.integers(1, 4096),
    st.sampled_from(STRATEGIES),
    st.integers(1, 16),
)
def test_more_costs_more(buckets: list[tuple[float, float]], ranks: int, strategy: object, local: int) -> None:
    workload = Workload(0.2, tuple(Bucket(*each) for each in sorted(buckets)))
    cluster = replace(FAST, ranks_per_host=local)
    its = predict(workload, cluster, ranks, strategy)  # type: ignore[arg-type]
    assert its.step >= workload.work and 0 < its.efficiency <= 1
    slower = predict(workload, replace(cluster, bandwidth=1e8, memory=1e9), ranks, strategy)  # type: ignore[arg-type]
    assert slower.step >= its.step


@given(
    st.integers(1, 40),
    st.sampled_from([100.0, 3e5, 4.2e6]),
    st.sampled_from([0.0, 1e-5, 1e-3, 5e-3]),
    st.sampled_from(STRATEGIES),
    st.sampled_from([2, 8, 64]),
)
def test_a_run_of_buckets_is_as_its_buckets_one_by_one(
    count: int, length: float, spacing: float, strategy: object, ranks: int
) -> None:
    run_of = tuple(Bucket(spacing * index, length) for index in range(count))
    # An odd byte makes each bucket a run of its own.
    single = tuple(replace(bucket, bytes=length + index % 2 * 1e-6) for index, bucket in enumerate(run_of))
    for cluster in (ALONE, FAST, replace(FAST, memory=1e8, bandwidth=1e8)):
        steps = [
            predict(Workload(0.2, buckets), cluster, ranks, strategy).step  # type: ignore[arg-type]
            for buckets in (run_of, single)
        ]
        assert steps[0] == pytest.approx(steps[1], rel=1e-9)


def test_cases_at_once_are_as_each_alone() -> None:
    cases = [
        Case(cluster, ranks, strategy, strong)
        for cluster in (FAST, ALONE)
        for ranks in (1, 2, 12)
        for strategy in STRATEGIES
        for strong in (False, True)
    ]
    workload = Workload(0.2, (Bucket(0.0, 3e6), Bucket(0.01, 8e6, 2)), spread=0.1)
    alone = [predict(workload, case.cluster, case.ranks, case.strategy, strong=case.strong) for case in cases]
    assert predicted(workload, cases) == alone


def test_a_report_says_what_a_step_does(tmp_path: Path) -> None:
    buckets = [Recorded("bucket 0", 8 << 20, 0.5, 2, 12), Recorded("bucket 1", 4 << 20, 1.0, 2, 12)]
    assert (
        report(write_run(tmp_path, lambda rank, _: 50 if rank == 1 else 40, buckets), str(tmp_path / "page.html")) == 0
    )
    its = read_workload(tmp_path / "page.html", FAST)
    assert (its.ranks, its.spread, its.work) == (4, pytest.approx(0), pytest.approx(0.0425))
    assert [bucket.bytes for bucket in its.buckets] == [8 << 20, 4 << 20]
    assert [(bucket.tensors, bucket.element_bytes) for bucket in its.buckets] == [(12, 4), (12, 4)]
    assert [bucket.ready for bucket in its.buckets] == pytest.approx([0.020, 0.040])


def test_another_fusion_threshold_cuts_the_same_tensors() -> None:
    its = Workload(0.1, (Bucket(0.02, 4e6, tensors=2), Bucket(0.03, 1e6), Bucket(0.06, 9e6, tensors=3)))
    cut = recut(its, 5_000_000)
    assert [(each.bytes, each.tensors) for each in cut.buckets] == [(2e6, 1), (3e6, 2), (3e6, 1), (3e6, 1), (3e6, 1)]
    assert [each.ready for each in cut.buckets] == pytest.approx([0.01, 0.03, 0.04, 0.05, 0.06])
    assert recut(its, 100_000_000).bytes == its.bytes and len(recut(its, 100_000_000).buckets) == 2


def test_a_description(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text("parameters: 25 M\nstep: 90 ms\nfusion_threshold: 25 MB\noptimizer: momentum\nactivations: 1 GB\n")
    its = read_workload(path, FAST)
    assert its.work == 0.09 and its.bytes == 100e6 and len(its.buckets) == 4 and its.states == 1
    assert [bucket.ready for bucket in its.buckets] == pytest.approx([0, 0.015, 0.030, 0.045])


def test_a_description_in_operations(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text("parameters: 1 B\ndtype: bfloat16\nflops: 124.8 T\nsamples: 1 M\nbatch: 100\nepochs: 3\n")
    its = read_workload(path, replace(FAST, gpu=GPUS["a100"]))
    assert its.work == pytest.approx(1.0 + 7 * 2e9 / 2039e9) and its.buckets[0].element_bytes == 2
    assert its.steps == 30_000


def test_a_cluster_of_known_parts(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("link: infiniband-ndr\ninside: nvlink-4\ngpu: h200\nranks_per_host: 4\nlatency: 3 us\n")
    its = read_cluster(path)
    assert (its.bandwidth, its.latency, its.rank_memory) == (50e9, 3e-6, 141e9)
    assert its.memory == pytest.approx(450e9 * 4 / 6)
    assert read_cluster(path, ranks_per_host=2).memory == pytest.approx(450e9)


def test_sources_are_pages_of_standards_and_vendors() -> None:
    sources = [each.source for known in (LINKS, INSIDE, GPUS) for each in known.values() if each.source]  # type: ignore[attr-defined]
    hosts = {source.split("/")[2] for source in sources}
    assert hosts == {"www.ieee802.org", "www.infinibandta.org", "www.nvidia.com", "images.nvidia.com"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("latncy: 20 us", "line 1: there is no key 'latncy'; did you mean latency?"),
        ("memory: 1 GB/s\nlatency: 20", "line 2: latency: '20' is not accepted: write it with its unit"),
        ("bandwidth: -1 Gbit/s", "line 1: bandwidth: '-1 Gbit/s' is not accepted"),
        ("bandwidth: 0 Gbit/s", "bandwidth must be more than 0"),
        ("efficiency: 90", "efficiency is a share of the link's rate: at most 1"),
        ("memory: 1 GB", "'1 GB' is not accepted: write it with its unit, such as 25 Gbit/s"),
        ("ranks_per_host: 1e300", "line 1: ranks_per_host: '1e300' is not accepted"),
        ("ranks_per_host: 5000", "is not a number of ranks from 1 to 4096"),
        ("latency: 1e300 h", "is not accepted"),
        ("bandwidth: 1e-300 bit/s", "is not accepted"),
        ("ranks_per_host: 0", "line 1: ranks_per_host: '0' is not a number of ranks"),
        ("link: carrier-pigeon", "line 1: link: 'carrier-pigeon' is not a link; known are ethernet-1g"),
        ("gpu: abacus", "line 1: gpu: 'abacus' is not a GPU; known are v100"),
        ("inside: wire", "line 1: inside: 'wire' is not a link inside of a host; known are pcie-4"),
        ("wake: 1 us\nwake: 2 us", "line 2: wake is there twice"),
        ("wake: [1, 2]", "line 1: wake takes one value"),
        ("rank_memory: 0 GB", "rank_memory must be more than 0"),
        ("processing: 0 GB/s", "processing must be more than 0"),
        ("? [a]\n: 1", "line 1: a key is one of ranks_per_host, "),
        ("\0", "is not YAML: unacceptable character"),
        ("- 1", "line 1: the file must consist of lines such as"),
        ("a: b: c", "line 1 is not YAML"),
        ("", "line 1: the file must consist of lines"),
        ("wake: " + 3000 * "[", "has too many brackets in brackets: the file must consist of lines"),
        ('"a\\nb": 1', "line 1: there is no key 'a\\nb'; the keys are"),
    ],
)
def test_a_cluster_that_makes_no_sense(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(QuantityError) as raised:
        read_cluster(path)
    assert said in str(raised.value) and str(path) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("model.yaml", "parameters: 1 M", "model.yaml lacks step, such as step: 90 ms; or flops"),
        (
            "model.yaml",
            "parameters: 1 M\nflops: 1 T",
            "flops needs the GPU in the file of --cluster, such as gpu: a100",
        ),
        (
            "model.yaml",
            "parameters: 1 M\nstep: 1 s\nepochs: 2",
            "lacks batch and samples: the time to train needs samples and batch",
        ),
        ("model.yaml", "parameters: 1 M\nstep: 1 s\nsamples: 2\nbatch: 0", "batch must be more than 0"),
        ("model.yaml", "parameters: 1 M\nstep: 1 s\nsamples: 0\nbatch: 2", "samples must be more than 0"),
        (
            "model.yaml",
            "parameters: 1 M\nstep: 1 s\nsamples: 64\nbatch: 1 M",
            "batch is larger than samples in all epochs",
        ),
        ("model.yaml", "parameters: 1 M\nstep: 1 s\nflops: 1 T", "leave one out"),
        ("model.yaml", "parameters: 1 M\nstep: 1 s\nutilization: 0.4", "step and utilization both say"),
        ("model.yaml", "parameters: 1 M\nstep: 1 s\nfusion_threshold: 0 B", "fusion_threshold must be more than 0"),
        ("model.yaml", "parameters: 1 M\nstep: 1 s\nspread: 50", "spread is a share"),
        ("model.yaml", "parameters: 1 M\nstep: 90", "'90' is not accepted"),
        ("model.yaml", "parameters: 0\nstep: 90 ms", "must be more than 0"),
        ("model.yaml", "parameters: 25.6 P\nstep: 90 ms", "buckets, and a prediction takes 1048576 at most"),
        ("model.yaml", "parameters: 25.6 M\nstep: 90 ms\nfusion_threshold: 1 B", "give a larger fusion_threshold"),
        (
            "model.yaml",
            "parameters: 1e24\nstep: 1 s\nfusion_threshold: 1e24 B",
            "parameters take 4.61e+18 bytes at most",
        ),
        ("model.yaml", "parameters: 1 M\nstep: 1 s\ndtype: int3", "'int3' is not one of float32"),
        (
            "page.html",
            "<p>",
            "page.html says nothing about steps that this version can read: name a page of `horovodish",
        ),
        (
            "page.html",
            DAMAGED.format('{"figures": {}}'),
            "page.html has nothing to predict from: a prediction",
        ),
        ("page.html", DAMAGED.format("{"), "page.html says nothing about steps that this version can read"),
        ("page.html", DAMAGED.format(100_000 * "["), "page.html says nothing about steps that this version can read"),
        ("page.html", DAMAGED.format('{"workload": {"buckets": [[1, 2]]}}'), "make a page of another version again"),
        ("model.json", "{}", "give a page of `horovodish report` (.html) or the description of a model (.yaml)"),
    ],
)
def test_a_model_that_makes_no_sense(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, said: str
) -> None:
    (tmp_path / name).write_text(text)
    assert run_on([str(tmp_path / name)], None, 8) == 1
    out, error = capsys.readouterr()
    assert said in error and error.count("\n") == 1 and not out


@pytest.mark.parametrize(
    "damage",
    [
        {"work": 0},
        {"work": -1},
        {"work": float("nan")},
        {"work": float("inf")},
        {"work": 10**400},
        {"ranks": 0},
        {"ranks": 10**400},
        {"ranks": float("inf")},
        {"work": 1e308},
        {"spread": 1e308},
        {"spread": -0.1},
        {"buckets": []},
        {"buckets": [[0, -5, 4, 1]]},
        {"buckets": [[0, float("nan"), 4, 1]]},
        {"buckets": [[0, 1e300, 4, 1]]},
        {"buckets": [[0, 5e-324, 4, 1]]},
        {"buckets": [[0, 5, 0, 1]]},
        {"buckets": [[0, 5, float("inf"), 1]]},
        {"buckets": [[0, 5, 4, 0]]},
        {"buckets": [[-1, 5, 4, 1]]},
        {"buckets": [[1, 5, 4, 1], [0, 5, 4, 1]]},
    ],
)
def test_a_page_whose_steps_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: dict[str, Any]
) -> None:
    page = tmp_path / "page.html"
    sound = {"work": 0.1, "buckets": [[0, 1e6, 4, 1]], "spread": 0.01, "ranks": 2}
    page.write_text(DAMAGED.format(json.dumps({"workload": sound})))
    assert run_on([str(page)], None, 8) == 0
    assert "a step with 100 ms of own work on each of 2 ranks and 1 MB of gradients" in capsys.readouterr().out
    page.write_text(DAMAGED.format(json.dumps({"workload": {**sound, **damage}})))
    assert run_on([str(page)], None, 8) == 1
    out, error = capsys.readouterr()
    assert not out and "says nothing about steps that this version can read" in error


def test_a_run_without_work_of_its_own_has_no_prediction(tmp_path: Path) -> None:
    files = write_run(tmp_path, lambda *_: 0, [Recorded("bucket 0", 8 << 20, 1.0, 2)])
    assert report(files, str(tmp_path / "page.html")) == 0
    assert "Nothing is predicted" in (tmp_path / "page.html").read_text()


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.yaml").write_text("parameters: 100 M\nstep: 200 ms\n")
    (tmp_path / "cluster.yaml").write_text("link: ethernet-1g\nranks_per_host: 2\nrank_memory: 1.1 GB\n")
    model, cluster = str(tmp_path / "model.yaml"), str(tmp_path / "cluster.yaml")
    assert run_on([model], cluster, 12) == 0
    first, second, *_, advice, memory = capsys.readouterr().out.splitlines()
    assert first == (
        f"{model}: a step with 200 ms of own work and 400 MB of gradients in 96 buckets. Memory: 2 numbers of state "
        "for each parameter, and 0 B of activations"
    )
    assert second == "hosts of 2 ranks, 1 Gbit/s, 50 us; a host reduces 5 GB/s"
    assert advice.startswith("From 4 ranks on, an allreduce has less than 90% efficiency. ")
    assert memory == "A rank has 1.1 GB of memory: ZeRO-1 fits from 4 ranks on."
    assert numbers_of_ranks(12) == [1, 2, 4, 8, 12] and numbers_of_ranks(1) == [1]


def test_seven_billion_parameters_on_a_slow_link(tmp_path: Path) -> None:
    """The example of docs/predict.md."""
    (tmp_path / "cluster.yaml").write_text("ranks_per_host: 8\nlink: ethernet-25g\ninside: nvlink-3\ngpu: a100\n")
    (tmp_path / "model.yaml").write_text("parameters: 7 B\ndtype: bfloat16\nflops: 688 T\n")
    cluster = read_cluster(tmp_path / "cluster.yaml")
    workload = read_workload(tmp_path / "model.yaml", cluster)
    efficiency = {ranks: predict(workload, cluster, ranks, ALL).efficiency for ranks in (8, 16, 32, 64)}
    assert efficiency[8] > 0.95 and efficiency[16] > 0.8 and efficiency[32] < 0.65 and efficiency[64] < 0.55
    fast = replace(cluster, bandwidth=LINKS["ethernet-100g"].bandwidth)
    assert predict(workload, fast, 64, ALL).efficiency > 0.9


def test_a_model_that_does_not_fit_is_named_also_if_its_link_is_fast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, machines = tmp_path / "model.yaml", tmp_path / "cluster.yaml"
    model.write_text("parameters: 7 B\nstep: 10 s\n")
    machines.write_text("gpu: v100\ninside: nvlink-3\nlink: efa-3200g\n")
    assert run_on([str(model)], str(machines), 8) == 0
    keeps, fits = capsys.readouterr().out.splitlines()[-2:]
    assert keeps == "An allreduce keeps 90% efficiency up to 8 ranks."
    assert fits == "A rank has 32 GB of memory: ZeRO-3 fits from 4 ranks on."


@pytest.mark.parametrize(
    ("parameters", "said"),
    [("20 B", "ZeRO-2 fits from 4 ranks on."), ("90 T", "no strategy fits with 4096 ranks.")],
)
def test_a_strategy_that_fits_is_named_with_its_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], parameters: str, said: str
) -> None:
    """Also if an allreduce has little efficiency with fewer ranks than these."""
    model, machines = tmp_path / "model.yaml", tmp_path / "cluster.yaml"
    model.write_text(f"parameters: {parameters}\ndtype: bfloat16\nflops: 688 T\nfusion_threshold: 1 GB\n")
    machines.write_text("ranks_per_host: 1\ngpu: a100\n")
    assert run_on([str(model)], str(machines), 4096) == 0
    advice, fits = capsys.readouterr().out.splitlines()[-2:]
    assert advice.startswith("From 2 ranks on, an allreduce has less than 90% efficiency.")
    assert fits == f"A rank has 80 GB of memory: {said}"


def test_a_smaller_batch_has_fewer_activations() -> None:
    its = replace(ONE_BUCKET, activations=8e6)
    assert [predict(its, FAST, 4, ALL, strong=strong).memory for strong in (False, True)] == [408e6, 402e6]


def test_the_time_to_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.yaml").write_text("parameters: 1\nstep: 36 s\n")
    assert run_on([str(tmp_path / "model.yaml")], None, 2, steps=1000) == 0
    out = capsys.readouterr().out
    assert "time to train with an allreduce: 1000 steps of one rank" in out
    assert re.search(r"^ +1 +10 h +10 h$", out, re.MULTILINE) and re.search(r"^ +2 +5 h +5 h$", out, re.MULTILINE)


def embedded(page: Path) -> Any:
    found = re.search(r'<script type="application/json" id="report">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_page_has_what_is_predicted(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("parameters: 100 M\nstep: 200 ms\nsamples: 6400\nbatch: 64\n")
    (tmp_path / "<b>.yaml").write_text("parameters: 10 M\nstep: 200 ms\n")
    models, output = [str(tmp_path / name) for name in ("a.yaml", "<b>.yaml")], tmp_path / "page.html"
    assert run_on(models, None, 12, output=str(output)) == 0
    text, its = output.read_text(), embedded(output)["prediction"]
    assert len(text) < 2_000_000 and "&lt;b&gt;.yaml" in text and "<b>.yaml" not in text
    assert not re.findall(r'(?:src|href)="?http|@import|url\(', text), "the page needs no network"
    assert its["ranks"] == [1, 2, 4, 8, 12] and len(its["models"]) == 2
    shown = {name: index for index, name in enumerate(its["strategies"])}
    link = 1 + list(LINKS).index("ethernet-10g")
    cluster = replace(Cluster(), bandwidth=LINKS["ethernet-10g"].bandwidth, latency=LINKS["ethernet-10g"].latency)
    workload = read_workload(Path(models[0]), cluster)
    expected = predict(workload, cluster, 12, replace(NAMED["ZeRO-3"], precision=PRECISIONS[1]), strong=True)
    first = its["models"][0]
    assert first["exposed"][1][link][shown["ZeRO-3"]][1][4] == pytest.approx(expected.exposed, rel=1e-4)
    assert first["own"][1][4] == pytest.approx(workload.work / 12, rel=1e-4)
    assert first["memory"][1][shown["ZeRO-3"]][4] == pytest.approx(expected.memory, rel=1e-4)
    assert first["steps"] == [[100, 50, 25, 12.5, 100 / 12], [100] * 5]
    for name, index in shown.items():
        refuses = first["exposed"][0][0][index][2] is None
        assert refuses == name.startswith("ZeRO"), "shard= refuses codecs"


def test_a_page_tells_models_of_one_name_apart(tmp_path: Path) -> None:
    models, page = [tmp_path / folder / "model.yaml" for folder in ("a", "b")], tmp_path / "page.html"
    for model in models:
        model.parent.mkdir()
        model.write_text("parameters: 1 M\nstep: 1 s\n")
    assert run_on([str(model) for model in models], None, 2, output=str(page)) == 0
    assert all(f">{model}</option>" in page.read_text() for model in models)


def test_a_page_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, nowhere = tmp_path / "model.yaml", tmp_path / "no" / "page.html"
    machines = tmp_path / "cluster.yaml"
    model.write_text("parameters: 1 M\nstep: 1 s\n")
    machines.write_text("latency: 20 us\n")
    assert run_on([str(model)], None, 2, output=str(nowhere)) == 1
    assert run_on([str(model)], None, 2, output=f"{tmp_path}/../{tmp_path.name}/model.yaml") == 1
    assert model.read_text().startswith("parameters")
    assert run_on([str(model)], str(machines), 2, output=str(machines)) == 1
    assert machines.read_text() == "latency: 20 us\n"
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert run_on([str(model)], None, 2, output=str(loop)) == 1
    assert run_on([str(model)], None, 2, output="") == 1
    assert run_on([str(model)], "", 2) == 1
    first, second, third, *more = capsys.readouterr().err.splitlines()
    assert first == f"horovodish: {nowhere} cannot be written: No such file or directory"
    assert second.endswith("model.yaml is an input of the prediction: give its page another name")
    assert third.endswith("cluster.yaml is an input of the prediction: give its page another name")
    assert more == [
        f"horovodish: {loop} cannot be written: Too many levels of symbolic links",
        "horovodish: . cannot be written: Is a directory",
        "horovodish: . cannot be read: Is a directory",
    ]


def test_a_page_of_a_model_whose_name_is_no_text(tmp_path: Path) -> None:
    model, page = tmp_path / os.fsdecode(b"\xff.yaml"), tmp_path / "page.html"
    model.write_text("parameters: 1 M\nstep: 1 s\n")
    assert run_on([str(model)], None, 2, output=str(page)) == 0
    assert "?.yaml: a step with 1 s of own work" in page.read_text()
