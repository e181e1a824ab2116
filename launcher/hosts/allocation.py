"""The hosts that a job may use, how many slots each has, and which ranks run where.

Hosts are named on the command line (`a:2,b:4`), in a hostfile or by a scheduler. Whoever names them, the result is an
`Allocation`, and `assign_ranks()` fills its hosts in order, slot by slot.
"""

import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from horovodish.errors import SettingError

THIS_HOST = "localhost"

LONGEST_TEXT_BYTES = 1 << 20
"""How long a hostfile can be, and what a program prints."""
MOST_SLOTS = 1 << 20
"""How many slots there can be in all."""
MOST_RANKS_OF_HOST = 4096
"""How many ranks a host can have. Each maps memory for all others, and 5700 ranks would need more than the 128 TiB that
Linux has for a process."""
MOST_LISTED = 4
"""How many hosts a message lists."""
LONGEST_LINE = 1000
LONGEST_SHOWN = 60
"""How many characters of a wrong word a message shows."""

# A name that begins with a dash would be an option of ssh.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HOSTFILE_KEYS = {"slots": "slots", "max_slots": "max_slots", "max-slots": "max_slots"}


@dataclass(frozen=True)
class Host:
    """A host that a job may use.

    Attributes:
        name: a hostname, an IPv4 address or a name of the ssh configuration, as mpirun is given it.
        slots: for how many ranks it is meant; at least 1.
        max_slots: how many ranks it may get when there are more ranks than slots; None: any number.
    """

    name: str
    slots: int
    max_slots: int | None = None


@dataclass(frozen=True)
class Allocation:
    """The hosts that a job may use; `allocation()` makes one.

    Attributes:
        hosts: in the order that they are filled; every name occurs once.
        source: where they were named, in words for messages: "--hosts", "hostfile hosts.txt", "the Slurm allocation".
        by_scheduler: whether a scheduler has named them, so that mpirun starts processes there by the scheduler's means
            rather than by ssh.
    """

    hosts: tuple[Host, ...]
    source: str
    by_scheduler: bool = False

    @property
    def slots(self) -> int:
        """For how many ranks the hosts are meant in all."""
        return sum(host.slots for host in self.hosts)


@dataclass(frozen=True)
class HostRanks:
    """The ranks of a job that run on one host.

    Attributes:
        host: its name.
        ranks: which ranks; at least one.
    """

    host: str
    ranks: range


def allocation(hosts: Iterable[Host], source: str, *, by_scheduler: bool = False) -> Allocation:
    """An allocation of these hosts. The slots of a host that occurs several times are added, at its first place.

    Raises:
        SettingError: there are no hosts.
    """
    merged: dict[str, Host] = {}
    for host in hosts:
        known = merged.get(host.name)
        merged[host.name] = host if known is None else _sum(known, host)
    if not merged:
        raise SettingError(f"{source} names no host")
    if sum(host.slots for host in merged.values()) > MOST_SLOTS:
        raise SettingError(f"{source} names more than {MOST_SLOTS} slots")
    return Allocation(tuple(merged.values()), source, by_scheduler)


def from_hosts_flag(text: str) -> Allocation:
    """The hosts of `--hosts`: `name:slots`, separated by commas. Without a number a host has one slot.

    Raises:
        SettingError: the text is not of this form.

    Example:
        >>> from_hosts_flag("a:2,b").hosts
        (Host(name='a', slots=2, max_slots=None), Host(name='b', slots=1, max_slots=None))
    """
    return allocation((_host(entry.strip(), f"--hosts {text}") for entry in text.split(",")), "--hosts")


def from_hostfile(path: str) -> Allocation:
    """The hosts of a hostfile, one in each line, in Open MPI's form or in MPICH's; `#` begins a comment.

        a slots=2 max_slots=4
        b:4

    A host without a number of slots has one, and one that is listed several times has as many as all its lines say.

    Raises:
        SettingError: the file cannot be read or is too long, or a line is of neither form; the message names the line.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(LONGEST_TEXT_BYTES + 1)
        if len(content) > LONGEST_TEXT_BYTES:
            raise SettingError(f"hostfile {path} has more than {LONGEST_TEXT_BYTES >> 20} MiB")
        text = content.decode()
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is not text"
        raise SettingError(f"hostfile {path} cannot be read: {reason}") from problem
    return allocation(hosts_of(text, f"hostfile {path}"), f"hostfile {path}")


def hosts_of(text: str, source: str, slots: int = 1) -> list[Host]:
    """The hosts in a text of the form of a hostfile, in its order.

    Args:
        text: the lines.
        source: where they come from, for messages.
        slots: of a host without a number of them.

    Raises:
        SettingError: a line is no host; the message names the line.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.split("#", 1)[0].strip()
        if len(line) > LONGEST_LINE:
            raise SettingError(f"{source}, line {number} has more than {LONGEST_LINE} characters")
        words = re.sub(r"\s*([=:])\s*", r"\1", line).split()
        if words:
            hosts.append(_host_of_line(words, f"{source}, line {number}", slots))
    return hosts


def is_here(name: str) -> bool:
    """Whether a host is this one, as far as its name tells. mpirun recognises it by its addresses, too."""
    own = socket.gethostname()
    return name in (THIS_HOST, "127.0.0.1", own, own.split(".", 1)[0])


def assign_ranks(np: int, among: Allocation | None, *, oversubscribe: bool = False) -> tuple[HostRanks, ...]:
    """Which ranks run where: the hosts are filled in order, slot by slot, and the ranks of a host follow one another.

    Args:
        np: number of ranks.
        among: the hosts; None is this host, which takes any number of ranks.
        oversubscribe: whether hosts may get more ranks than they have slots. The additional ranks are assigned in
            further rounds over the hosts. Each round fills every slot once more.

    Returns:
        Every host that gets a rank, with its ranks, in the order of the ranks.

    Raises:
        SettingError: there are more ranks than slots, or more than `MOST_RANKS_OF_HOST` on a host.

    Example:
        >>> assign_ranks(5, from_hosts_flag("a:2,b:4"))
        (HostRanks(host='a', ranks=range(0, 2)), HostRanks(host='b', ranks=range(2, 5)))
    """
    counts = {THIS_HOST: np} if among is None else _counts(np, among, oversubscribe=oversubscribe)
    host_ranks, first = [], 0
    for host, count in counts.items():
        if count > MOST_RANKS_OF_HOST:
            raise SettingError(f"{host} cannot have {count} ranks: a host can have {MOST_RANKS_OF_HOST} at most")
        if count:
            host_ranks.append(HostRanks(host, range(first, first + count)))
            first += count
    return tuple(host_ranks)


def _counts(np: int, among: Allocation, *, oversubscribe: bool) -> dict[str, int]:
    if np > among.slots and not oversubscribe:
        raise SettingError(
            f"{np} ranks do not fit: {among.source} has {counted(among.slots, 'slot')} on "
            f"{counted(len(among.hosts), 'host')}. Name more hosts or slots, use -np {among.slots}, "
            "or let ranks share slots with --oversubscribe"
        )
    counts = dict.fromkeys(among.hosts, 0)
    left = np
    while left:
        before = left
        for host in among.hosts:
            room = host.slots if host.max_slots is None else min(host.slots, host.max_slots - counts[host])
            taken = min(left, room)
            counts[host] += taken
            left -= taken
        if left == before:
            raise SettingError(f"{np} ranks do not fit: {among.source} has max_slots={np - left} in all")
    return {host.name: count for host, count in counts.items()}


def counted(number: int, what: str) -> str:
    """For example "1 slot" or "2 slots"."""
    return f"{number} {what}{'s' * (number != 1)}"


def listed(names: Sequence[str]) -> str:
    """For example "a, b" or "a, b, c, d and 3 more"."""
    more = len(names) - MOST_LISTED
    return ", ".join(names[:MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


def _sum(one: Host, other: Host) -> Host:
    limits = [host.max_slots for host in (one, other) if host.max_slots is not None]
    slots = one.slots + other.slots
    return Host(one.name, slots, max(slots, sum(limits)) if len(limits) == 2 else None)


def _host(entry: str, source: str, default: int = 1) -> Host:
    name, colon, slots = entry.partition(":")
    if not _NAME.fullmatch(name):
        form = "one is written as name or name:slots, such as a:2"
        raise SettingError(f"{source}: {_shown(entry)} is not a host; {form}")
    return Host(name, _number(slots, "slots", source) if colon else default)


def _host_of_line(words: list[str], source: str, default: int) -> Host:
    host = _host(words[0], source, default)
    values: dict[str, int] = {}
    for word in words[1:]:
        key, _, value = word.partition("=")
        if key not in _HOSTFILE_KEYS:
            form = "a line is: name slots=N max_slots=M, or: name:N"
            raise SettingError(f"{source}: {_shown(word)} is not known; {form}")
        values[_HOSTFILE_KEYS[key]] = _number(value, key, source)
    most = values.get("max_slots")
    slots = values.get("slots", host.slots)
    if most is not None and most < slots:
        raise SettingError(f"{source}: max_slots={most} is less than slots={slots}")
    return Host(host.name, slots, most)


def _number(text: str, key: str, source: str) -> int:
    if not (text.isascii() and text.isdecimal() and text.strip("0")):
        raise SettingError(f"{source}: {key} must be a whole number from 1, not {_shown(text)}")
    digits = text.lstrip("0")
    if len(digits) > len(str(MOST_SLOTS)) or int(digits) > MOST_SLOTS:  # Python refuses to read very long numbers
        raise SettingError(f"{source}: {key} can be {MOST_SLOTS} at most, not {_shown(text)}")
    return int(digits)


def _shown(text: str) -> str:
    return repr(text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}...")
