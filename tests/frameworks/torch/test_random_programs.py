"""Random programs of all collectives, in a random order on each rank, against NumPy: 200 of them on 3 ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import horovodish.torch as hvd
from support.model import PLANES, difference
from support.programs import Call, difference_of_objects, program
from support.ranks import run_ranks
from support.tensors import array_of, tensor_of

SEEDS = 200
SETS = [(0, 1, 2), (0, 1), (0, 2), (1, 2), (1,)]

Sets = dict[tuple[int, ...], hvd.ProcessSet]
Finish = Callable[[], None]


def run_programs(seeds: range) -> int:
    """Gives how many collectives this rank took part in."""
    hvd.init()
    sets: Sets = {SETS[0]: hvd.global_process_set, **{ranks: hvd.add_process_set(ranks) for ranks in SETS[1:]}}
    calls = 0
    for seed in seeds:
        try:
            calls += run_program(seed, sets)
        except BaseException as error:
            raise AssertionError(f"program {seed}: {error}") from error
    hvd.barrier()
    return calls


def run_program(seed: int, sets: Sets) -> int:
    """In each phase: its calls with handles in this rank's order, some waits for earlier ones, and the blocking call.

    Nobody deadlocks: what a rank waits for, all ranks have submitted once they come to the same phase.
    """
    own = random.Random(seed * 1000 + hvd.rank())
    waiting: list[Finish] = []
    calls = 0
    for phase in program(seed, SETS):
        earlier, waiting = waiting, []
        own.shuffle(earlier)
        mine = [call for call in phase.with_handles if hvd.rank() in call.ranks]
        own.shuffle(mine)
        for call in mine:
            if earlier and own.random() < 0.5:
                earlier.pop()()
            finish = started(call, sets)
            if not call.dropped:
                waiting.append(finish)
        waiting += earlier
        calls += len(mine)
        if phase.blocking is not None and hvd.rank() in phase.blocking.ranks:
            blocked(phase.blocking, sets)
            calls += 1
    own.shuffle(waiting)
    for finish in waiting:
        finish()
    return calls


def started(call: Call, sets: Sets) -> Finish:
    """Makes a call that gives a handle; what comes back waits for it and compares."""
    if call.kind == "sparse_allreduce":
        (dense,) = call.arrays(hvd.rank())
        sparse = tensor_of(dense).to_sparse(1)
        finish = hvd.sparse_allreduce_async(sparse, str(call.name), getattr(hvd, call.op), sets[call.ranks])
        return lambda: compare(call, [finish().to_dense()])
    tensors = inputs(call)
    function = getattr(hvd, function_name(call, "_async"))
    handle = function(*arguments(call, tensors), **options(call, sets))

    def finished() -> None:
        hvd.poll(handle)
        check(call, tensors, hvd.synchronize(handle))
        assert hvd.poll(handle)

    return finished


def blocked(call: Call, sets: Sets) -> None:
    """Makes a call that blocks, and compares."""
    own, group = hvd.rank(), sets[call.ranks]
    if call.kind == "barrier":
        hvd.barrier(group)
    elif call.kind == "allgather_object":
        result = hvd.allgather_object({"rank": own}, call.name, group)
        report(call, difference_of_objects(result, [{"rank": rank} for rank in call.ranks]))
    elif call.kind == "broadcast_object":
        result = hvd.broadcast_object("x" * own, call.root, call.name, group)
        report(call, difference_of_objects(result, "x" * call.root))
    else:
        tensors = inputs(call)
        function = getattr(hvd, function_name(call, ""))
        check(call, tensors, function(*arguments(call, tensors), **options(call, sets)))


def function_name(call: Call, suffix: str) -> str:
    return ("grouped_" if call.grouped else "") + call.kind + suffix + ("_" if call.in_place else "")


def inputs(call: Call) -> list[Tensor]:
    tensors = [tensor_of(array) for array in call.arrays(hvd.rank())]
    if call.transposed:  # the same values at other strides
        order = [tuple(reversed(range(tensor.dim()))) for tensor in tensors]
        tensors = [t.permute(by).contiguous().permute(by) for t, by in zip(tensors, order, strict=True)]
    return tensors


def arguments(call: Call, tensors: list[Tensor]) -> list[Any]:
    given: list[Any] = [tensors if call.grouped else tensors[0]]
    if call.kind == "broadcast":
        given.append(call.root)
    if call.splits is not None:
        given.append(call.splits[call.ranks.index(hvd.rank())])
    return given


def options(call: Call, sets: Sets) -> dict[str, Any]:
    given: dict[str, Any] = {"name": call.name, "process_set": sets[call.ranks]}
    if call.kind in ("allreduce", "reducescatter"):
        given |= {
            "op": getattr(hvd, call.op),
            "prescale_factor": call.prescale,
            "postscale_factor": call.postscale,
        }
    return given


def check(call: Call, tensors: list[Tensor], result: Any) -> None:
    """The values; that they were written in place; and that what was given is left alone otherwise."""
    if call.splits is not None:
        result, counts = result
        report(call, difference_of_objects(counts.tolist(), call.received(hvd.rank())))
    results = result if call.grouped else [result]
    compare(call, results)
    for tensor, array, came in zip(tensors, call.arrays(hvd.rank()), results, strict=True):
        if call.in_place:
            assert came is tensor, call
        else:
            assert torch.equal(tensor, tensor_of(array)), f"{call} changed its input"


def compare(call: Call, results: list[Tensor]) -> None:
    for result, expected, (dtype, _) in zip(results, call.expected(hvd.rank()), call.members, strict=True):
        assert result.dtype == getattr(torch, dtype), call
        told = (
            difference(array_of(result), np.asarray(expected, np.float64), call.scale())
            if (expected.dtype.kind not in "biu")
            else difference(array_of(result), expected, 1.0)
        )
        report(call, told)


def report(call: Call, told: str) -> None:
    assert not told, f"{call}: {told}"


@pytest.mark.parametrize("plane", PLANES)
def test_random_programs(plane: str) -> None:
    seeds = range(SEEDS) if plane == "auto" else range(SEEDS, SEEDS + 30)
    calls = run_ranks(run_programs, 3, args=(seeds,), env={"HOROVODISH_PLANE": plane})
    assert min(calls) > 3 * len(seeds)
