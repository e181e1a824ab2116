"""Hosts and slots: what is named on the command line or in a file, and which ranks go where."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from horovodish.errors import SettingError
from horovodish.launcher.hosts.allocation import (
    Allocation,
    Host,
    HostRanks,
    allocation,
    assign_ranks,
    from_hostfile,
    from_hosts_flag,
)


def test_hosts_on_the_command_line() -> None:
    expected = (Host("a", 2), Host("10.0.0.7", 4), Host("node-1.cluster", 1))
    assert from_hosts_flag("a:2,10.0.0.7:4, node-1.cluster") == Allocation(expected, "--hosts")


def test_a_host_that_is_named_twice_has_both_numbers_of_slots() -> None:
    assert from_hosts_flag("a:2,b,a").hosts == (Host("a", 3), Host("b", 1))
    limited = [Host("a", 1, 2), Host("a", 2, 4), Host("b", 1, 2), Host("b", 1)]
    assert allocation(limited, "test").hosts == (Host("a", 3, 6), Host("b", 2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--hosts : '' is not a host"),
        ("a:2,,b", "--hosts a:2,,b: '' is not a host; one is written as name or name:slots, such as a:2"),
        ("a:two", "--hosts a:two: slots must be a whole number from 1, not 'two'"),
        ("a:0", "slots must be a whole number from 1, not '0'"),
        ("a:", "slots must be a whole number from 1, not ''"),
        ("-oProxyCommand=x", "'-oProxyCommand=x' is not a host"),
        ("a b:2", "'a b:2' is not a host"),
        ("fe80::1", "slots must be a whole number from 1, not ':1'"),
    ],
)
def test_hosts_that_make_no_sense(text: str, message: str) -> None:
    with pytest.raises(SettingError, match=re.escape(message)):
        from_hosts_flag(text)


def written(folder: Path, text: str) -> str:
    path = folder / "hosts.txt"
    path.write_text(text)
    return str(path)


def test_a_hostfile_in_either_form(tmp_path: Path) -> None:
    path = written(tmp_path, "# a comment\n\na slots=2 max_slots=4  # another\nb:4\nc\nd slots = 3 max-slots=3\nb:1\n")
    expected = (Host("a", 2, 4), Host("b", 5), Host("c", 1), Host("d", 3, 3))
    assert from_hostfile(path) == Allocation(expected, f"hostfile {path}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\nb slots=x\n", "line 2: slots must be a whole number from 1, not 'x'"),
        ("a cpus=4\n", "line 1: 'cpus=4' is not known; a line is: name slots=N max_slots=M, or: name:N"),
        ("\n\n!a\n", "line 3: '!a' is not a host"),
        ("a slots=4 max_slots=2\n", "line 1: max_slots=2 is less than slots=4"),
        ("# nobody\n", "names no host"),
        ("\udcff", "cannot be read: it is not text"),
    ],
)
def test_a_hostfile_that_makes_no_sense(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "hosts.txt"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(SettingError, match=f"^hostfile {re.escape(str(path))}.*{re.escape(message)}"):
        from_hostfile(str(path))


def test_a_hostfile_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"hostfile .*/none cannot be read: No such file or directory"):
        from_hostfile(str(tmp_path / "none"))


def counts(host_ranks: tuple[HostRanks, ...]) -> dict[str, int]:
    return {each.host: len(each.ranks) for each in host_ranks}


def test_hosts_are_filled_in_order() -> None:
    hosts = from_hosts_flag("a:2,b:4")
    assert assign_ranks(6, hosts) == (HostRanks("a", range(2)), HostRanks("b", range(2, 6)))
    assert assign_ranks(1, hosts) == (HostRanks("a", range(1)),)


def test_this_host_takes_any_number_of_ranks_up_to_a_limit() -> None:
    assert assign_ranks(99, None) == (HostRanks("localhost", range(99)),)
    for among, name in ((None, "localhost"), (from_hosts_flag("a:1000000"), "a")):
        with pytest.raises(SettingError, match=f"{name} cannot have 4097 ranks: a host can have 4096 at most"):
            assign_ranks(4097, among)


def test_more_ranks_than_slots() -> None:
    hosts = from_hosts_flag("a:1,b:2")
    message = "4 ranks do not fit: --hosts has 3 slots on 2 hosts. Name more hosts or slots, use -np 3, or let ranks "
    with pytest.raises(SettingError, match=re.escape(message + "share slots with --oversubscribe")):
        assign_ranks(4, hosts)
    assert counts(assign_ranks(4, hosts, oversubscribe=True)) == {"a": 2, "b": 2}
    assert assign_ranks(7, hosts, oversubscribe=True) == (HostRanks("a", range(3)), HostRanks("b", range(3, 7)))


def test_max_slots_hold_when_slots_are_shared() -> None:
    hosts = allocation([Host("a", 1, 2), Host("b", 1)], "test")
    assert counts(assign_ranks(5, hosts, oversubscribe=True)) == {"a": 2, "b": 3}
    with pytest.raises(SettingError, match="5 ranks do not fit: test has max_slots=2 in all"):
        assign_ranks(5, allocation([Host("a", 1, 2)], "test"), oversubscribe=True)


@pytest.mark.parametrize("digits", [20, 5000])
def test_absurd_numbers_of_slots_are_refused(digits: int) -> None:
    """Python itself refuses to read a number of more than 4300 digits."""
    with pytest.raises(SettingError, match="slots can be 1048576 at most, not '9999"):
        from_hosts_flag("a:" + "9" * digits)
    assert from_hosts_flag("a:0002").slots == 2
