"""The NCCL plane on pretended GPUs: every collective, streams, sets that overlap, joined ranks, memory, refusals."""

from __future__ import annotations

import os
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import horovodish as hvd
from horovodish import _native
from horovodish.runtime import basics
from support.expect import the_engine_goes_on
from support.model import FLOATS, OPS, Array, difference, dtype_of, reduced, values
from support.parts import parts_by_elements
from support.pretended_gpu import Gpu, Stream, variables
from support.processes import wait_until
from support.ranks import run_ranks
from support.traces import tracks_of

INTEGERS = ["uint8", "int8", "int32", "int64"]
LENGTHS = [0, 1, 7, 1003]
TURNS = 30
MOST_SECONDS_PER_TURN = 0.15
LARGE = 2**20  # of float32: as many bytes as a bucket has


def use_gpus() -> None:
    hvd.init()
    gpu = Gpu()
    every_op_and_dtype(gpu)
    scales(gpu)
    fused_with_other_dtypes(gpu)
    large_tensors_of_a_group(gpu)
    rows_that_differ_by_rank(gpu)
    moves_of_bytes(gpu)
    scattered(gpu)
    parts_by_elements(gpu)
    beside_host_memory(gpu)
    streams_wait_and_the_host_does_not(gpu)
    a_result_that_another_stream_makes(gpu)
    memory_of_dropped_handles(gpu)
    plans_with_side_streams(gpu)
    graphs_are_refused(gpu)
    what_nccl_cannot_do_is_refused(gpu)
    sets_that_overlap(gpu)
    joined(gpu)
    the_engine_goes_on()
    hvd.shutdown()
    assert gpu.communicators_destroyed() > 0


def of_all_ranks(dtype: str, shape: int | tuple[int, ...], op: str = "Sum") -> list[Array]:
    return [values(dtype, shape, rank, op) for rank in range(hvd.size())]


def every_op_and_dtype(gpu: Gpu) -> None:
    for dtype in INTEGERS + FLOATS:
        for op in OPS:
            if op == "Average" and dtype in INTEGERS:
                continue
            arrays = [of_all_ranks(dtype, length, op) for length in LENGTHS]
            own = [by_rank[hvd.rank()] for by_rank in arrays]
            bound = 2.0 ** hvd.size() if op == "Product" else 2.0 * hvd.size()
            together = gpu.reduce(own, f"{dtype}.{op}", op)
            alone = gpu.reduce(own[-1:], f"{dtype}.{op}.alone", op)
            for result, by_rank in zip([*together, *alone], [*arrays, arrays[-1]], strict=True):
                assert not (wrong := difference(result, reduced(by_rank, op), bound)), f"{dtype} {op}: {wrong}"


def scales(gpu: Gpu) -> None:
    for dtype in FLOATS:
        for op in ("Sum", "Average"):
            arrays = of_all_ranks(dtype, 9)
            factors = {"prescale_factor": 0.25, "postscale_factor": 3.0}
            [result] = gpu.reduce([arrays[hvd.rank()]], f"scaled.{dtype}.{op}", op, **factors)
            assert not (wrong := difference(result, reduced(arrays, op, 0.25, 3.0), 8.0 * hvd.size())), (
                f"{dtype}: {wrong}"
            )


def fused_with_other_dtypes(gpu: Gpu) -> None:
    dtypes = ["float32", "int64", "float16", "float32", "float64"]
    arrays = [of_all_ranks(dtype, 5 + index) for index, dtype in enumerate(dtypes)]
    targets = [np.empty_like(by_rank[0]) for by_rank in arrays]
    sources = [by_rank[hvd.rank()] for by_rank in arrays]
    before = [source.copy() for source in sources]
    gpu.finish(gpu.submit("allreduce", sources, targets, "mixed", op=hvd.Sum))
    for source, same, target, by_rank in zip(sources, before, targets, arrays, strict=True):
        np.testing.assert_array_equal(source, same)
        assert not difference(target, reduced(by_rank, "Sum"), 2.0 * hvd.size())


def large_tensors_of_a_group(gpu: Gpu) -> None:
    """They are reduced where they are, so that the fusion buffer stays small."""
    arrays = [of_all_ranks("float32", length) for length in (3, LARGE, 5, LARGE + 1)]
    results = gpu.reduce([by_rank[hvd.rank()] for by_rank in arrays], "large ones")
    for result, by_rank in zip(results, arrays, strict=True):
        assert not difference(result, reduced(by_rank, "Sum"), 2.0 * hvd.size())
    assert gpu.allocated_bytes() < 4 * LARGE


def rows_that_differ_by_rank(gpu: Gpu) -> None:
    rank, size = hvd.rank(), hvd.size()
    for rows in ([3] * size, [2 * index + 1 for index in range(size)], [0] * size, [0, *[4] * (size - 1)]):
        parts = [
            [values(dtype, (count, 3), r) for r, count in enumerate(rows)] for dtype in ("bool", "int16", "float32")
        ]
        handle = gpu.submit("allgather", [part[rank] for part in parts], [None] * 3, f"gathered {rows}")
        for result, part in zip(gpu.finish(handle), parts, strict=True):
            np.testing.assert_array_equal(result, np.concatenate(part))
    for uneven in (False, True):
        splits = [[1 + uneven * ((r + to) % 3) for to in range(size)] for r in range(size)]
        sent = [values("float64", (sum(splits[r]), 2), r) for r in range(size)]
        handle = gpu.submit("alltoall", [sent[rank]], [None], "exchanged", splits=splits[rank])
        [result] = gpu.finish(handle)
        pieces = [np.split(sent[r], np.cumsum(splits[r])[:-1])[rank] for r in range(size)]
        np.testing.assert_array_equal(result, np.concatenate(pieces))


def moves_of_bytes(gpu: Gpu) -> None:
    for root in range(hvd.size()):
        for dtype in ("bool", "int16", "bfloat16", "float64"):
            sent = values(dtype, 11, root)
            source = values(dtype, 11, hvd.rank())
            [result] = gpu.finish(gpu.submit("broadcast", [source], [np.empty_like(source)], "sent", root_rank=root))
            np.testing.assert_array_equal(result, sent)


def scattered(gpu: Gpu) -> None:
    rank, size = hvd.rank(), hvd.size()
    for rows in (2 * size, 2 * size + 1, size - 1):
        arrays = of_all_ranks("float32", (rows, 3))
        begin = sum(rows // size + (r < rows % size) for r in range(rank))
        end = begin + rows // size + (rank < rows % size)
        target = np.empty((end - begin, 3), np.float32)
        handle = gpu.submit("reducescatter", [arrays[rank]], [target], f"dealt {rows}", op=hvd.Average)
        [result] = gpu.finish(handle)
        assert not (wrong := difference(result, reduced(arrays, "Average")[begin:end], 2.0)), wrong


def beside_host_memory(gpu: Gpu) -> None:
    handles = []
    for index in range(6):
        on_gpu = np.full(4, hvd.rank() + index, np.float32)
        handles.append((gpu.submit("allreduce", [on_gpu], [on_gpu], f"gpu {index}", op=hvd.Sum), on_gpu))
        on_host = hvd.allreduce_async(np.full(4, hvd.rank() + index, np.float32), op=hvd.Sum, name=f"host {index}")
        handles.append((on_host, None))
    for index, (handle, on_gpu) in enumerate(handles):
        result = handle.wait()
        gpu.stream.wait()
        expected = sum(rank + index // 2 for rank in range(hvd.size()))
        np.testing.assert_array_equal(result if on_gpu is None else on_gpu, np.full(4, expected, np.float32))


def streams_wait_and_the_host_does_not(gpu: Gpu) -> None:
    producer, consumer = Stream(), Stream()
    array = np.full(6, float(hvd.rank()), np.float32)
    producer.hold(True)
    producer.add(array, 10.0)
    handle = gpu.submit("allreduce", [array], [array], "ordered", op=hvd.Sum, stream=producer)
    handle._current_stream = lambda: consumer.handle
    handle.wait()  # returns although the values are not even computed
    consumer.add(array, 0.5)
    np.testing.assert_array_equal(array, np.full(6, hvd.rank()))
    producer.hold(False)
    consumer.wait()
    np.testing.assert_array_equal(array, np.full(6, sum(range(hvd.size())) + 10.0 * hvd.size() + 0.5))


def a_result_that_another_stream_makes(gpu: Gpu) -> None:
    first, second = Stream(), Stream()
    handle = gpu.submit("allgather", [np.full(6, float(hvd.rank()), np.float32)], [None], "made", stream=first)
    assert handle.settles_within(60)
    first.hold(True)
    [result] = handle.wait()  # `first` is to copy the rows
    handle._current_stream = lambda: second.handle
    handle.wait()
    second.add(result, 0.5)
    hvd.barrier()
    first.hold(False)
    first.wait()
    second.wait()
    np.testing.assert_array_equal(result, np.repeat(np.arange(hvd.size()), 6) + 0.5)


def memory_of_dropped_handles(gpu: Gpu) -> None:
    producer = Stream()
    array = np.zeros(3, np.float32)
    watched = weakref.ref(array)
    producer.hold(True)
    handle = gpu.submit("allreduce", [array], [array], "dropped", op=hvd.Sum, stream=producer)
    while not handle.poll():
        pass
    del handle, array
    hvd.barrier()
    assert watched() is not None, "the GPU still reads and writes this memory"
    producer.hold(False)
    while hvd.allreduce(np.array([float(watched() is not None)]), op=hvd.Max)[0]:
        pass  # every submission lets go of what is no longer needed


def plans_with_side_streams(gpu: Gpu) -> None:
    floats = _native.DTYPES["float32"]
    members = [(f"p{index}", floats, (5,), index // 2) for index in range(4)]
    plan = basics.engine().plan("plan", _native.REDUCE_OPS["sum"], 1.0, 1.0, members, [gpu.ordinal, -1])
    streams = [Stream(), Stream()]
    for step in range(3):
        arrays = [np.full(5, float(hvd.rank() + index), np.float32) for index in range(4)]
        for index, array in enumerate(arrays):
            stream = streams[index % 2]
            if index < 2:
                stream.hold(True)
                stream.add(array, float(step))
            plan.submit(index, array.ctypes.data, array.ctypes.data, stream.handle)
        plan.flush()
        while not plan.wait(0.1):
            pass
        assert plan.error() is None
        plan.order_after(gpu.stream.handle)
        for stream in streams:
            stream.hold(False)
        for stream in streams:
            stream.wait()  # a stream on which tensors were handed over waits, too: their memory may be given away
        for index, array in enumerate(arrays):
            expected = sum(rank + index + (step if index < 2 else 0) for rank in range(hvd.size()))
            np.testing.assert_array_equal(array, np.full(5, expected))
        plan.reset()


def graphs_are_refused(gpu: Gpu) -> None:
    captured = Stream()
    captured.capture(True)
    array = np.zeros(2, np.float32)
    refused = pytest.raises(ValueError, match=r"a CUDA graph is being captured.*Remedy: call the collective, and wait")
    with refused:
        gpu.submit("allreduce", [array], [array], "captured", op=hvd.Sum, stream=captured)
    # Others go on, as long as nothing of them is in the graph.
    handle = gpu.submit("allreduce", [array], [array], "beside a capture", op=hvd.Sum)
    handle._current_stream = lambda: captured.handle
    with refused:
        handle.wait()
    handle._current_stream = lambda: gpu.stream.handle
    gpu.finish(handle)
    captured.capture(False)


def what_nccl_cannot_do_is_refused(gpu: Gpu) -> None:
    if hvd.size() == 1 and "HOROVODISH_PLANE" not in os.environ:
        return  # nothing is reduced
    cases: list[tuple[str, str, dict[str, Any], str]] = [
        ("int16", "Sum", {}, "NCCL does not reduce int16"),
        ("int32", "Average", {}, "NCCL's average of integers counts joined ranks"),
        ("float32", "Max", {"prescale_factor": 2.0}, "NCCL scales sums of floating-point numbers only"),
        ("float16", "Sum", {"prescale_factor": 1e-7}, "loses digits"),
        ("float32", "Adasum", {}, "NCCL has no Adasum"),
    ]
    for dtype, op, options, why in cases:
        with pytest.raises(hvd.HorovodInternalError, match=why):
            gpu.reduce([np.ones(2, dtype_of(dtype))], "refused", op, **options)
    np.testing.assert_array_equal(gpu.reduce([np.ones(2)], "refused")[0], np.full(2, hvd.size()))


def sets_that_overlap(gpu: Gpu) -> None:
    """Every rank submits in an order of its own; launched in these orders, the communicators would wait for ever."""
    rank, size = hvd.rank(), hvd.size()
    wanted = [[r for r in range(size) if r != out] for out in range(size)] if size > 1 else []
    sets = [hvd.global_process_set, *(hvd.add_process_set(ranks) for ranks in wanted)]
    mine = [each for each in sets if each.included()]
    for step in range(5):
        handles = []
        for each in mine[rank % len(mine) :] + mine[: rank % len(mine)]:
            arrays = [np.full(3 + index, float(rank + step), np.float32) for index in range(2)]
            name = f"overlapping {step}"
            options = {"process_set": each, "op": hvd.Sum}
            handles.append((each, arrays, gpu.submit("allreduce", arrays, arrays, name, **options)))
        for each, arrays, handle in handles:
            gpu.finish(handle)
            for array in arrays:
                np.testing.assert_array_equal(array, np.full(array.size, sum(r + step for r in each.ranks)))
    for each in sets[1:]:
        assert hvd.remove_process_set(each)


def reduce_beside_an_idle_rank(folder: str) -> float:
    """How many seconds ranks 1 and 2 take for operations of their own, while rank 0 asks horovodish for nothing."""
    hvd.init()
    pair = hvd.add_process_set([1, 2])
    gpu, done = Gpu(), Path(folder, "done")
    hvd.barrier()
    if hvd.rank() == 0:
        wait_until(done.exists)
        return 0.0
    begin = time.monotonic()
    for step in range(TURNS):
        [total] = gpu.reduce([np.ones(3)], f"turn {step}", process_set=pair)
        np.testing.assert_array_equal(total, np.full(3, 2.0))
    seconds = time.monotonic() - begin
    hvd.barrier(process_set=pair)
    done.touch()
    return seconds


def test_an_idle_rank_gives_turns_at_once(tmp_path: Path) -> None:
    """Nobody can wake it: without shared memory every rank counts as a host of its own."""
    seconds = run_ranks(
        reduce_beside_an_idle_rank, 3, args=(str(tmp_path),), env=variables(3, HOROVODISH_PLANE="mpi_ring")
    )
    assert max(seconds) < TURNS * MOST_SECONDS_PER_TURN


def joined(gpu: Gpu) -> None:
    size = hvd.size()
    if size > 1 and hvd.rank() == size - 1:
        hvd.join(gpu.ordinal)
        return
    active = max(size - 1, 1)
    arrays = {op: [values("float64", 4, rank, op) for rank in range(active)] for op in OPS}
    for op, by_rank in arrays.items():
        results = gpu.reduce([by_rank[hvd.rank()], by_rank[hvd.rank()]], f"joined {op}", op)
        for result in results:
            assert not (wrong := difference(result, reduced(by_rank, op), 4.0 * size)), f"{op}: {wrong}"
    results = gpu.reduce([np.ones(LARGE, np.float32), np.ones(3, np.float32)], "joined large ones", "Average")
    assert all((result == 1.0).all() for result in results)
    [gathered] = gpu.finish(gpu.submit("allgather", [np.full((2, 1), hvd.rank())], [None], "joined rows"))
    np.testing.assert_array_equal(gathered[:, 0], np.repeat(np.arange(active), 2))
    rows = np.arange(float(2 * size + 1))
    target = np.empty(2 + (hvd.rank() < 1), np.float64)
    gpu.finish(gpu.submit("reducescatter", [rows], [target], "joined parts", op=hvd.Average))
    begin = 2 * hvd.rank() + min(hvd.rank(), 1)
    np.testing.assert_allclose(target, rows[begin : begin + len(target)])
    hvd.join(gpu.ordinal)


@pytest.mark.parametrize("np", [1, 2, 3])
def test_collectives_on_gpus(np: int) -> None:
    run_ranks(use_gpus, np, env=variables(np))


def test_a_rank_alone_over_nccl() -> None:
    run_ranks(use_gpus, 1, env=variables(1, HOROVODISH_PLANE="nccl"))


def test_a_driver_without_a_compiler() -> None:
    run_ranks(use_gpus, 1, env=variables(1, HOROVODISH_PLANE="nccl", PRETEND_NO_COMPILER="1"))


def record_phases(folder: str) -> None:
    hvd.init()
    gpu = Gpu()
    path = Path(folder) / "trace.json"
    hvd.start_timeline(str(path))
    gpu.reduce([np.ones(3), np.ones(4)], "fused")
    hvd.stop_timeline()
    if hvd.rank() == 0:
        tracks = tracks_of(path.with_name("trace.rank-0.json") if not path.exists() else path, 0)
        [whole] = tracks["fused"]
        assert [phase for phase in whole.phases() if phase not in ("negotiate", "queue")] == [
            "connect",
            "pack",
            "nccl",
            "unpack",
        ]


@pytest.mark.parametrize(("np", "plane"), [(2, "auto"), (1, "nccl")])
def test_the_timeline_shows_what_is_launched(np: int, plane: str, tmp_path: Path) -> None:
    run_ranks(record_phases, np, args=(str(tmp_path),), env=variables(np, HOROVODISH_PLANE=plane))


def share_a_gpu() -> str:
    hvd.init()
    gpu = Gpu(0)
    with pytest.raises(hvd.HorovodInternalError) as raised:
        gpu.reduce([np.ones(3)], "shared")
    the_engine_goes_on()
    return str(raised.value)


def test_ranks_that_share_a_gpu_are_refused() -> None:
    """In words, on every rank, before NCCL says something else."""
    for text in run_ranks(share_a_gpu, 2, env=variables(1)):
        assert "rank 0 and rank 1 both use GPU 0 (Pretended GPU) of host " in text
        assert (
            "Remedy: let every rank choose its own GPU before it uses CUDA, by torch.cuda.set_device(hvd.local_rank())"
            in text
        )


def share_a_gpu_on_purpose() -> None:
    hvd.init()
    np.testing.assert_array_equal(Gpu(0).reduce([np.ones(3)], "shared")[0], np.full(3, hvd.size()))
    assert os.environ["NCCL_HOSTID"].endswith(f"-{hvd.rank()}")


def test_ranks_may_share_a_gpu_on_purpose() -> None:
    run_ranks(share_a_gpu_on_purpose, 2, env=variables(1, HOROVODISH_TEST_SHARED_GPU="1"))


def come_back_with_a_gpu() -> None:
    """What refused the set while a rank without a GPU had joined does not refuse it afterwards."""
    hvd.init()
    if hvd.rank() == 0:
        why = r"rank 1 on host \S+: it joined before it used a GPU"
        with pytest.raises(hvd.HorovodInternalError, match=why):
            Gpu().reduce([np.ones(3)], "without rank 1")
    hvd.join()
    for step in range(3):
        np.testing.assert_array_equal(Gpu().reduce([np.ones(3)], f"back {step}")[0], np.full(3, hvd.size()))
    if hvd.rank() == 1:
        hvd.join()  # its GPU is known now
    else:
        np.testing.assert_array_equal(Gpu().reduce([np.ones(3)], "again without rank 1")[0], np.ones(3))
        hvd.join()


def test_a_rank_that_joins_without_a_gpu_comes_back_with_one() -> None:
    run_ranks(come_back_with_a_gpu, 2, env=variables(2))
