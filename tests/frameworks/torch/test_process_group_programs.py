"""Random programs of process groups: results are right, and where a rank fails, the others do not hang.

A seed gives a program: groups that begin and end, asynchronous calls, and calls that block. It is the same on all
ranks, but each rank waits for its calls in an order of its own.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import horovodish.torch as hvd
from horovodish.errors import HorovodInternalError
from support.on_ranks import on_ranks
from support.process_groups import begin, begin_over_tcp, numbers
from support.processes import all_pids
from support.ranks import run_ranks_to_their_ends

STEPS = 60
COUNTS = (0, 1, 5, 1000, 30_000)
LONGEST_DELAY_SECONDS = 0.02
TIMEOUT_SECONDS = 6.0
"""The timeout of groups where a rank fails."""
ASYNCHRONOUS = (
    "all_reduce",
    "reduce",
    "broadcast",
    "gather",
    "all_gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "ring",
)
BLOCKING = ("objects", "callback", "new_group", "destroy")
FAULTS = {"dies": signal.SIGKILL, "stops": signal.SIGSTOP, "raises": None}
"""One that stops is killed when the others have ended."""

Started = tuple[list[Any], list[Tensor], list[Tensor]]
"""Works, the results that are there once these have ended, and what the results must be."""


@dataclass
class Group:
    group: dist.ProcessGroup
    ranks: list[int]
    under_way: list[Started] = field(default_factory=list)

    def start(self, kind: str, count: int, root: int, salt: int) -> Started:
        size, me, group = len(self.ranks), self.ranks.index(hvd.rank()), self.group
        inputs = [numbers((size, count), torch.float64, each, salt) for each in self.ranks]
        total, own, room = sum(inputs[1:], inputs[0]), inputs[me].clone(), torch.zeros(count, dtype=torch.float64)
        whole, is_root = torch.zeros_like(own), me == root
        if kind == "all_reduce":
            return [dist.all_reduce(own, group=group, async_op=True)], [own], [total]
        if kind == "reduce":
            work = dist.reduce(own, group_dst=root, group=group, async_op=True)
            return [work], [own], [total if is_root else inputs[me]]
        if kind == "broadcast":
            return [dist.broadcast(own, group_src=root, group=group, async_op=True)], [own], [inputs[root]]
        if kind == "gather":
            rooms = list(whole) if is_root else None
            work = dist.gather(own[0], rooms, group_dst=root, group=group, async_op=True)
            return [work], rooms or [], [each[0] for each in inputs] if is_root else []
        if kind == "all_gather":
            return [group._allgather_base(whole, own[0])], list(whole), [each[0] for each in inputs]
        if kind == "scatter":
            parts = list(own) if is_root else None
            work = dist.scatter(room, parts, group_src=root, group=group, async_op=True)
            return [work], [room], [inputs[root][me]]
        if kind == "reduce_scatter":
            return [group._reduce_scatter_base(room, own)], [room], [total[me]]
        if kind == "all_to_all":
            work = dist.all_to_all_single(whole, own, group=group, async_op=True)
            return [work], list(whole), [each[me] for each in inputs]
        if size == 1:
            return [], [], []
        send = dist.isend(own[0], group_dst=(me + 1) % size, group=group)
        return [send, dist.irecv(room, group_src=(me - 1) % size, group=group)], [room], [inputs[me - 1][0]]

    def call(self, kind: str, salt: int) -> None:
        if kind == "objects":
            found: list[Any] = [None] * len(self.ranks)
            dist.all_gather_object(found, {"from": hvd.rank()}, group=self.group)
            assert [each["from"] for each in found] == self.ranks
            return

        def again(future: Any) -> Tensor:
            return dist.all_reduce(future.value()[0], group=self.group, async_op=True).get_future().wait()[0]

        first = dist.all_reduce(torch.full((3,), float(salt)), group=self.group, async_op=True)
        assert first.get_future().then(again).wait().tolist() == [float(salt * len(self.ranks) ** 2)] * 3

    def finish(self, number: int) -> None:
        works, results, expected = self.under_way.pop(number)
        for work in works:
            assert work.wait() and work.is_completed() and work.is_success()
        for result, right in zip(results, expected, strict=True):
            assert torch.equal(result, right)


def run_program(seed: int, timeout: float = 60, fault: str = "", victim: int = 0) -> None:
    """The groups of the world exist. The last step ends all others."""
    program, own, limit = random.Random(seed), random.Random(1000 * hvd.rank() + seed), timedelta(seconds=timeout)
    fails_at = program.randrange(STEPS)
    assert dist.group.WORLD is not None
    groups = [Group(dist.group.WORLD, list(range(hvd.size())))]
    for step in range(STEPS):
        is_blocking = program.random() < 0.25
        kind, number = program.choice(BLOCKING if is_blocking else ASYNCHRONOUS), program.randrange(len(groups))
        ranks = sorted(program.sample(range(hvd.size()), program.randint(1, hvd.size())))
        count, root = program.choice(COUNTS), program.randrange(len(groups[number].ranks))
        if fault and step == fails_at and hvd.rank() == victim:
            commit(fault, own.choice([0.0, own.uniform(0, LONGEST_DELAY_SECONDS)]))
        group = groups[number]
        if kind == "new_group":
            groups.append(Group(dist.new_group(ranks, timeout=limit), ranks))
        elif kind == "destroy":
            if number:
                end(groups.pop(number))
        elif hvd.rank() not in group.ranks:
            pass
        elif is_blocking:
            group.call(kind, step)
        else:
            group.under_way.append(group.start(kind, count, root, step))
        while (busy := [each for each in groups if each.under_way]) and own.random() < 0.5:
            each = own.choice(busy)
            each.finish(own.randrange(len(each.under_way)))
    for group in reversed(groups[1:]):
        end(group)
    while groups[0].under_way:
        groups[0].finish(0)


def end(group: Group) -> None:
    if hvd.rank() in group.ranks:
        while group.under_way:
            group.finish(0)
        dist.barrier(group.group)
        dist.destroy_process_group(group.group)


def commit(fault: str, delay: float) -> None:
    number = FAULTS[fault]
    if number is None:
        raise ValueError("a reason of its own")
    if delay:
        threading.Timer(delay, os.kill, (os.getpid(), number)).start()
    else:
        os.kill(os.getpid(), number)


@pytest.mark.soak
@on_ranks(2, 3, (4, "mpi_ring"))
def test_random_programs(tmp_path: Path) -> None:
    begin(tmp_path)
    for seed in range(8):
        run_program(seed)
    dist.destroy_process_group()


def _fails(folder: str, seed: int, fault: str, victim: int) -> str:
    """What this rank hears of the victim's end; nothing if it comes to its own end before."""
    hvd.init()
    pids, heard = all_pids(), ""
    begin_over_tcp(TIMEOUT_SECONDS)
    try:
        run_program(seed, TIMEOUT_SECONDS, fault, victim)
    except HorovodInternalError as problem:
        heard = f"{type(problem).__name__}: {problem}"
    if hvd.rank() == victim:
        threading.Event().wait()  # for a signal that comes late
    with contextlib.suppress(HorovodInternalError):
        dist.destroy_process_group()
    Path(folder, f"ended {hvd.rank()}").touch()
    others = [rank for rank in range(hvd.size()) if rank != victim]
    if fault == "stops" and all(Path(folder, f"ended {rank}").exists() for rank in others):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[victim], signal.SIGKILL)
    return heard


def check_fault(folder: Path, seed: int, fault: str) -> None:
    choice = random.Random(seed)
    ranks, plane = choice.randint(2, 4), choice.choice(["auto", "mpi_ring"])
    victim, env = choice.randrange(ranks), {"HOROVODISH_PLANE": plane}
    outcomes = run_ranks_to_their_ends(_fails, ranks, args=(str(folder), seed, fault, victim), timeout=150, env=env)
    said = f"seed {seed}: rank {victim} of {ranks} {fault}, plane {plane}\n"
    said += "\n".join(
        f"--- rank {each.rank} {each.ended}: {each.result} {each.error}\n{each.output}" for each in outcomes
    )
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.ended == "returned", said
            assert not outcome.result or "rank" in outcome.result, said
        else:
            assert outcome.ended == ("raised" if fault == "raises" else "died"), said


@pytest.mark.parametrize("fault", ["dies", "raises", pytest.param("stops", marks=pytest.mark.soak)])
def test_a_rank_fails_within_a_program(tmp_path: Path, fault: str) -> None:
    check_fault(tmp_path, 2, fault)  # of rank 0, which holds the store


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3, 23))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_fails_within_any_program(tmp_path: Path, fault: str, seed: int) -> None:
    check_fault(tmp_path, seed, fault)
