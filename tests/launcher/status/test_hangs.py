"""`horovodish status` names the rank, its host and the call, however a job hangs."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest

from horovodish.launcher.status.jobs import ask
from support.mpi_command import is_open_mpi
from support.processes import is_stopped, wait_until
from support.status import wait_for_sentence

HOST = re.escape(socket.gethostname())
WAITED = r"for \d+ s"
IDLE = r"Rank {late} has nothing under way; it last submitted 'before', and nothing for \d+ s"
MISSING = "rank {late} on {host} has not called allreduce 'layer.weight': ranks {others} have waited for it {waited}"
STOPPED = "rank {late} on {host} is stopped; ranks {others} have waited in {call} {waited}"
GOES_ON = r"\. kill -CONT \d+ there lets it go on"

# What the late rank does, while the others call `layer.weight`.
LATE = {
    "sleeps": "time.sleep(1000)",
    "computes": "while True: pass",
    "sleeps in C": "ctypes.CDLL(None).sleep(1000)",
    "holds the GIL": "ctypes.PyDLL(None).sleep(1000)",
    "waits for a child": "import subprocess; subprocess.run(['sleep', '1000'])",
}
CASES = [(what, 1, "auto") for what in LATE] + [
    ("sleeps", 0, "auto"),
    ("sleeps", 0, "mpi_ring"),
    ("sleeps", 2, "mpi_ring"),
]


def text(form: str, late: int, **more: str) -> str:
    others = ", ".join(str(rank) for rank in range(3) if rank != late).replace("1, 2", "1-2").replace("0, 1", "0-1")
    return form.format(late=late, host=HOST, others=others, waited=WAITED, **more)


@pytest.mark.parametrize(("what", "late", "plane"), CASES)
def test_a_rank_that_is_late(hang: Callable[..., Any], what: str, late: int, plane: str) -> None:
    job = hang(f"begin()\nif rank == {late}:\n    {LATE[what]}\ncall()\n", plane=plane)
    sentences = wait_for_sentence(job.process.pid, text(rf"{MISSING}\. {IDLE}", late))
    assert len(sentences) == 1


@pytest.mark.parametrize(("late", "plane"), [(0, "auto"), (1, "auto"), (0, "mpi_ring"), (1, "mpi_ring")])
def test_a_rank_that_is_stopped_before_a_call(hang: Callable[..., Any], late: int, plane: str) -> None:
    job = hang(f"begin()\nif rank == {late}:\n    stop()\ncall()\n", plane=plane)
    expected = text(STOPPED, late, call="allreduce 'layer.weight'") + GOES_ON
    assert len(wait_for_sentence(job.process.pid, expected)) == 1


STOPS_WITHIN = """
from support.midway import LargeReduction
begin()
while True:
    reduction = LargeReduction()
    if rank == {late} and reduction.catch():
        stop()
    reduction.finish()
"""


@pytest.mark.parametrize(("late", "plane"), [(1, "auto"), (0, "mpi_ring")])
def test_a_rank_that_is_stopped_within_a_call(hang: Callable[..., Any], late: int, plane: str) -> None:
    job = hang(STOPS_WITHIN.format(late=late), plane=plane)
    expected = text(STOPPED, late, call="allreduce 'large'") + GOES_ON
    assert len(wait_for_sentence(job.process.pid, expected)) == 1


def test_ranks_that_have_joined_wait_for_one_that_has_not(hang: Callable[..., Any]) -> None:
    job = hang("begin()\nif rank == 1:\n    time.sleep(1000)\nhvd.join()\n")
    expected = text(
        rf"rank 1 on {{host}} has not called join\(\): ranks 0, 2 have waited for it {{waited}}\. {IDLE}", 1
    )
    assert len(wait_for_sentence(job.process.pid, expected)) == 1


def test_ranks_that_call_different_things(hang: Callable[..., Any]) -> None:
    job = hang("begin()\ncall(f'x{rank}')\n")
    begin = text("ranks 1-2 on {host} have not called allreduce 'x0': rank 0 has waited for it {waited}", 0)
    sentences = wait_for_sentence(job.process.pid, begin, count=3)
    assert text("ranks 0, 2 on {host} have not called allreduce 'x1': rank 1 has waited", 1) in "\n".join(sentences)
    assert len(sentences) == 3


@pytest.mark.parametrize(
    ("operation", "called"),
    [
        ("hvd.broadcast(np.zeros(3), 0, name='b')", "broadcast 'b'"),
        ("hvd.allgather(np.zeros(3), name='g')", "allgather 'g'"),
        ("hvd.grouped_allreduce([np.zeros(3), np.zeros(4)], name='batch')", "allreduce 'batch'"),
        ("hvd.allreduce(np.zeros(3))", "call 1 of allreduce"),
    ],
)
def test_the_call_is_named(hang: Callable[..., Any], operation: str, called: str) -> None:
    job = hang(f"begin()\nif rank == 1:\n    time.sleep(1000)\n{operation}\n")
    wait_for_sentence(job.process.pid, text(rf"rank 1 on {{host}} has not called {called}: ranks 0, 2 have .*", 1))


def test_a_process_set(hang: Callable[..., Any]) -> None:
    code = "pair = hvd.ProcessSet([0, 2])\nhvd.init(process_sets=[pair])\ncall('before')\n"
    code += "if rank == 2:\n    time.sleep(1000)\n"
    code += "if rank == 0:\n    hvd.allreduce(np.zeros(3), name='x', process_set=pair)\n"
    job = hang(code + "time.sleep(1000)\n")
    expected = rf"rank 2 on {HOST} has not called allreduce 'x': rank 0 has waited for it {WAITED}\..*"
    assert len(wait_for_sentence(job.process.pid, expected)) == 1


def test_a_receive_without_a_send(hang: Callable[..., Any]) -> None:
    code = "from horovodish.collectives import transfers\n"
    code += "from horovodish.collectives.array_adapter import ARRAYS\nbegin()\n"
    code += (
        "if rank == 0:\n    transfers.receive(ARRAYS, np.zeros(3), 1, 5, name='activations').wait()\ntime.sleep(1000)\n"
    )
    expected = rf"rank 0 on {HOST} waits in receive of 'activations' from rank 1 with tag 5, {WAITED}"
    assert len(wait_for_sentence(hang(code).process.pid, expected)) == 1


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize(
    ("how", "is_it"), [("time.sleep(1000)", "sleeps, or waits for something"), ("stop()", "is stopped.*")]
)
def test_a_rank_that_does_not_come_to_init(hang: Callable[..., Any], late: int, how: str, is_it: str) -> None:
    job = hang(f"if rank == {late}:\n    {how}\nbegin()\n")
    expected = (
        rf"ranks {{others}} have waited in init\(\) {{waited}}: rank {late} on {{host}} has not called init\(\): "
    )
    assert len(wait_for_sentence(job.process.pid, text(expected, late) + rf"its process \d+ {is_it}")) == 1


def test_a_rank_that_does_not_come_to_the_end(hang: Callable[..., Any]) -> None:
    job = hang("begin()\nif rank == 1:\n    time.sleep(1000)\n")
    wait_for_sentence(
        job.process.pid, rf"ranks 0, 2 have waited at the end .* {WAITED}: rank 1 on {HOST}: its process .*"
    )


def test_an_engine_that_has_begun_again(hang: Callable[..., Any]) -> None:
    job = hang("begin()\nhvd.shutdown()\nbegin()\nif rank == 1:\n    time.sleep(1000)\ncall()\n")
    wait_for_sentence(job.process.pid, text(rf"{MISSING}\. {IDLE}", 1))


def test_a_rank_of_an_elastic_job(hang: Callable[..., Any]) -> None:
    job = hang("begin()\nif rank == 1:\n    time.sleep(1000)\ncall()\n", flags=["--min-np", "1"])
    wait_for_sentence(job.process.pid, text(rf"{MISSING}\. {IDLE}", 1))


RECOVERS = """
from horovodish.elastic import ObjectState
died = sys.argv[0] + ".died"
hvd.init()
state = ObjectState(step=0)

@hvd.elastic.run
def train(state):
    while True:
        hvd.allreduce(np.zeros(3), name="gradient")
        if hvd.rank() == 2 and not os.path.exists(died):
            open(died, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if state.step == 5 and hvd.rank() == 1:
            time.sleep(1000)
        state.step += 1
        state.commit()

train(state)
"""


@pytest.mark.skipif(not is_open_mpi(), reason="ranks that go on in their processes need Open MPI")
def test_a_rank_is_late_after_another_one_was_lost(hang: Callable[..., Any]) -> None:
    job = hang(RECOVERS, flags=["--min-np", "1"])
    expected = rf"rank 1 on {HOST} has not called allreduce 'gradient': rank 0 has waited for it {WAITED}\. Rank 1 .*"
    wait_for_sentence(job.process.pid, expected)
    wait_until(lambda: len(ask(str(job.process.pid), "status")) == 2)  # other ranks wait to train as well
    training, others = ask(str(job.process.pid), "status")
    assert any(rank.has_page for rank in training.ranks) and not any(rank.has_page for rank in others.ranks)


def test_a_send_that_nobody_receives(hang: Callable[..., Any]) -> None:
    """Larger than what the memory that two ranks share has room for."""
    code = "from horovodish.collectives import transfers\n"
    code += "from horovodish.collectives.array_adapter import ARRAYS\nbegin()\n"
    code += "if rank == 0:\n    transfers.send(ARRAYS, np.zeros(1 << 20), 1, 5, name='activations').wait()\n"
    job = hang(code + "time.sleep(1000)\n")
    expected = rf"rank 0 on {HOST} waits in send of 'activations' to rank 1 with tag 5, {WAITED}"
    assert len(wait_for_sentence(job.process.pid, expected)) == 1


def test_a_supervisor_that_is_stopped_with_its_rank(hang: Callable[..., Any]) -> None:
    job = hang("begin()\nif rank == 1:\n    os.kill(os.getppid(), signal.SIGSTOP)\n    stop()\ncall()\n")
    (sentence,) = wait_for_sentence(
        job.process.pid,
        rf"rank 1 on {HOST} does not answer: the supervisor or the host is stopped; ranks 0, 2 have waited in "
        rf"allreduce 'layer.weight' {WAITED}\. If it is the supervisor, kill -CONT \d+ there lets it go on",
    )
    supervisor = int(re.findall(r"-CONT (\d+)", sentence)[0])
    assert is_stopped(supervisor)
    os.kill(supervisor, signal.SIGCONT)
    wait_for_sentence(job.process.pid, text(STOPPED, 1, call="allreduce 'layer.weight'") + GOES_ON)
