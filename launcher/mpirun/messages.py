"""The output of mpirun, ssh, MPI's daemons and our supervisors: its meaning, and the part that users should read."""

import re
from collections.abc import Collection, Sequence

from horovodish.launcher.hosts.allocation import THIS_HOST, HostRanks, is_here

_SAME_PLACE = "the same environment must be at the same place on every host"
_REASONS = (
    (r"[Cc]ould not resolve hostname {host}\b", "ssh does not know this host name"),
    (r"connect to host {host} port (\d+): (.+)", "ssh cannot connect to port {0} there: {1}"),
    (r"{host}: Permission denied", "ssh is refused: a key must let it in without a password, as ssh-copy-id arranges"),
    (r"Host key for \[?{host}\b.* has changed", "its host key is not the one that ssh knows: if that is right, "
     "ssh-keygen -R forgets the old one"),
    (r"Host key verification failed", "ssh does not know the host key of this or of another host yet: "
     "connect to each once by hand"),
    (r"^horovodish: (\S+) cannot reach the launcher: (.+)", "{0} cannot reach this host: {1}; name the network with "
     "--network-interfaces, or allow connections between the hosts"),
    (r"(/\S*(?:prted|orted|hydra_\w*proxy))\"?: error while loading shared libraries: ([^:]+)", "{0} cannot be run "
     "there: {1} is missing; " + _SAME_PLACE),
    (r"(\S*(?:prted|orted|hydra_\w*proxy)\"?): .*(?:[Nn]o such file|not found)", "{0} is not there; " + _SAME_PLACE),
    (r"(/\S*(?:prted|orted|hydra_\w*proxy))\"?: (.+)", "{0} cannot be run there: {1}; " + _SAME_PLACE),
    (r"execvp error on file (\S+) \((.+)\)", "{0} cannot be run there: {1}; " + _SAME_PLACE),
    (r"Executable: (\S+)\s+Node: (\S+)", "{0} cannot be run on {1}; " + _SAME_PLACE),
)  # fmt: skip
_FAILED_HOST = re.compile(r"^ *Remote host: +(\S+)$", re.MULTILINE)
"""The host whose daemon has failed, in a page of Open MPI's."""
# What they say about a rank that failed. The launcher says it better, and it knows first.
_RANK_FAILED = re.compile(
    r"^-{60,}\n(?:(?:prterun|mpirun|mpiexec) (?:detected|noticed|has exited)|A daemon failed to report|PRTE has lost) "
    r".*?^-{60,}$\n?"
    r"|^={60,}\n=   BAD TERMINATION OF [^\n]*\n=   RANK [^\n]*\n=   KILLED BY SIGNAL[^\n]*\n={60,}$\n?"
    r"|^={60,}\n=   BAD TERMINATION OF .*?^Please see the FAQ page for debugging suggestions$\n?"
    r"|^\[(?:mpiexec|proxy:[^\]\n]*)@[^\]\n]*\] .*?$\n?"
    r"|^\[[^\]\n]+\] \*\*\* An error occurred in Socket closed$\n(?:^\[[^\]\n]+\] \*\*\* .*?$\n?)*"
    r"|^\[[^\]\n]+\] plm:ssh: Warning: setpgid.*?$\n?",
    re.DOTALL | re.MULTILINE,
)


def missing(host_ranks: Sequence[HostRanks], came: Collection[int], here: Collection[str] = ()) -> list[str]:
    """The named hosts whose ranks have not all reported; without this host if other hosts are missing, too.

    mpirun starts nothing anywhere before it has reached all hosts.

    Args:
        host_ranks: which ranks should have run where.
        came: the ranks that have reported.
        here: the addresses of this host.
    """
    hosts = [
        each.host for each in host_ranks if each.host != THIS_HOST and any(rank not in came for rank in each.ranks)
    ]
    return [host for host in hosts if host not in here and not is_here(host)] or hosts


def absent(hosts: Sequence[str], log: str) -> dict[str, str]:
    """The hosts that have kept ranks from reporting, and why.

    Where the reason is known for some, or the log names some, the others are left out.

    Args:
        hosts: that are missing.
        log: what mpirun has written.
    """
    named = [host for host in hosts if host in _FAILED_HOST.findall(log)]
    for each in (named, hosts):
        if known := {host: reason for host in each if (reason := reason_of_absence(host, log))}:
            return known
    return dict.fromkeys(named or hosts, "")


def reason_of_absence(host: str, log: str) -> str:
    """Why no rank has reported from a host, as far as the log of mpirun tells; else nothing."""
    for pattern, reason in _REASONS:
        found = re.search(pattern.replace("{host}", re.escape(host)), log, re.MULTILINE)
        if found:
            return reason.format(*found.groups())
    return ""


def worth_reading(log: str) -> str:
    """The output of an mpirun, without its messages about ranks that failed or were ended."""
    rest = _RANK_FAILED.sub("", log).strip()
    return rest + "\n" if rest else ""
