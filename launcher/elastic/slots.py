"""The slots on which the next ranks of an elastic job can run."""

from collections import Counter
from dataclasses import replace

from horovodish.launcher.elastic.discovery import Discovery
from horovodish.launcher.hosts.allocation import THIS_HOST, Allocation, Host
from horovodish.launcher.options import LaunchOptions

FIRST_REST_SECONDS, LONGEST_REST_SECONDS = 5.0, 300.0
"""How long a slot rests that has lost a rank for the second time. Each further time it is twice as long."""
REMEMBERED_SECONDS = 3600.0
"""For how long a loss counts."""
TOGETHER_SECONDS = 2.0
"""Losses of a host that are no further apart count as one."""


class Slots:
    """Where ranks can run: the slots of the hosts that there are now, but for those that rest after a loss.

    Args:
        options: of the job.
        discovery: finds the hosts; None if they stay the same.
    """

    def __init__(self, options: LaunchOptions, discovery: Discovery | None) -> None:
        self._options = options
        self._discovery = discovery
        self._losses: list[tuple[str, float]] = []
        self._rests: list[tuple[str, float]] = []  # a slot of a host, and until when

    def named(self) -> Allocation:
        """The hosts that there are now."""
        if self._discovery:
            return self._discovery.found() or Allocation((), "")
        own = self._options
        return own.allocation or Allocation((Host(THIS_HOST, own.most or own.least),), "this host")

    def rest(self, host: str, slots: int, now: float) -> None:
        """Leaves slots of a host alone for a while, which is longer each time."""
        self._losses = [(other, then) for other, then in self._losses if now - then < REMEMBERED_SECONDS]
        earlier = [then for other, then in self._losses if other == host]
        before = sum(now - then > TOGETHER_SECONDS for then in earlier)
        pause = min(FIRST_REST_SECONDS * 2 ** (before - 1), LONGEST_REST_SECONDS) if before else 0.0
        if len(earlier) == before:
            self._losses.append((host, now))
        self._rests += [(host, now + pause)] * slots

    def options(self, now: float) -> LaunchOptions:
        """Those of a start with as many ranks as there is room for, which may be none."""
        self._rests = [(host, until) for host, until in self._rests if until > now]
        resting = Counter(host for host, _ in self._rests)
        named = self.named()
        left = [replace(host, slots=host.slots - resting[host.name]) for host in named.hosts]
        hosts = replace(named, hosts=tuple(host for host in left if host.slots > 0))
        most = self._options.most or max(hosts.slots, self._options.least)
        shares = self._options.oversubscribe
        np = min(most, sum((host.max_slots or most) if shares else host.slots for host in hosts.hosts))
        is_named = self._discovery or self._options.allocation
        return replace(self._options, np=np, allocation=hosts if is_named else None)
