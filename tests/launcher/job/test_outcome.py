"""Which rank was the first to fail."""

from __future__ import annotations

import json
import signal

import pytest

from horovodish.launcher.hosts.allocation import HostRanks
from horovodish.launcher.job.launcher_end import Hello
from horovodish.launcher.job.outcome import (
    Ending,
    Failure,
    Refusal,
    exit_status,
    first_fault,
    named_twice,
    refusal_of,
    shortened,
    signal_name,
)

EXIT_3 = 3 << 8


def test_nobody_failed() -> None:
    assert first_fault([Ending(0, 1.0, 0, asked=False), Ending(1, 2.0, 0, asked=True)], []) is None


def test_the_earliest_counts_and_those_that_were_asked_to_end_do_not() -> None:
    endings = [
        Ending(0, 1.0, signal.SIGTERM, asked=True),
        Ending(1, 3.0, EXIT_3, asked=False),
        Ending(2, 2.0, signal.SIGSEGV, asked=False),
    ]
    fault = first_fault(endings, [])
    assert fault is not None
    assert (fault.rank, fault.exit_status, fault.what) == (2, 139, "was killed by signal 11 (SIGSEGV)")


def test_a_rank_whose_script_had_ended_before_it_was_asked_to_end_has_a_status_of_its_own() -> None:
    endings = [
        Ending(0, 1.0, EXIT_3, asked=True, had_left=True),
        Ending(1, 1.0, signal.SIGTERM, asked=True, had_left=True),
        Ending(2, 1.0, 0, asked=True, had_left=True),
    ]
    fault = first_fault(endings, [])
    assert fault is not None
    assert (fault.rank, fault.exit_status) == (0, 3)
    assert first_fault(endings[1:], []) is None


def test_a_rank_that_raised_is_quoted() -> None:
    fault = first_fault([Ending(1, 2.0, EXIT_3, asked=False)], [Failure(1, 1.0, "ValueError: no such file\nor folder")])
    assert fault is not None
    assert fault.what == "failed with exit status 3: ValueError: no such file"


def test_a_rank_that_raised_and_then_hung_failed_as_python_does() -> None:
    fault = first_fault([Ending(1, 9.0, signal.SIGKILL, asked=True)], [Failure(1, 1.0, "ValueError: no")])
    assert fault is not None
    assert (fault.exit_status, fault.what) == (1, "failed with exit status 1: ValueError: no")


def test_the_cause_comes_before_its_consequences_even_when_it_is_seen_later() -> None:
    endings = [Ending(0, 1.0, 1 << 8, asked=False), Ending(1, 2.0, signal.SIGKILL, asked=False)]
    fault = first_fault(endings, [Failure(0, 0.5, "RankLostError: rank 1 is gone", is_consequence=True)])
    assert fault is not None
    assert (fault.rank, fault.exit_status) == (1, 137)
    assert "memory" in fault.what


def test_a_rank_that_open_mpi_ends_because_another_one_has_ended_is_not_the_cause() -> None:
    endings = [Ending(1, 1.0, 14 << 8, asked=False), Ending(3, 1.1, 7 << 8, asked=False)]
    fault = first_fault(endings, [])
    assert fault is not None
    assert (fault.rank, fault.what) == (3, "failed with exit status 7")
    fault = first_fault(endings[:1], [])
    assert fault is not None
    assert fault.what == "failed with exit status 14; Open MPI does that when the connection to another rank breaks"


def test_who_waits_for_a_rank_that_left_is_named_with_the_place() -> None:
    waiting = [
        Failure(rank, 1.0, "RankLostError: loss: rank 1 called sys.exit(3) in a.py:1\nRemedy", "", True, place)
        for rank, place in ((0, "a.py:2"), (2, "a.py:4"), (3, "a.py:2"))
    ]
    fault = first_fault([Ending(1, 2.0, EXIT_3, asked=False)], waiting)
    assert fault is not None
    places = "ranks 0, 3 wait in a.py:2, rank 2 waits in a.py:4"
    assert fault.what == f"failed with exit status 3: it called sys.exit(3) in a.py:1; {places}"
    fault = first_fault([Ending(2, 2.0, 1 << 8, asked=False)], waiting)
    assert fault is not None
    assert fault.what.endswith(f"RankLostError: loss: rank 1 called sys.exit(3) in a.py:1; {places}")
    late = Failure(0, 1.0, "StallError: submitted by rank 0 but not by rank 1.\n  rank 0 waits", place="a.py:2")
    fault = first_fault([Ending(0, 2.0, 1 << 8, asked=False)], [late])
    assert fault is not None
    assert fault.what.endswith("but not by rank 1; rank 0 waits in a.py:2")


def test_a_consequence_counts_when_its_cause_is_not_known() -> None:
    fault = first_fault(
        [Ending(0, 1.0, 1 << 8, asked=False)], [Failure(0, 0.5, "RankLostError: rank 1 has left", is_consequence=True)]
    )
    assert fault is not None
    assert fault.what == "failed with exit status 1: RankLostError: rank 1 has left"


def test_a_rank_that_has_only_written_of_its_exception_is_quoted() -> None:
    endings = [Ending(0, 1.0, EXIT_3, asked=False), Ending(1, 2.0, signal.SIGSEGV, asked=False)]
    fault = first_fault(endings, [], {0: "ImportError: no torch", 1: "ValueError: no"})
    assert fault is not None
    assert fault.what == "failed with exit status 3: ImportError: no torch"
    fault = first_fault(endings[1:], [], {1: "ValueError: no"})
    assert fault is not None
    assert fault.what == "was killed by signal 11 (SIGSEGV)"


def test_a_long_error_is_shortened() -> None:
    fault = first_fault([Ending(0, 1.0, EXIT_3, asked=False)], [Failure(0, 0.5, "ValueError: " + "x" * 10_000)])
    assert fault is not None
    assert len(fault.what) < 600


def test_a_long_error_shows_its_cause_behind_what_jax_repeats() -> None:
    wrapped = "JaxRuntimeError: INTERNAL: " + "Error dispatching computation: " * 20
    assert shortened(wrapped + "rank 1 has left") == (
        "JaxRuntimeError: INTERNAL: Error dispatching computation: rank 1 has left"
    )
    assert shortened(wrapped + "x" * 1_000 + ": rank 1 has left").endswith("x: rank 1 has left")


def test_an_error_whose_first_line_announces_it_shows_its_last_line() -> None:
    said = "ValueError: in user code:\n\n    File 'train.py', line 18, in step  *\n\n    ValueError: 9 and 10\n"
    assert shortened(said) == "ValueError: in user code: ValueError: 9 and 10"
    assert shortened("KeyError: no 'a':\n") == "KeyError: no 'a':"


def test_the_report_of_a_rank() -> None:
    report = {
        "time": 2.5,
        "error": "ValueError: no",
        "traceback": "Traceback ...",
        "is_consequence": True,
        "place": "a:1",
    }
    assert Failure.of(1, json.dumps(report)) == Failure(1, 2.5, "ValueError: no", "Traceback ...", True, "a:1")
    for nonsense in (json.dumps(report)[:20], "", "{}", "[]", "3", json.dumps({**report, "time": None})):
        failure = Failure.of(1, nonsense)
        assert (failure.rank, failure.error, failure.traceback) == (1, "an exception whose report cannot be read", "")


def test_a_command_that_cannot_be_run_everywhere() -> None:
    def hello(rank: int, host: str, problem: str) -> Hello:
        return Hello(rank, 1, 1, host, "machine", 1, 1, "3.11.7", (), 29500, problem)

    missing = "127 train: command not found"
    assert refusal_of([hello(0, "a", ""), hello(1, "b", "")]) is None
    refusal = refusal_of([hello(2, "c", missing), hello(0, "a", ""), hello(1, "b", missing), hello(3, "c", missing)])
    same = "programs and scripts must be at the same paths on every host"
    assert refusal == Refusal(127, f"train: command not found (on b, c)\n{same}")
    other = hello(1, "b", "126 train is not executable")
    assert refusal_of([hello(2, "c", missing), other]) == Refusal(
        126, "train is not executable (on b)\ntrain: command not found (on c)"
    )


def test_two_names_of_one_machine() -> None:
    def hello(rank: int, daemon: int, host: str, machine: str = "m") -> Hello:
        return Hello(rank, 1, daemon, host, machine, 1, 1, "3.11.7", (), 29500, "")

    places = [HostRanks("a", range(2)), HostRanks("b", range(2, 4))]
    twice = [hello(0, 7, "x"), hello(1, 7, "x"), hello(2, 8, "x"), hello(3, 8, "x")]
    problem = "2 a and b are two names of one machine: name it once, with all slots"
    assert named_twice(reversed(twice), places) == {2: problem, 3: problem}
    # One daemon serves both names; hosts of one name, or containers of one machine; ranks that the user has mapped.
    assert named_twice([hello(rank, 7, "x") for rank in range(4)], places) == {}
    assert named_twice([*twice[:2], hello(2, 8, "x", "n"), hello(3, 8, "x", "n")], places) == {}
    assert named_twice([*twice[:2], hello(2, 8, "y"), hello(3, 8, "y")], places) == {}
    assert named_twice([hello(rank, 7 + rank % 2, "xy"[rank % 2]) for rank in range(4)], places) == {}


@pytest.mark.parametrize(("status", "expected"), [(0, 0), (EXIT_3, 3), (signal.SIGKILL, 137), (signal.SIGINT, 130)])
def test_exit_status(status: int, expected: int) -> None:
    assert exit_status(status) == expected


def test_signal_name() -> None:
    assert signal_name(9) == "signal 9 (SIGKILL)"
    assert signal_name(40) == "signal 40"
