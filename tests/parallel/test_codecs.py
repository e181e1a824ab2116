"""Codes travel between hosts: every rank has the bits of a model, and what is left out is sent later.

On the plane "mpi_ring" every rank is a host.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import horovodish as hvd
from horovodish import _native
from horovodish.collectives.array_adapter import ARRAYS
from horovodish.collectives.operation import Codec, Operation
from horovodish.gradients.compression import Compressions
from support.coded import Floats, Model, encode_or_refuse, reduced
from support.expect import every_rank_raises, mismatch, the_engine_goes_on, unless_last
from support.model import dtype_of
from support.on_ranks import on_ranks
from support.traces import tracks_of

PLANE = "mpi_ring"
LENGTHS = {"a": 140_001, "b": 5_003, "c": 1}
STEPS = 5


def given(step: int, rank: int) -> dict[str, Floats]:
    random = np.random.default_rng([step, rank])
    return {name: random.standard_normal(length).astype(np.float32) for name, length in LENGTHS.items()}


@on_ranks(2, 3, 4, planes=[PLANE])
def test_nothing_is_lost_and_every_rank_gets_the_bits_of_the_model() -> None:
    """In other buckets from step to step. In the middle one rank has a value that is not finite."""
    for kind in ("int8", "int4", "onebit", "ternary", "topk"):
        model = Model(kind, hvd.size())
        difference = {name: np.zeros(length) for name, length in LENGTHS.items()}
        for step in range(STEPS):
            of_ranks = [given(step, rank) for rank in range(hvd.size())]
            if step == STEPS // 2:
                of_ranks[0]["a"][70_000] = math.inf
            for bucket in (["a", "b", "c"],) if step % 2 else (["c", "a"], ["b"]):
                members = [{name: its[name] for name in bucket} for its in of_ranks]
                results = reduced(
                    kind, f"{kind} {bucket}", {f"{kind} {name}": members[hvd.rank()][name] for name in bucket}
                )
                with np.errstate(invalid="ignore"):
                    expected = model.reduced(members)
                for name, result, bits in zip(bucket, results, expected, strict=True):
                    np.testing.assert_array_equal(result, bits, f"{kind}, step {step}, {name}")
                    difference[name] += result - np.sum([its[name] for its in members], 0, np.float64)
        is_lost = np.isnan(difference["a"])
        assert is_lost[70_000]
        assert is_lost.sum() <= 4096
        for name, its in difference.items():
            kept = np.sum([errors[name] for errors in model.errors], 0, np.float64)
            assert np.isfinite(kept).all()
            assert np.abs((its + kept)[~np.isnan(its)]).max() < 1e-6 * STEPS * hvd.size() * 4, (kind, name)


@on_ranks((3, PLANE))
def test_dtypes_scales_joins_and_process_sets() -> None:
    own = np.random.default_rng(hvd.rank()).standard_normal((300, 300))
    exact = [np.random.default_rng(rank).standard_normal((300, 300)) for rank in range(3)]
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        values = ARRAYS.source(own.astype(dtype_of(dtype)), "values")
        result = hvd.allreduce(values, prescale_factor=2.0, compression=hvd.Compression.int8)
        assert result.dtype == values.dtype
        assert np.abs(result.astype(float) - 2 * np.mean(exact, 0)).max() < 0.1
    large = hvd.allreduce(np.full(1000, 60000, np.float16), compression=hvd.Compression.int8)
    np.testing.assert_allclose(large, 60000, rtol=0.01)
    whole = np.arange(1000, dtype=np.int32)
    np.testing.assert_array_equal(hvd.allreduce(whole, op=hvd.Sum, compression=hvd.Compression.onebit), 3 * whole)

    tiny = np.linspace(
        -1, 1, 20, dtype=np.float32
    )  # from the second time on values of this size travel with the decision
    first, second = (hvd.allreduce(tiny, name="tiny", compression=hvd.Compression.onebit) for _ in range(2))
    np.testing.assert_array_equal(first, second, strict=True)
    assert len(np.unique(np.abs(first))) == 1

    drawn = [hvd.allreduce(own, name="drawn", compression=hvd.Compression.randomk(0.5)) for _ in range(2)]
    for result in drawn:
        assert np.mean(result != 0) == pytest.approx(0.5, abs=0.01)
    assert (drawn[0] != drawn[1]).any()

    steps = [reduced("onebit", "later", {"later": np.arange(5, dtype=np.float32)}, start=2)[0] for _ in range(3)]
    np.testing.assert_array_equal(steps[:2], [3 * np.arange(5)] * 2)
    assert len(np.unique(steps[2])) == 1

    pair = hvd.add_process_set([0, 2])
    if hvd.rank() != 1:
        result = hvd.allreduce(own, process_set=pair, compression=hvd.Compression.int8)
        assert np.abs(result - (exact[0] + exact[2]) / 2).max() < 0.1
    hvd.remove_process_set(pair)

    model = Model("int8", 3)
    if hvd.rank() != 1:
        for step in range(2):
            of_ranks = [{"a": given(step, rank)["a"] * (rank != 1)} for rank in range(3)]
            (result,) = reduced("int8", "joined", {"a": of_ranks[hvd.rank()]["a"]})
            np.testing.assert_array_equal(result, model.reduced(of_ranks)[0])
    hvd.join()


@on_ranks((2, PLANE))
def test_the_report_and_the_timeline(tmp_path: Path) -> None:
    """After two steps: what tensors of one bucket have sent, and the norms of the first step."""
    assert str(hvd.compression_report()).startswith("nothing was encoded: no tensor was reduced with a codec")
    model = Model("int8", 2)
    trace = tmp_path / "trace.json"
    hvd.start_timeline(trace)
    for step in range(2):
        of_ranks = [given(step, rank) for rank in range(2)]
        reduced("int8", "bucket", of_ranks[hvd.rank()])
        if step == 0:
            model.reduced(of_ranks)
    hvd.allreduce(np.full(10_000, math.nan, np.float32), compression=hvd.Compression.topk(0.5))
    hvd.stop_timeline()
    *tensors, calls = hvd.compression_report().tensors
    for one, (name, length) in zip(tensors, LENGTHS.items(), strict=True):
        assert (one.name, one.owner, one.codec, one.steps) == (name, "", "int8", 2)
        sent = hvd.allreduce(np.array([one.value_bytes, one.code_bytes]), op=hvd.Sum)
        # Each rank sends what it has of the other one's half, and the sum of its own half.
        assert sent[0] == pytest.approx(2 * 2 * 4 * length, abs=4)
        assert one.ratio == pytest.approx(4 / (1 + 4 / 256), rel=0.01) or length == 1
        assert one.encode_seconds > 0 < one.decode_seconds
        own, kept = given(0, hvd.rank())[name], model.errors[hvd.rank()][name]
        assert one.error == pytest.approx(np.linalg.norm(kept) / np.linalg.norm(own), rel=1e-4)
    assert (calls.name, calls.codec, calls.steps) == ("calls of allreduce", "topk(0.5)", 1)
    assert math.isnan(calls.error)
    rows = [line.split()[0] for line in str(hvd.compression_report()).splitlines()[2:]]
    assert rows[0] == "a"
    assert sorted(rows) == ["a", "b", "c", "calls"]
    with pytest.raises(ValueError, match="is not in use"):
        hvd.compression_report(hvd.ProcessSet([0]))

    tracks = tracks_of(trace.with_name(f"trace.rank-{hvd.rank()}.json"), hvd.rank())
    assert set(tracks["bucket"][0].phases()[2:]) == {"pack", "encode", "reduce", "decode", "unpack"}


def said_while(call: Callable[[], object], path: Path) -> str:
    """What this process writes to stderr meanwhile, the engine's lines among it."""
    sys.stderr.flush()
    usual = os.dup(2)
    with open(path, "w") as file:
        os.dup2(file.fileno(), 2)
    try:
        call()
    finally:
        os.dup2(usual, 2)
        os.close(usual)
    return path.read_text()


@on_ranks((3, PLANE), 2)
def test_auto_is_the_same_on_all_ranks_and_can_be_repeated(tmp_path: Path) -> None:
    """Whatever is faster here. It is chosen before the first use that may be encoded, and anew after another init()."""
    for generation in range(2):
        results: list[Floats] = []
        names = f"auto {generation}", f"repeated {generation}"

        def steps(kind: str, name: str, start: int, results: list[Floats] = results) -> None:
            for step in range(4):
                results.extend(reduced(kind, name, {name: given(step, hvd.rank())["a"]}, start=start))

        said = said_while(functools.partial(steps, "auto", names[0], 2), tmp_path / f"{generation}-{hvd.rank()}")
        encoded = [(one.name, one.codec, one.steps) for one in hvd.compression_report().tensors]
        chosen = "int8" if encoded else "none"
        assert encoded == [(names[0], "int8", 2)] * (chosen == "int8")
        assert len(set(hvd.allgather_object(chosen))) == 1
        if hvd.rank() > 0:
            assert said == ""
        elif hvd.compression_report().hosts == 1:
            assert "auto chose none: all ranks are on one host" in said
            assert "compression=Compression.none repeats" in said
        else:
            start = "2" if chosen == "int8" else "10**18"
            assert f"auto chose {chosen}: an allreduce of 8 MiB between 3 hosts took" in said
            assert f"compression=Compression.int8(start={start}) repeats this run bit by bit" in said
        steps("int8", names[1], 2 if encoded else 10**18)
        for result, repeated in zip(results[:4], results[4:], strict=True):
            np.testing.assert_array_equal(result, repeated)
            np.testing.assert_array_equal(result, hvd.broadcast(result, root_rank=0))
        hvd.shutdown()
        hvd.init()


@on_ranks((2, PLANE))
def test_what_is_not_used_any_more_is_dropped_on_all_ranks_alike() -> None:
    """A tensor that others outlive leaves the report, and begins anew with errors of zero and without codes."""
    once, often = given(0, hvd.rank())["a"], np.zeros(1, np.float32)
    zeros = np.zeros_like(once)
    reduced("int8", "once", {"once": once})
    for _ in range(1999):
        reduced("int8", "often", {"often": often})
    assert [one.name for one in hvd.compression_report().tensors] == ["often", "once"]
    reduced("int8", "often", {"often": often})
    assert [one.name for one in hvd.compression_report().tensors] == ["often"]
    (result,) = reduced("int8", "once", {"once": zeros}, start=1)
    np.testing.assert_array_equal(result, zeros)
    assert [one.name for one in hvd.compression_report().tensors] == ["often"]


@on_ranks((2, PLANE))
def test_the_norms_of_large_and_small_values_are_measured() -> None:
    for size in (1e-30, 1e30):
        values = np.float32(size) * given(0, hvd.rank())["b"]
        reduced("int8", f"{size}", {f"{size}": values})
    assert [0.001 < one.error < 0.1 for one in hvd.compression_report().tensors] == [True, True]


@on_ranks((2, PLANE))
def test_what_is_refused() -> None:
    values, codecs = np.ones((2, 2), np.float32), hvd.Compression
    every_rank_raises(
        "x",
        "compression",
        "Compression.int8(error_feedback=False, start=0)",
        "Compression.topk(0.25, error_feedback=False, start=0)",
        lambda: hvd.allreduce(values, name="x", compression=unless_last(codecs.int8, codecs.topk(0.25))),
    )
    for op in (hvd.Adasum, hvd.Max):
        with pytest.raises(ValueError, match=r"Compression\.int4 needs op=Average or op=Sum"):
            hvd.allreduce(values, op=op, compression=codecs.int4)
    with pytest.raises(ValueError, match="start= and where= are for DistributedOptimizer"):
        hvd.allreduce(values, compression=codecs.int4(start=3))
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match="needs op="):
            hvd.allreduce(values, name="y", op=hvd.Min, compression=codecs.int8)
    else:
        with mismatch("rank 0 cannot take part", "needs op=Average or op=Sum"):
            hvd.allreduce(values, name="y", compression=codecs.int8)
    with pytest.raises(ValueError, match=r"Compression\.auto is for DistributedOptimizer; use Compression\.int8 or no"):
        hvd.allreduce(values, compression=codecs.auto)
    wrong: list[Any] = [0, 1.5, -1, "0.1", None]
    for share in wrong:
        with pytest.raises(ValueError, match="the share must be a number above 0 and at most 1"):
            codecs.topk(share)
    for start in (2**63, 2**64, -1, 1.5, True):
        with pytest.raises(ValueError, match=r"start=.* must be a whole number from 0 to 2\*\*63 - 1"):
            codecs.int8(start=start)
    for feedback in ("no", 0, None):
        with pytest.raises(ValueError, match=r"error_feedback=.* must be True or False"):
            codecs.int8(error_feedback=feedback)
    operation = Operation("allreduce", "x", op=hvd.Sum, codec=Codec(_native.CODECS["int8"], 0.0, True, 2**64))
    with pytest.raises(ValueError, match="is not a codec"):
        ARRAYS.group(operation, [values])
    for function in (codecs.topk, codecs.randomk, Compressions.powersgd):
        with pytest.raises(ValueError, match=rf"the function {function.__name__.strip('_')}\. Remedy: call it"):
            hvd.allreduce(values, compression=function)
    the_engine_goes_on()


@on_ranks((2, PLANE))
def test_every_function_that_takes_a_compression() -> None:
    encode_or_refuse(hvd, {"allreduce": lambda its: hvd.allreduce(np.ones(1000, np.float32), compression=its)}, {})


@on_ranks(2)
def test_within_a_host_nothing_is_encoded() -> None:
    own = np.random.default_rng(hvd.rank()).standard_normal((300, 300)).astype(np.float32)
    results = [hvd.allreduce(own, compression=compression) for compression in (None, hvd.Compression.onebit)]
    np.testing.assert_array_equal(*results)
    assert "all ranks are on one host" in str(hvd.compression_report())
