"""How much travels between the hosts of a job, and within each."""

from collections import Counter
from collections.abc import Mapping

from horovodish.launcher.status.answers import RankStatus
from horovodish.launcher.status.jobs import JobStatus


def sent_by(rank: RankStatus, hosts: Mapping[int, str]) -> Counter[str]:
    """How many bytes a rank has sent so far, by link: "alpha -> beta", or "within alpha".

    Args:
        rank: which one.
        hosts: the name of each rank's host.
    """
    sent: Counter[str] = Counter()
    if rank.within_bytes is not None:
        sent[f"within {rank.host}"] = rank.within_bytes
    for first, size in rank.sent_bytes.items():
        sent[f"{rank.host} -> {hosts[first]}"] += size
    return sent


def link_rates(now: JobStatus, before: JobStatus) -> dict[str, float]:
    """Bytes per second of each link, the busiest first. A rank counts if it has answered both times."""
    seconds = now.at_seconds - before.at_seconds
    hosts = {rank.rank: rank.host for rank in now.ranks}
    earlier = {(rank.rank, rank.process): rank for rank in before.ranks if rank.within_bytes is not None}
    sent: Counter[str] = Counter()
    for rank in now.ranks:
        if rank.within_bytes is not None and (rank.rank, rank.process) in earlier:
            sent += sent_by(rank, hosts) - sent_by(earlier[rank.rank, rank.process], hosts)
    return {link: size / seconds for link, size in sent.most_common()}
