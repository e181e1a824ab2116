"""How process groups of torch.distributed over our engine begin and end, and what their members hear of each other."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import horovodish.torch as hvd
from horovodish.errors import HorovodInternalError, NotInitializedError, RankLostError, StallError
from horovodish.runtime.starting import Running
from horovodish.torch.backend.meeting import Meeting
from support.documents import python_blocks
from support.elastic import Scene, run_elastic
from support.on_ranks import on_ranks
from support.process_groups import begin, begin_over_tcp
from support.ranks import run_ranks


@on_ranks(2)
def test_it_may_begin_again(tmp_path: Path) -> None:
    for turn in range(5):
        folder = tmp_path / str(turn)
        folder.mkdir(exist_ok=True)
        begin(folder)
        tensor = torch.tensor([hvd.rank() + turn])
        dist.all_reduce(tensor)
        assert tensor.item() == 2 * turn + 1
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="beside").item() == 2
        dist.destroy_process_group()
    folder = tmp_path / "last"
    folder.mkdir(exist_ok=True)
    begin(folder)
    dist.barrier()
    hvd.shutdown()
    with pytest.raises(NotInitializedError, match="process group 0 has ended, or was made before"):
        dist.barrier()
    dist.destroy_process_group()


@on_ranks(3)
def test_the_next_group_of_a_name_has_other_members(tmp_path: Path) -> None:
    for members in ([0, 1], [0, 1, 2], [1, 2], [0, 1]):
        begin(tmp_path, timeout=10)
        group = dist.new_group(members, timeout=timedelta(seconds=10))
        if hvd.rank() in members:
            tensor = torch.tensor([hvd.rank()])
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == sum(members)
        dist.destroy_process_group()


@pytest.mark.soak
@on_ranks(4)
def test_the_store_outlives_the_group(tmp_path: Path) -> None:
    """Rank 0 has the store in its process, and drops it as soon as the group has ended."""
    for _ in range(10):
        begin_over_tcp()
        dist.barrier()
        dist.destroy_process_group()


@on_ranks(3, (3, "mpi_ring"))
def test_a_member_that_fails_to_make_a_group(tmp_path: Path) -> None:
    begin(tmp_path)
    breaks = patch.object(Running, "add_process_set", side_effect=OSError("no memory")) if hvd.rank() == 1 else None
    said = "no memory" if breaks else "process group .*: rank 1 failed to make it: OSError: no memory"
    with breaks or nullcontext(), pytest.raises(OSError if breaks else HorovodInternalError, match=f"^{said}$"):
        dist.new_group()
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=dist.new_group())
    assert tensor.item() == 3, "the next group is made"
    dist.destroy_process_group()


@pytest.mark.soak
@on_ranks(1)
def test_a_store_that_does_not_answer() -> None:
    """As the TCPStore of a rank that has just died, and of one that is stopped."""
    for function in ("set", "check", "get"):
        meeting = Meeting(dist.HashStore(), 0, [0], timedelta(seconds=5), "a group")
        assert meeting(1) == [1]
        answers = Mock(wraps=meeting._store)
        getattr(answers, function).side_effect = dist.DistNetworkError("reset by peer")
        said = "^a group: the store of torch.distributed does not answer: reset by peer$"
        with patch.object(meeting, "_store", answers), pytest.raises(StallError, match=said):
            meeting(2)
    meeting = Meeting(dist.HashStore(), 0, [0], timedelta(seconds=0.5), "a group")
    answers = Mock(wraps=meeting._store)
    answers.check.side_effect = lambda _: threading.Event().wait()
    with (
        patch.object(meeting, "_store", answers),
        pytest.raises(StallError, match=r"within 0.5 s. The rank that holds it"),
    ):
        meeting(1)


def _waits_for_a_member(folder: str) -> None:
    begin(Path(folder), timeout=2)
    dist.barrier()
    missing = hvd.size() - 1
    if hvd.rank() != missing:
        call, own = "all_reduce, call 2 of process group 0", dist.all_reduce(torch.ones(1), async_op=True)
        with pytest.raises(StallError, match=rf"{call} has taken longer than its timeout of 0:00:00.3"):
            own.wait(timedelta(seconds=0.3))
        with pytest.raises(StallError, match=rf"{call}.* was submitted by .* but not by rank {missing}"):
            own.wait()
        with pytest.raises(StallError, match=rf"process group .*: rank {missing} did not come within 2 s"):
            dist.new_group(timeout=timedelta(seconds=2))
    else:
        time.sleep(6)


def _ends_its_part(folder: str, receives: bool) -> None:
    """The last member ends its groups, the newest first, while the others wait for it in the oldest.

    Afterwards all begin anew on the same store.
    """
    begin(Path(folder))
    dist.new_group(timeout=timedelta(seconds=20))
    dist.barrier()
    ends = hvd.size() - 1
    if hvd.rank() == ends:
        left = dist.irecv(torch.ones(1), src=0, tag=5)
        dist.destroy_process_group()
        with pytest.raises(HorovodInternalError, match="has called destroy_process_group"):
            left.wait()
    else:
        said = rf"rank {ends} has called destroy_process_group\(\) after \d calls of process group 0"
        with pytest.raises(HorovodInternalError, match=said):
            dist.recv(torch.ones(1), src=ends) if receives else dist.broadcast(torch.ones(10), 0)
        dist.destroy_process_group()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size(), "the job goes on"
    begin(Path(folder))
    own = torch.ones(3)
    dist.all_reduce(own)
    assert own.tolist() == [hvd.size()] * 3
    dist.destroy_process_group()


@pytest.mark.soak
@pytest.mark.parametrize("receives", [True, False])
@pytest.mark.parametrize("plane", ["auto", pytest.param("mpi_ring", marks=pytest.mark.soak)])
def test_a_member_that_ends_the_group_alone(tmp_path: Path, plane: str, receives: bool) -> None:
    run_ranks(_ends_its_part, 3, args=(str(tmp_path), receives), env={"HOROVODISH_PLANE": plane}, begin=True)


@pytest.mark.soak
def test_a_member_that_does_not_come(tmp_path: Path) -> None:
    run_ranks(_waits_for_a_member, 3, args=(str(tmp_path),), begin=True, fresh=True)


def _ends_while_another_makes_a_group(folder: str) -> None:
    begin(Path(folder))
    dist.barrier()
    if hvd.rank() == 0:
        with pytest.raises(RankLostError, match=r"process group .*: rank 1 did not come, and its script has ended or"):
            dist.new_group([0, 1])


def test_a_member_that_ends_before_it_makes_a_group(tmp_path: Path) -> None:
    run_ranks(_ends_while_another_makes_a_group, 3, args=(str(tmp_path),), begin=True, fresh=True)


def _loses_a_rank(folder: str) -> None:
    begin(Path(folder))
    dist.barrier()
    if hvd.rank() == 1:
        hvd.shutdown()
        return
    with pytest.raises(RankLostError, match=r"all_reduce, call 2 of process group 0 failed.*: rank 1"):
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()  # does not wait for rank 1


@pytest.mark.parametrize("plane", ["auto", pytest.param("mpi_ring", marks=pytest.mark.soak)])
def test_a_lost_member(tmp_path: Path, plane: str) -> None:
    run_ranks(_loses_a_rank, 3, args=(str(tmp_path),), env={"HOROVODISH_PLANE": plane}, begin=True, fresh=True)


def trains_elastically(scene: Scene, victim: int) -> tuple[list[float], list[int], int]:
    """The guide's code trains, and a rank dies. Gives the parameters, the sizes of groups, and the number in RANK."""
    hvd.init()
    torch.manual_seed(0)
    model, sizes = torch.nn.Linear(4, 1), list[int]()

    def work(state: hvd.elastic.TorchState) -> None:
        assert (dist.get_rank(), dist.get_world_size()) == (hvd.rank(), hvd.size())
        sizes.append(hvd.size())
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
        while state.step < 6:
            if scene.me == victim and state.step == 3 and scene.first_time("dies"):
                scene.die("dies")
            optimizer.zero_grad()
            wrapped(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            state.step += 1
            state.commit()

    (code,) = (block for block in python_blocks("docs/torch-distributed.md") if "elastic.run" in block)
    scope = {"dist": dist, "hvd": hvd, "socket": socket, "work": work}
    exec(code.replace("        ...\n", "        work(state)\n"), scope)
    scope["train"](hvd.elastic.TorchState(model, step=0))
    return [*model.weight.flatten().tolist(), model.bias.item()], sizes, int(os.environ["RANK"])


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1])
def test_a_group_for_each_attempt_of_an_elastic_job(tmp_path: Path, victim: int) -> None:
    ended = run_elastic(trains_elastically, tmp_path, 3, victim, flags=["--min-np", "2"])
    assert ended.status == 0, ended.said
    assert ended.fired == {f"dies {victim}"} and "in the same processes" in ended.said
    parameters, sizes, ranks = zip(*ended.results, strict=True)
    survivors = [rank for rank in range(3) if rank != victim]
    assert [each[:2] for each in sizes[:2]] == [[3, 2]] * 2
    assert list(ranks[:2]) == survivors, "RANK keeps its value"
    for own in parameters:
        torch.testing.assert_close(torch.tensor(own), torch.tensor(trained_alone()))


def trained_alone() -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    return [*model.weight.flatten().tolist(), model.bias.item()]
