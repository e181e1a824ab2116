"""The slots for the next ranks of an elastic job."""

from collections import Counter
from dataclasses import replace

from horovodish.launcher.elastic.discovery import Discovery
from horovodish.launcher.hosts.allocation import THIS_HOST, Allocation, Host
from horovodish.launcher.options import LaunchOptions

FIRST_COOLDOWN_SECONDS, LONGEST_COOLDOWN_SECONDS = 5.0, 300.0
"""How long a slot stays unused after its host's second loss. Each further time it is twice as long."""
REMEMBERED_SECONDS = 3600.0
"""For how long a loss counts."""
TOGETHER_SECONDS = 2.0
"""Losses of a host that are no further apart count as one."""


class Slots:
    """Where ranks can run: the slots of the hosts that there are now, but for those that cool down after a loss.

    Args:
        options: of the job.
        discovery: finds the hosts; None if they stay the same.
    """

    def __init__(self, options: LaunchOptions, discovery: Discovery | None) -> None:
        self._options = options
        self._discovery = discovery
        self._losses: list[tuple[str, float]] = []
        self._cooling: list[tuple[str, float]] = []  # a slot of a host, and until when

    def current_hosts(self) -> Allocation:
        """The hosts that there are now."""
        if self._discovery:
            return self._discovery.found() or Allocation((), "")
        own = self._options
        return own.allocation or Allocation((Host(THIS_HOST, own.most or own.least),), "this host")

    def cool_down(self, host: str, slots: int, now: float) -> None:
        """Leave slots of a host unused for a while, which is longer each time."""
        self._losses = [(other, then) for other, then in self._losses if now - then < REMEMBERED_SECONDS]
        earlier = [then for other, then in self._losses if other == host]
        before = sum(now - then > TOGETHER_SECONDS for then in earlier)
        pause = min(FIRST_COOLDOWN_SECONDS * 2 ** (before - 1), LONGEST_COOLDOWN_SECONDS) if before else 0.0
        if len(earlier) == before:
            self._losses.append((host, now))
        self._cooling += [(host, now + pause)] * slots

    def options(self, now: float) -> LaunchOptions:
        """The options of a start with as many ranks as there are slots, which may be none."""
        self._cooling = [(host, until) for host, until in self._cooling if until > now]
        cooling = Counter(host for host, _ in self._cooling)
        current = self.current_hosts()
        left = [replace(host, slots=host.slots - cooling[host.name]) for host in current.hosts]
        hosts = replace(current, hosts=tuple(host for host in left if host.slots > 0))
        most = self._options.most or max(hosts.slots, self._options.least)
        shares = self._options.oversubscribe
        np = min(most, sum((host.max_slots or most) if shares else host.slots for host in hosts.hosts))
        is_named = self._discovery or self._options.allocation
        return replace(self._options, np=np, allocation=hosts if is_named else None)
