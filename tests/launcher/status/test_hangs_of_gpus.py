"""`horovodish status` names the rank whose GPU keeps the others waiting. GPUs are pretended."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horovodish.launcher.status.diagnosis import diagnosis
from support.gpu import needs_gpu
from support.pretended_gpu import variables
from support.processes import wait_until
from support.status import asked, wait_for_sentence

HOST = re.escape(socket.gethostname())
PRELUDE = """
from support.pretended_gpu import Gpu, Stream

hvd.init()
gpu = Gpu()
gpu.reduce([np.ones(6)], "before")
gpu_hangs = lambda: (gpu.stream.hold(True), gpu.stream.add(np.zeros(1, np.float32), 0.0))
memory = []

def launch(name, kind="allreduce", **options):
    target = None if kind == "allgather" else np.empty(3 if kind == "reducescatter" else 6)
    options |= {"op": hvd.Sum} if "reduce" in kind else {}
    memory.append((target, gpu.submit(kind, [np.ones(6)], [target], name, **options)))
    memory[-1][1].wait()

"""
BEHIND = (
    r"the GPU of rank {late} on {host} has not started {call}, launched \d+ s ago: "
    "it still computes earlier work, or hangs"
)
WAIT = "; the GPUs of ranks {others} wait for it"


@pytest.fixture
def hang_on_gpus(hang: Callable[..., Any]) -> Callable[..., Any]:
    """A function that starts 3 ranks, each with a GPU."""
    return lambda code: hang(PRELUDE + code, **variables(3))


def text(form: str, late: int, call: str = "allreduce 'layer.weight'") -> str:
    return form.format(late=late, host=HOST, call=call, others={0: "1-2", 1: "0, 2", 2: "0-1"}[late])


@pytest.mark.parametrize(
    ("kind", "late"),
    [("allreduce", 0), ("allreduce", 1), ("broadcast", 2), ("allgather", 1), ("reducescatter", 1)],
)
def test_a_gpu_that_hangs(hang_on_gpus: Callable[..., Any], kind: str, late: int) -> None:
    job = hang_on_gpus(f"if rank == {late}: gpu_hangs()\nlaunch('layer.weight', '{kind}')\ngpu.stream.wait()\n")
    expected = text(BEHIND + WAIT, late, f"{kind} 'layer.weight'")
    assert len(wait_for_sentence(job.process.pid, expected)) == 1


def test_of_several_operations_the_first_is_named(hang_on_gpus: Callable[..., Any]) -> None:
    job = hang_on_gpus("if rank == 1: gpu_hangs()\nfor n in range(5): launch(f'layer {n}')\ngpu.stream.wait()\n")
    assert len(wait_for_sentence(job.process.pid, text(BEHIND + WAIT, 1, "allreduce 'layer 0'"))) == 1


WAITS_FOR_ITS_GPU = """
if rank == 1: gpu_hangs()
launch("layer.weight")
if rank == 0: gpu.stream.wait()
hvd.allreduce(np.ones(1), name="loss")
"""


def test_a_rank_that_waits_for_another_gpu_is_not_blamed_first(hang_on_gpus: Callable[..., Any]) -> None:
    first, second = wait_for_sentence(hang_on_gpus(WAITS_FOR_ITS_GPU).process.pid, text(BEHIND + WAIT, 1), count=2)
    assert re.fullmatch(text(BEHIND + WAIT, 1), first)
    assert re.fullmatch(
        rf"rank 0 on {HOST} has not called allreduce 'loss': ranks 1-2 have waited for it for \d+ s\. Rank 0 launched "
        r"allreduce 'layer.weight' on its GPU \d+ s ago, and the GPU has started it, and waits for another rank's GPU "
        r"or hangs; last submitted 'layer.weight', and nothing for \d+ s",
        second,
    )


def test_a_rank_is_stopped_while_gpus_wait_for_its_gpu(hang_on_gpus: Callable[..., Any]) -> None:
    job = hang_on_gpus("if rank == 1: gpu_hangs()\nlaunch('layer.weight')\nif rank == 1: stop()\ngpu.stream.wait()\n")
    expected = text(r"rank 1 on {host} is stopped; ranks 0, 2 have waited in {call} for \d+ s\. kill .*", 1)
    assert len(wait_for_sentence(job.process.pid, expected)) == 1


OTHER_SETS = """
pairs = [hvd.add_process_set(ranks) for ranks in ([0, 1], [1, 2], [0, 2])]
mine = [pair for pair in pairs if pair.included()]
for pair in mine: gpu.reduce([np.ones(6)], "before", process_set=pair)
hvd.barrier()
if rank == 1: gpu_hangs()
for pair in mine: launch(f"of {pair.ranks}", process_set=pair)
gpu.stream.wait()
"""


def test_operations_of_other_sets_wait_behind_it(hang_on_gpus: Callable[..., Any]) -> None:
    """The GPU of rank 2 waits for rank 1, and the operation of ranks 0 and 2 is behind that on their streams."""
    job = hang_on_gpus(OTHER_SETS)
    expected = text(BEHIND + "; the GPU of rank 0 waits for it", 1, r"allreduce 'of \[0, 1\]'")
    assert len(wait_for_sentence(job.process.pid, expected)) == 1
    found = asked(job.process.pid)
    assert found is not None
    calls = {each.rank: (each.gpu.call, each.gpu.has_started) for each in found.ranks if each.gpu}
    assert calls == {
        0: ("allreduce 'of [0, 1]'", True),
        1: ("allreduce 'of [0, 1]'", False),
        2: ("allreduce 'of [1, 2]'", True),
    }


def test_a_gpu_that_is_slow(hang_on_gpus: Callable[..., Any], tmp_path: Path) -> None:
    """Nothing is wrong any more once it has come to the operation."""
    code = "if rank == 1: gpu_hangs()\nlaunch('layer.weight')\n"
    code += f"while not os.path.exists('{tmp_path}/go'): time.sleep(0.01)\n"
    job = hang_on_gpus(code + "gpu.stream.hold(False)\ngpu.stream.wait()\ncall()\ntime.sleep(1000)\n")
    wait_for_sentence(job.process.pid, text(BEHIND + WAIT, 1))
    (tmp_path / "go").touch()
    wait_until(lambda: (found := asked(job.process.pid)) is not None and not diagnosis(found))


TWO_STREAMS = """
second, first = Stream(), gpu.stream
for stream in (first, second): stream.hold(True)
for name, gpu.stream in (("first", first), ("second", second)):
    gpu.stream.add(np.zeros(1, np.float32), 0.0)
    launch(name)
while not os.path.exists("{folder}/go"): time.sleep(0.01)
first.hold(False)
time.sleep(1000)
"""


def test_a_gpu_that_ends_operations_is_not_idle(hang_on_gpus: Callable[..., Any], tmp_path: Path) -> None:
    """Even if each was launched long ago, because the script is far ahead of it."""
    job = hang_on_gpus(TWO_STREAMS.format(folder=tmp_path))
    wait_for_sentence(job.process.pid, r"the GPUs of ranks 0-2 on .* have not started allreduce 'first', launched .*")
    (tmp_path / "go").touch()

    def ends_next(name: str) -> bool:
        found = asked(job.process.pid)
        gpus = [each.gpu for each in found.ranks] if found else []
        return bool(gpus) and all(
            gpu is not None and gpu.name == name and gpu.idle_seconds < gpu.launched_seconds - 1 for gpu in gpus
        )

    wait_until(lambda: ends_next("second"))


ON_A_GPU = """
import torch
import horovodish.torch as hvd

hvd.init()
tensor = torch.ones(1000, device="cuda:0")
hvd.allreduce(tensor, name="before")
torch.cuda.synchronize()
if rank == 1: torch.cuda._sleep(10**11)
hvd.allreduce(tensor, name="layer.weight")
torch.cuda.synchronize()
"""


@pytest.mark.gpu
def test_a_gpu_that_computes(hang: Callable[..., Any]) -> None:
    needs_gpu()
    job = hang(ON_A_GPU, HOROVODISH_TEST_SHARED_GPU="1")
    assert len(wait_for_sentence(job.process.pid, text(BEHIND + WAIT, 1))) == 1
