"""Calls of process groups of torch.distributed over our engine, beside gloo's in the same processes."""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel

import horovodish.torch as hvd
from horovodish.errors import (
    LaunchError,
    MismatchError,
)
from horovodish.runtime.basics import quoted_failure
from support.on_ranks import on_ranks
from support.process_groups import begin, numbers

WORLDS = (1, 3, (2, "mpi_ring"))
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
MOVES = ("broadcast", "all_gather", "all_gather_single", "gather", "scatter", "all_to_all_single")
OPS = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)

Call = Callable[[dist.ProcessGroup], list[Tensor]]


def reduced(
    op: Any, dtype: torch.dtype, shape: tuple[int, ...], *, transposed: bool = False, to: int | None = None
) -> Call:
    def call(group: dist.ProcessGroup) -> list[Tensor]:
        tensor = numbers(shape, dtype, dist.get_rank(group))
        tensor = tensor.t().contiguous().t() if transposed else tensor
        if to is None:
            dist.all_reduce(tensor, op=op, group=group)
        else:
            dist.reduce(tensor, group_dst=to, op=op, group=group)
        return [tensor] if to in (None, dist.get_rank(group)) else []  # gloo writes to the others' tensors, too

    return call


def moved(what: str, dtype: torch.dtype) -> Call:
    def call(group: dist.ProcessGroup) -> list[Tensor]:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        own = numbers((2, 3), dtype, rank)
        room = [torch.zeros_like(own) for _ in range(size)]
        last = size - 1
        if what == "broadcast":
            dist.broadcast(own, group_src=last, group=group)
            return [own]
        if what == "all_gather":
            dist.all_gather(room, own, group=group)
        elif what == "all_gather_single":
            whole = own.new_zeros((2 * size, 3))
            group._allgather_base(whole, own).wait()
            return [whole]
        elif what == "gather":
            dist.gather(own, room if rank == last else None, group_dst=last, group=group)
        elif what == "scatter":
            parts = [numbers((2, 3), dtype, each, salt=1) for each in range(size)]
            dist.scatter(own, parts if rank == last else None, group_src=last, group=group)
            return [own]
        elif what == "all_to_all_single":
            leaving = [(rank + each) % 3 for each in range(size)]
            given = numbers((sum(leaving), 2), dtype, rank)
            arriving = [(rank + each) % 3 for each in range(size)]
            came = own.new_zeros((sum(arriving), 2))
            dist.all_to_all_single(came, given, arriving, leaving, group=group)
            return [came]
        return room

    return call


def check_equal(call: Call, gloo: dist.ProcessGroup, what: object) -> None:
    group = dist.group.WORLD
    assert group is not None
    for ours, theirs in zip(call(group), call(gloo), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, msg=lambda text: f"{what}: {text}")


@on_ranks(*WORLDS)
def test_reductions_are_those_of_gloo(tmp_path: Path) -> None:
    begin(tmp_path)
    gloo = dist.new_group(backend="gloo")
    for dtype in DTYPES:
        for op in OPS:
            for shape in [(), (7,), (0,), (3, 4)]:
                check_equal(reduced(op, dtype, shape), gloo, (dtype, op, shape))
    check_equal(reduced(ReduceOp.SUM, torch.float32, (3, 4), transposed=True), gloo, "transposed")
    for op in BITWISE:
        check_equal(reduced(op, torch.int32, (5,)), gloo, op)
        check_equal(reduced(op, torch.int32, (5,), to=hvd.size() - 1), gloo, op)
    dist.destroy_process_group()


@on_ranks(*WORLDS)
def test_moves_are_those_of_gloo(tmp_path: Path) -> None:
    begin(tmp_path)
    gloo = dist.new_group(backend="gloo")
    for what in MOVES:
        for dtype in (*DTYPES, torch.bool, torch.int16):
            if dtype is torch.int16 and what != "all_gather_single":
                continue  # not gloo's
            check_equal(moved(what, dtype), gloo, (what, dtype)) if dtype is not torch.int16 else None
    for dtype in (torch.complex64, torch.int16, torch.float8_e4m3fn):
        own = torch.full((3,), float(hvd.rank())).to(dtype)
        whole = torch.zeros(3 * hvd.size()).to(dtype)
        dist.group.WORLD._allgather_base(whole, own).wait()
        assert whole.to(torch.complex64).real.tolist() == [float(rank) for rank in range(hvd.size()) for _ in range(3)]
    one_of_two = torch.full((2,), complex(hvd.rank()))[::2]  # contiguous, with a stride of 2
    whole = torch.zeros(hvd.size(), dtype=one_of_two.dtype)
    dist.group.WORLD._allgather_base(whole, one_of_two).wait()
    assert whole.real.tolist() == list(range(hvd.size()))
    dist.destroy_process_group()


@on_ranks(*WORLDS)
def test_reduce_scatter_and_reduce_against_allreduce(tmp_path: Path) -> None:
    begin(tmp_path)
    size, rank = hvd.size(), hvd.rank()
    for op in (*OPS, ReduceOp.AVG):
        whole = numbers((size * 5,), torch.float64, rank)
        total = whole.clone()
        dist.all_reduce(total, op=op)
        own = torch.zeros(5, dtype=torch.float64)
        dist.group.WORLD._reduce_scatter_base(own, whole.clone(), options(dist.ReduceScatterOptions(), op)).wait()
        assert torch.equal(own, total[5 * rank : 5 * rank + 5]), op
        dist.reduce_scatter(own.zero_(), list(whole.clone().split(5)), op=op)
        assert torch.equal(own, total[5 * rank : 5 * rank + 5]), op
        mine = whole.clone()
        dist.reduce(mine, dst=size - 1, op=op)
        assert torch.equal(mine, total if rank == size - 1 else whole)
    truths = torch.tensor([rank == 0, True, False])
    dist.all_reduce(truths, op=ReduceOp.SUM)
    assert truths.tolist() == [True, True, False]
    dist.destroy_process_group()


def options(made: Any, value: Any, field: str = "reduceOp") -> Any:
    setattr(made, field, value)
    return made


@on_ranks(2, (3, "mpi_ring"))
def test_several_tensors_at_once(tmp_path: Path) -> None:
    begin(tmp_path)
    group, size, rank = dist.group.WORLD, hvd.size(), hvd.rank()

    def shaped(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        return [numbers(shape, dtype, each) for each in range(size)]

    everywhere = [
        shaped((2,), torch.float32),
        shaped((2, 3), torch.float32),
        shaped((0,), torch.float32),
        shaped((5,), torch.int16),
        shaped((3, 2), torch.float32),
    ]
    own = [each[rank] for each in everywhere]
    wholes = [each.new_zeros((size, *each.shape)) for each in own]
    group.all_gather_single_coalesced(wholes, own).wait()
    lists = [[torch.zeros_like(each) for each in own] for _ in range(size)]
    group.allgather_coalesced(lists, own).wait()
    for place, each in enumerate(everywhere):
        assert torch.equal(wholes[place], torch.stack(each))
        assert torch.equal(torch.stack([of_rank[place] for of_rank in lists]), torch.stack(each))

    given = [numbers((size * count,), dtype, rank) for count in (2, 7, 0) for dtype in (torch.float64, torch.int32)]
    totals = [each.clone() for each in given]
    group.allreduce_coalesced(totals).wait()
    parts = [each.new_zeros(each.numel() // size) for each in given]
    group.reduce_scatter_single_coalesced(parts, given).wait()
    for part, total in zip(parts, totals, strict=True):
        assert torch.equal(part, total[rank * part.numel() :][: part.numel()])
    dist.destroy_process_group()


@on_ranks(3)
def test_more_groups_than_one_can_count(tmp_path: Path) -> None:
    """Groups of equal members, made by their members alone, as many as a script may make."""
    begin(tmp_path)
    rank = hvd.rank()
    if rank > 0:
        pair = dist.new_group([1, 2], use_local_synchronization=True)
        tensor = torch.tensor([rank])
        dist.all_reduce(tensor, group=pair)
        assert tensor.item() == 3
    groups = [dist.new_group([0, 1]) for _ in range(80)]
    everybody = [dist.new_group() for _ in range(20)]
    for number, group in enumerate(groups if rank < 2 else []):
        tensor = torch.tensor([number + rank])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == 2 * number + 1
    for group in everybody:
        tensor = torch.tensor([rank])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == 3
    hers = hvd.add_process_set([0, 2])
    if hers.included():
        assert hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, process_set=hers).item() == 2
    dist.destroy_process_group()


@on_ranks(2)
def test_what_is_completed_is_there(tmp_path: Path) -> None:
    begin(tmp_path)
    room = [torch.zeros(2) for _ in range(2)]
    columns = torch.ones(3, 2)
    for work in (dist.all_gather(room, torch.ones(2), async_op=True), dist.all_reduce(columns[:, 1], async_op=True)):
        while not work.is_completed():
            pass
    assert torch.stack(room).tolist() == [[1.0, 1.0]] * 2
    assert columns.tolist() == [[1.0, 2.0]] * 3
    dist.destroy_process_group()


@on_ranks(2)
def test_roots(tmp_path: Path) -> None:
    begin(tmp_path)
    rank, world = hvd.rank(), dist.group.WORLD
    for root in (-1, 2):
        for call in (
            lambda root: dist.broadcast(torch.ones(1), group_src=root),
            lambda root: dist.reduce(torch.ones(1), group_dst=root),
            lambda root: world.gather([], [torch.ones(1)], options(dist.GatherOptions(), root, "rootRank")).wait(),
            lambda root: world.scatter([torch.ones(1)], [], options(dist.ScatterOptions(), root, "rootRank")).wait(),
            lambda root: world.send([torch.ones(1)], root, 0),
            lambda root: world.recv([torch.ones(1)], root, 0),
        ):
            with pytest.raises(ValueError, match=f"rank {root} is not in process group 0: its ranks are 0 to 1"):
                call(root)
    parts = [torch.ones(1), torch.ones(1)]
    with pytest.raises(MismatchError, match=r"root rank: rank 0 has 1, rank 1 has 0"):
        dist.reduce(torch.ones(1), dst=1 - rank)
    with pytest.raises(MismatchError, match=r"root rank: rank 0 has 0, rank 1 has 1"):
        dist.gather(torch.ones(1), parts, dst=rank)
    with pytest.raises(MismatchError, match=r"root rank: rank 0 has 0, rank 1 has 1"):
        dist.scatter(torch.ones(1), parts, src=rank)
    dist.destroy_process_group()


@on_ranks(2, (2, "mpi_ring"))
def test_ranks_that_call_different_things(tmp_path: Path) -> None:
    begin(tmp_path)
    rank, world = hvd.rank(), dist.group.WORLD
    dist.barrier()
    said = f"{'all_reduce' if rank else 'broadcast'}, call 2 of process group 0 failed on rank {rank}: the ranks "
    said += "disagree about its function: rank 0 has broadcast, rank 1 has all_reduce. Remedy: call the same"
    with pytest.raises(MismatchError, match=f"^{said}"):
        dist.all_reduce(torch.ones(3)) if rank else dist.broadcast(torch.ones(3), 0)
    with pytest.raises(MismatchError, match=r"shape"):
        dist.all_reduce(torch.ones(3 + rank))
    with pytest.raises(MismatchError, match=r"shape"):
        world._allgather_base(torch.ones(2 * (3 + rank)), torch.ones(3 + rank)).wait()
    with pytest.raises(ValueError if rank else MismatchError, match=r"the output has 5 elements"):
        world._allgather_base(torch.ones(6 - rank), torch.ones(3)).wait()
    room, own = [torch.ones(3 + rank) for _ in range(2)], torch.ones(3 + rank)
    with pytest.raises(MismatchError, match=r"rank 0 has gather of 3 elements, rank 1 has gather of 4 elements"):
        dist.gather(own, None if rank else room)
    with pytest.raises(MismatchError, match=r"rank 0 has scatter of 3 elements, rank 1 has scatter of 4 elements"):
        dist.scatter(own, None if rank else room)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)  # and the group goes on
    assert tensor.tolist() == [2.0] * 3
    dist.destroy_process_group()


@on_ranks(2)
def test_no_two_functions_stand_for_each_other(tmp_path: Path) -> None:
    """Also where the engine does the same for both, on tensors of equal shapes."""
    begin(tmp_path)
    rank, world = hvd.rank(), dist.group.WORLD
    ones, halves = torch.ones(2, dtype=torch.int32), [torch.ones(1, dtype=torch.int32) for _ in range(2)]

    def rooted(options: Any) -> Any:
        options.rootRank = 0
        return options

    def eights(dtype: torch.dtype) -> Tensor:
        return torch.ones(2).to(dtype)

    calls = [
        *(lambda op=op: dist.all_reduce(ones.clone(), op) for op in (*OPS, *BITWISE)),
        *(lambda op=op: dist.reduce(ones.clone(), 0, op) for op in (*OPS, *BITWISE)),
        *(lambda dtype=dtype: dist.broadcast(eights(dtype), 0) for dtype in (torch.uint8, *EIGHT_BITS)),
        lambda: dist.broadcast(ones.clone(), 0),
        lambda: world.reduce_scatter([ones[:1].clone()], [halves]).wait(),
        lambda: world.allgather([halves], [ones[:1]]).wait(),
        lambda: world.alltoall(halves, [each.clone() for each in halves]).wait(),
        lambda: world.gather([] if rank else [halves], [ones[:1]], rooted(dist.GatherOptions())).wait(),
        lambda: world.scatter([ones[:1].clone()], [] if rank else [halves], rooted(dist.ScatterOptions())).wait(),
        lambda: dist.barrier(),
    ]
    for first, second in itertools.permutations(calls, 2):
        with pytest.raises(MismatchError):
            (second if rank else first)()
    for call in calls:
        call()
    dist.destroy_process_group()


@on_ranks(2)
def test_an_error_in_backward_of_a_parallel_model_does_not_crash(tmp_path: Path) -> None:
    begin(tmp_path)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    loss = model(torch.ones(1, 2)).sum()
    disagree = r"disagree about its shape: rank 0 has \(3,\), rank 1 has"
    with pytest.raises((MismatchError, RuntimeError), match=disagree) as raised:
        dist.all_reduce(torch.ones(1)) if hvd.rank() else loss.backward()
    if hvd.rank() == 0:  # what is left of it where nobody catches it
        ours = quoted_failure(str(raised.value))
        assert re.match(rf"all_reduce, call \d+ of process group 0 failed on rank 0: .* {disagree}", str(ours)), ours
    dist.barrier()  # and the group goes on
    dist.destroy_process_group()


@on_ranks(2)
def test_callbacks_may_call_collectives(tmp_path: Path) -> None:
    """Whenever the future is complete, on ranks that differ in that."""
    begin(tmp_path)
    rank = hvd.rank()
    results = []
    for turn in range(20):
        first = dist.all_reduce(torch.full((4,), float(turn)), async_op=True)
        if (turn + rank) % 2:
            time.sleep(0.01)

        def again(future: Any, turn: int = turn) -> Tensor:
            work = dist.all_reduce(future.value()[0] + turn, async_op=True)
            return work.get_future().wait()[0]

        results.append((turn, first.get_future().then(again)))
        between = torch.tensor([float(turn)])
        dist.all_reduce(between)
        assert between.item() == 2 * turn
    for turn, future in results:
        assert future.wait().tolist() == [6.0 * turn] * 4
    dist.destroy_process_group()


@on_ranks(2)
def test_threads_that_call_at_once(tmp_path: Path) -> None:
    begin(tmp_path)
    totals: list[float] = []

    def call() -> None:
        for _ in range(100):
            tensor = torch.ones(1)
            work = dist.all_reduce(tensor, async_op=True)
            work.get_future()
            work.wait()
            totals.append(tensor.item())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=call) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    sys.setswitchinterval(interval)
    assert totals == [2.0] * 400
    dist.destroy_process_group()


@on_ranks(2)
def test_an_error_names_its_call_beside_one_of_a_callback(tmp_path: Path) -> None:
    begin(tmp_path)
    rank, members = hvd.rank(), dist.group.WORLD._members
    submitted, called = threading.Event(), threading.Event()
    submit = members.submit

    def submit_and_wait_for_callback(*arguments: Any, **details: Any) -> Any:
        found = submit(*arguments, **details)
        submitted.set()
        called.wait()
        return found

    def callback(_: Any) -> None:
        submitted.wait()
        members.submit = submit
        dist.barrier(async_op=True)
        called.set()

    dist.barrier(async_op=True).get_future().then(callback)
    members.submit = submit_and_wait_for_callback
    with pytest.raises(
        MismatchError, match=f"^{'all_reduce' if rank else 'broadcast'}, call 2 of process group 0 failed"
    ):
        dist.all_reduce(torch.ones(3)) if rank else dist.broadcast(torch.ones(3), 0)
    dist.destroy_process_group()


@on_ranks(1)
def test_a_callback_that_raises(tmp_path: Path) -> None:
    begin(tmp_path)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
        future.add_done_callback(lambda _: 1 / 0)
        future.then(lambda _: None).wait()  # a thread runs callbacks in turn
    assert "ZeroDivisionError" in printed.getvalue()
    dist.destroy_process_group()


@on_ranks(2)
def test_a_callback_may_be_the_first_to_call_another_group(tmp_path: Path) -> None:
    begin(tmp_path)
    other = dist.new_group()

    def again(future: Any) -> Tensor:
        return dist.all_reduce(future.value()[0], group=other, async_op=True).get_future().wait()[0]

    assert dist.all_reduce(torch.ones(2), async_op=True).get_future().then(again).wait().tolist() == [4.0, 4.0]
    dist.destroy_process_group()


@on_ranks(1)
def test_ranks_that_are_not_those_of_the_job(tmp_path: Path) -> None:
    store = dist.HashStore()
    with pytest.raises(LaunchError, match=r"has 2 ranks, horovodish 1. Remedy: start .* horovodish run -np 2"):
        dist.init_process_group("horovodish", store=store, rank=0, world_size=2)


@on_ranks(2)
def test_gradients_that_ddp_averages_too(tmp_path: Path) -> None:
    begin(tmp_path)
    model = torch.nn.Linear(3, 2)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    with pytest.raises(ValueError, match=r"averaged twice: by DistributedDataParallel"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    other = torch.nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(other.parameters(), 0.1))
    late = torch.nn.parallel.DistributedDataParallel(other)
    other(torch.ones(1, 3)).sum().backward()
    with pytest.raises(ValueError, match=r"averaged twice: by DistributedDataParallel"):
        optimizer.step()
    del wrapped, late
    dist.destroy_process_group()


@on_ranks(2)
def test_a_backend_for_one_device(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), hvd.size())
    dist.init_process_group("cpu:horovodish,cuda:nccl", store=store, rank=hvd.rank(), world_size=hvd.size())
    with pytest.raises(ValueError, match=r'"cpu:horovodish,cuda:nccl".*Remedy: init_process_group\("horovodish"\)'):
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def test_a_pytorch_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.6.0+cpu"))
    monkeypatch.delitem(sys.modules, "horovodish.torch.backend", raising=False)
    with pytest.raises(ImportError, match=r"need PyTorch 2\.7 or later, and this is 2\.6\.0\+cpu"):
        importlib.import_module("horovodish.torch.backend")
