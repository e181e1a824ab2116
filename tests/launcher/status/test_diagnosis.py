"""The sentences, from made-up answers of ranks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from horovodish.launcher.status.answers import RankStatus
from horovodish.launcher.status.diagnosis import diagnosis, what_it_does
from horovodish.launcher.status.jobs import JobStatus
from horovodish.launcher.status.show import headlines, text_of
from horovodish.launcher.status.watch import rates

HOSTS = ("alpha", "alpha", "beta", "beta")
PAGE = f"1000000000:{'00' * 256}"


def rank(number: int, *lines: str, state: str = "S", phase: str | None = "running", **known: Any) -> RankStatus:
    answer = "\n".join(("engine", *("\t".join(line.split("|")) for line in lines))) if state in "RS" else ""
    its = {
        "rank": number,
        "host": HOSTS[number],
        "process": 100 + number,
        "supervisor": 200 + number,
        "phase": phase,
        "phase_seconds": 5.0,
    }
    return RankStatus.of({**its, "state": state, "memory_kib": 2048, "page": PAGE, "answer": answer, **known})


def job(*ranks: RankStatus, **known: Any) -> JobStatus:
    return JobStatus(7, ("python", "train.py"), ranks=ranks, **known)


def waits(seconds: float, name: str = "w") -> str:
    return f"waits|0|{seconds}|{name}|allreduce '{name}'"


def test_the_rank_that_others_wait_for() -> None:
    root = rank(0, waits(41), "missing|0|41.2|w|allreduce 'w'|ranks 0, 1|ranks 2, 3")
    late = rank(2, "does|0|has nothing under way")
    assert diagnosis(job(root, rank(1, waits(40)), late, rank(3, waits(39)))) == [
        "rank 2 on beta has not called allreduce 'w': ranks 0-1, 3 have waited for it for 41 s. "
        "Rank 2 has nothing under way"
    ]


def test_a_rank_behind_a_stopped_one_is_not_blamed() -> None:
    """Rank 2 speaks for its host, and the root has not heard of rank 3's call."""
    root = rank(0, waits(9), "missing|0|9.0|w|allreduce 'w'|rank 0|ranks 2, 3")
    assert diagnosis(job(root, rank(2, state="T"), rank(3, waits(8)))) == [
        "rank 2 on beta is stopped; ranks 0, 3 have waited in allreduce 'w' for 9 s. kill -CONT 102 there lets it go on"
    ]


def test_beside_a_stopped_rank_another_one_may_be_late() -> None:
    root = rank(0, waits(9), "missing|0|9.0|w|allreduce 'w'|rank 0|ranks 1, 2")
    sentences = diagnosis(job(root, rank(1, "does|0|has nothing under way", state="R"), rank(2, state="T")))
    assert [sentence.partition(" on ")[0] for sentence in sentences] == ["rank 2", "rank 1"]


def test_a_host_that_does_not_answer() -> None:
    silent = {"state": "", "answer": ""}
    sentences = diagnosis(job(rank(0, waits(30)), rank(1, waits(30)), rank(2, **silent), rank(3, **silent)))
    assert sentences == [
        "ranks 2-3 on beta do not answer: the supervisor or the host is stopped; "
        "ranks 0-1 have waited in allreduce 'w' for 30 s. "
        "If it is the supervisor, kill -CONT 202 203 there lets it go on"
    ]


def test_an_engine_that_does_not_answer() -> None:
    (sentence,) = diagnosis(job(rank(0, answer=""), rank(1, waits(3))))
    assert sentence.startswith("rank 0 on alpha does not answer: the engine is stuck; rank 1 has waited")


def test_a_collective_that_every_rank_has_called() -> None:
    executes = "executes|0|20|w|allreduce 'w'"
    assert diagnosis(job(rank(0, executes), rank(1, executes))) == [
        "ranks 0-1 on alpha have waited in allreduce 'w' for 20 s: every rank has called it"
    ]


def gpu(how: str, launched: float = 30, idle: float = 20, name: str = "w") -> str:
    return f"gpu|0|{idle}|{name}|allreduce '{name}'|{launched}|{how}"


def test_gpus_that_keep_others_waiting() -> None:
    ranks = [rank(0, gpu("started")), rank(1, gpu("behind")), rank(2, gpu("behind", launched=31)), rank(3)]
    assert diagnosis(job(*ranks)) == [
        "the GPUs of ranks 1-2 on alpha, beta have not started allreduce 'w', launched 31 s ago: they still compute "
        "earlier work, or hang; the GPU of rank 0 waits for it"
    ]


def test_which_gpu_hangs_is_not_known() -> None:
    """Rank 0 has ended what the others have started."""
    ranks = [rank(0, gpu("started", launched=29, name="v")), *(rank(number, gpu("started")) for number in (1, 2))]
    assert diagnosis(job(*ranks)) == [
        "the GPUs of ranks 1-2 on alpha, beta have started allreduce 'w', launched 30 s ago, and not ended it: one of "
        "them hangs, or the network does"
    ]
    assert diagnosis(job(rank(1, gpu("started")))) == [
        "the GPU of rank 1 on alpha has started allreduce 'w', launched 30 s ago, and not ended it: it hangs, or waits "
        "for another rank's GPU"
    ]


def test_a_gpu_that_ends_operations_is_well() -> None:
    assert diagnosis(job(rank(0, gpu("behind", idle=0.5)), rank(1, gpu("started", idle=0.5)))) == []


def test_short_waits_are_no_illness() -> None:
    root = rank(0, waits(0.4), "missing|0|0.4|w|allreduce 'w'|rank 0|rank 1")
    assert diagnosis(job(root, rank(1, "does|0|has nothing under way"))) == []


def test_waits_outside_of_collectives() -> None:
    waits_outside = ((12.0, "rank 0 has waited in init() for 12 s: rank 1 ..."), (0.5, "rank 0 has waited in ..."))
    assert diagnosis(job(rank(0, phase="init"), rank(1, phase=None), waits=waits_outside)) == [waits_outside[0][1]]


def test_a_job_that_has_not_begun_or_ends() -> None:
    assert diagnosis(job(awaited="waiting for beta: 2 of 4 ranks can start")) == [
        "no rank has been started yet: waiting for beta: 2 of 4 ranks can start"
    ]
    assert diagnosis(job(rank(0), is_ending=True)) == ["the launcher is ending the ranks"]


@pytest.mark.parametrize(
    ("phases", "line"),
    [
        ([None, None], "the ranks start: ranks 0-1 on alpha have not called init() yet"),
        (["init", None], "the ranks start: rank 1 on alpha has not called init() yet"),
        (["init", "running"], "the ranks start: rank 0 on alpha has called init(), which has not returned yet"),
        (["running", "regroup"], "the ranks begin again: rank 1 on alpha has left the others"),
        (["running", "exit"], "the ranks end: rank 1 on alpha has come to the end of the script"),
        (["running", "training"], "all ranks run; none has waited for longer than 2 s"),
        (["training", ""], "1 of 2 ranks run; none has waited for longer than 2 s"),
        (["running", ""], "the ranks end: rank 1 on alpha has ended"),
    ],
)
def test_a_job_that_is_well(phases: list[str | None], line: str) -> None:
    assert headlines(job(*(rank(number, phase=phase) for number, phase in enumerate(phases))))[0] == line


@pytest.mark.parametrize(
    ("seconds", "line"),
    [
        (0.4, "none has waited for longer than 2 s"),
        (3.5, "rank 1 on alpha is late: others have waited for it in 70% of the time since init()"),
    ],
)
def test_a_rank_that_is_late_in_each_step(seconds: float, line: str) -> None:
    root = rank(0, "late|0|0.1", f"late|1|{seconds}")
    assert headlines(job(root, rank(1)))[0] == f"all ranks run; {line}"


@pytest.mark.parametrize(
    ("its", "text"),
    [
        (rank(0, waits(3), waits(2, "v")), "waits in allreduce 'w' for 3 s (and in 1 more)"),
        (rank(0, "executes|0|0.25|w|allreduce 'w'"), "is executing allreduce 'w' for 250 ms"),
        (
            rank(0, "transfer|0|receive from rank 1 with tag 5, for 4 s"),
            "waits in receive from rank 1 with tag 5, for 4 s",
        ),
        (rank(0, "does|0|has joined"), "has joined"),
        (rank(0, "does|0|has joined", gpu("behind", idle=0.5)), "has joined"),
        (
            rank(0, waits(3), gpu("behind")),
            "waits in allreduce 'w' for 3 s; "
            "launched allreduce 'w' on its GPU 30 s ago, and the GPU has not started it",
        ),
        (rank(0, phase=None), "has not called init()"),
        (rank(0, phase="shutdown"), "is in shutdown() for 5 s"),
        (rank(0, phase="", state="Z"), "has ended"),
        (
            rank(0, phase="running", page="-", answer=""),
            "cannot say what it does, because its host has no room for its page",
        ),
    ],
)
def test_what_a_rank_does(its: RankStatus, text: str) -> None:
    assert what_it_does(its) == text


def test_a_hang_counts_as_a_wait_for_the_rank() -> None:
    """The engine counts waits when they have ended. What it adds then must not be counted twice."""

    def at(seconds: float, *lines: str) -> JobStatus:
        return job(rank(0, *lines), rank(1), at_seconds=seconds)

    hangs = [
        at(10.0, "late|1|5", "missing|0|1.0|w|allreduce 'w'|rank 0|rank 1"),
        at(11.0, "late|1|5", "missing|0|2.0|w|allreduce 'w'|rank 0|rank 1"),
        at(12.0, "late|1|7.5"),
    ]
    shares = [[cells[2] for cells in rates(now, before)] for before, now in itertools.pairwise(hangs)]
    assert shares == [["0%", "100%"], ["0%", "50%"]]


def test_names_cannot_control_the_terminal() -> None:
    shown = text_of(job(rank(0, waits(3, "a\x1b[2Jb"))), stacks=False)
    assert "\x1b" not in shown
    assert "a?[2Jb" in shown
