"""Codes between hosts of one and of several ranks: nothing is lost, ranks agree, and the links carry less."""

from __future__ import annotations

import numpy as np
import pytest

import horovodish as hvd
from support.coded import reduced
from support.hosts import hosts, limit_links, run_on_hosts

LENGTHS = {"a": 700_001, "b": 5_003}
STEPS = 4
# After this many steps with zeros, less than 1e-7 of the errors is left.
FLUSHES = {"int8": 4, "int4": 9, "topk": 3, "randomk": 40}
SENT_ELEMENTS = 4 << 20


def nothing_is_lost() -> None:
    hvd.init()
    for kind, flushes in FLUSHES.items():
        total = {name: np.zeros(length) for name, length in LENGTHS.items()}
        expected = {name: np.zeros(length) for name, length in LENGTHS.items()}
        for step in range(STEPS + flushes):
            of_ranks = [np.random.default_rng([step, rank]) for rank in range(hvd.size())]
            given = [
                {
                    name: random.standard_normal(length).astype(np.float32) * (step < STEPS)
                    for name, length in LENGTHS.items()
                }
                for random in of_ranks
            ]
            own = {f"{kind} {name}": values for name, values in given[hvd.rank()].items()}
            for name, result in zip(LENGTHS, reduced(kind, kind, own), strict=True):
                np.testing.assert_array_equal(result, hvd.broadcast(result, root_rank=0))
                total[name] += result
                expected[name] += np.sum([its[name] for its in given], 0, np.float64)
        for name in LENGTHS:
            assert np.abs(total[name] - expected[name]).max() < 1e-5 * hvd.size(), (kind, name)
    large = hvd.allreduce(np.full(100_000, 60000, np.float16), compression=hvd.Compression.int8)
    np.testing.assert_allclose(large, 60000, rtol=0.01)


def other_buckets_bring_the_errors() -> None:
    """The places of elements move to other ranks of a host, once for all."""
    hvd.init()
    for kind, flushes in FLUSHES.items():
        lost = np.zeros(LENGTHS["a"])
        for step in range(STEPS + flushes):
            of_ranks = [np.random.default_rng([step, rank]) for rank in range(hvd.size())]
            given = [random.standard_normal(len(lost)).astype(np.float32) * (step < STEPS) for random in of_ranks]
            before = {f"{kind} before": np.zeros(len(lost) // 2, np.float32)} if step >= STEPS else {}
            members = {**before, f"{kind} a": given[hvd.rank()]}
            result = reduced(kind, f"{kind} {len(before)}", members, prescale=0.3)[-1]
            np.testing.assert_array_equal(result, hvd.broadcast(result, root_rank=0))
            lost += 0.3 * np.sum(given, 0, np.float64) - result
        assert np.abs(lost).max() < 1e-5 * hvd.size(), kind


def send(kind: str) -> None:
    hvd.init()
    values = np.random.default_rng(hvd.rank()).standard_normal(SENT_ELEMENTS).astype(np.float32)
    hvd.allreduce(values, compression=getattr(hvd.Compression, kind, None))


def chooses_int8() -> None:
    hvd.init()
    values = np.random.default_rng(hvd.rank()).standard_normal(100_000).astype(np.float32)
    exact = hvd.allreduce(values, op=hvd.Sum)
    (result,) = reduced("auto", "auto", {"auto": values})
    assert 1e-4 < np.abs(result - exact).max() < 0.1 * hvd.size()
    np.testing.assert_array_equal(result, hvd.broadcast(result, root_rank=0))
    (tensor,) = hvd.compression_report().tensors
    assert (tensor.name, tensor.codec, tensor.steps) == ("auto", "int8", 1)


def test_auto_is_int8_on_a_slow_link() -> None:
    with hosts(2) as two_hosts:
        limit_links(two_hosts, 0.2)
        run_on_hosts(chooses_int8, two_hosts, [2, 2])


@pytest.mark.parametrize("layout", [[1, 1], [2, 2]], ids=str)
def test_codes_between_hosts(layout: list[int]) -> None:
    with hosts(2) as two_hosts:
        run_on_hosts(nothing_is_lost, two_hosts, layout)
        run_on_hosts(other_buckets_bring_the_errors, two_hosts, layout)
        for kind, bytes_of_a_value in {"int8": 1 + 4 / 256, "onebit": 1 / 8 + 4 / 4096}.items():
            before = two_hosts.sent_bytes()
            run_on_hosts(send, two_hosts, layout, args=(kind,))
            for start, after in zip(before, two_hosts.sent_bytes(), strict=True):
                assert 1 < (after - start) / (SENT_ELEMENTS * bytes_of_a_value) < 1.25, kind
