"""Why nothing comes from a host, by what ssh, MPI's daemons and supervisors write; and whose tracebacks are shown."""

from __future__ import annotations

import socket

import pytest

from horovodish.launcher.hosts.allocation import assign_ranks, from_hosts_flag
from horovodish.launcher.job.conclusion import consequences, told_last
from horovodish.launcher.job.outcome import Failure
from horovodish.launcher.mpirun.messages import absent, missing, reason_of_absence

SAME = "; the same environment must be at the same place on every host"


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("ssh: Could not resolve hostname b: Name or service not known", "ssh does not know this host name"),
        (
            "ssh: connect to host b port 22: Connection refused",
            "ssh cannot connect to port 22 there: Connection refused",
        ),
        ("ssh: connect to host b port 22: No route to host", "ssh cannot connect to port 22 there: No route to host"),
        (
            "me@b: Permission denied (publickey,password).",
            "ssh is refused: a key must let it in without a password, as ssh-copy-id arranges",
        ),
        (
            "Host key verification failed.",
            "ssh does not know the host key of this or of another host yet: connect to each once by hand",
        ),
        (
            "Host key for [b]:2222 has changed and you have requested strict checking.\nHost key verification failed.",
            "its host key is not the one that ssh knows: if that is right, ssh-keygen -R forgets the old one",
        ),
        ("bash: line 1: /env/bin/prted: No such file or directory", f"/env/bin/prted is not there{SAME}"),
        ("sh: 1: /env/bin/prted: Permission denied", f"/env/bin/prted cannot be run there: Permission denied{SAME}"),
        (
            "/env/bin/prted: error while loading shared libraries: libpmix.so.2: cannot open shared object file",
            f"/env/bin/prted cannot be run there: libpmix.so.2 is missing{SAME}",
        ),
        ("sh: 1: /env/bin/hydra_pmi_proxy: not found", f"/env/bin/hydra_pmi_proxy is not there{SAME}"),
        (
            "[proxy:1@b] launch_procs: execvp error on file /env/bin/python (No such file or directory)",
            f"/env/bin/python cannot be run there: No such file or directory{SAME}",
        ),
        ("   Executable: /env/bin/python\n   Node: b.cluster\n", f"/env/bin/python cannot be run on b.cluster{SAME}"),
        (
            "horovodish: b cannot reach the launcher: port 4711 of 10.0.0.1: no answer",
            "b cannot reach this host: port 4711 of 10.0.0.1: no answer; name the network with --network-interfaces, "
            "or allow connections between the hosts",
        ),
        ("ssh: Could not resolve hostname bb: Name or service not known", ""),
        ("Warning: Permanently added 'b' (ED25519) to the list of known hosts.", ""),
    ],
)
def test_what_it_means_for_the_host(log: str, reason: str) -> None:
    assert reason_of_absence("b", f"something before\n{log}\nsomething after\n") == reason


def test_hosts_without_a_reason_are_left_out_where_another_has_one() -> None:
    assert absent(["b", "c"], "") == {"b": "", "c": ""}
    log = "ssh: Could not resolve hostname c: Name or service not known"
    assert absent(["a", "b", "c"], log) == {"c": "ssh does not know this host name"}
    page = "A daemon failed to report back\n\n  Local host:    10.0.0.1\n  Remote host:   c\n"
    assert absent(["b", "c"], page) == {"c": ""}
    assert absent(["b", "c"], "sh: /env/bin/prted: not found\n" + page) == {"c": f"/env/bin/prted is not there{SAME}"}


def test_this_host_is_not_blamed_where_another_has_sent_nothing() -> None:
    host_ranks = assign_ranks(4, from_hosts_flag("10.0.0.1:1,b:2,c:1"))
    assert missing(host_ranks, {0, 1, 2, 3}) == []
    assert missing(host_ranks, {0, 1}) == ["b", "c"]
    assert missing(host_ranks, set(), ["10.0.0.1"]) == ["b", "c"]
    assert missing(host_ranks, {1, 2, 3}, ["10.0.0.1"]) == ["10.0.0.1"]
    assert missing(assign_ranks(2, from_hosts_flag(f"{socket.gethostname()}:1,b:1")), set()) == ["b"]
    assert missing(assign_ranks(2, None), set()) == []


def test_whose_tracebacks_are_shown() -> None:
    def failure(
        rank: int, time: float, error: str, traceback: str = "Traceback", is_consequence: bool = False
    ) -> Failure:
        return Failure(rank, time, error, traceback, is_consequence)

    cause, same, other = (
        failure(2, 1.0, "ValueError: no"),
        failure(1, 1.5, "ValueError: no"),
        failure(3, 2.0, "OSError: x"),
    )
    silent = [
        failure(0, 0.5, "RankLostError: rank 2", "", is_consequence=True),
        failure(4, 0.1, "KeyboardInterrupt: "),
        failure(5, 0.2, "E: x", ""),
    ]
    assert told_last([same, other, cause, *silent], root=2) == [[other], [cause, same]]
    assert told_last(silent, root=None) == []
    waiting = [failure(rank, 1.0, f"E: failed on rank {rank} in step 2: x", is_consequence=True) for rank in (0, 2)]
    assert told_last([*waiting, *silent], root=1) == [waiting]
    assert consequences(waiting, root=1) == []
    differ = [failure(rank, 1.0, "MismatchError: w is (8,) on rank 0 and (16,) on rank 1") for rank in (0, 1)]
    assert told_last(differ, root=0) == [differ]
    lines = [f'Traceback\n  File "train.py", line {line}, in <module>\n    step()\nE: no' for line in (3, 4)]
    elsewhere = [failure(rank, 1.0, "E: no", text) for rank, text in enumerate(lines)]
    assert told_last(elsewhere, root=0) == [[elsewhere[1]], [elsewhere[0]]]
    refused = [failure(i, 1.0, f"E: w{i} failed on rank {i}: rank {1 - i} cannot take part: no") for i in (0, 1)]
    assert told_last(refused, root=0) == [refused]


def test_consequences_are_told_once_and_only_those_of_the_first_loss() -> None:
    """MPI may have ended rank 0 because of rank 3."""

    def failure(rank: int, lost: int, is_consequence: bool = True) -> Failure:
        error = f"RankLostError: allreduce 'w' failed on rank {rank}: rank {lost} has died"
        return Failure(rank, 1.0, error, "", is_consequence)

    failures = [failure(2, 3), failure(1, 3), failure(4, 0), failure(5, 33), failure(6, 3, is_consequence=False)]
    assert consequences(failures, 3) == [([1, 2], "RankLostError: allreduce 'w' failed: rank 3 has died")]
