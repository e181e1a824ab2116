"""The machines for which a prediction is made."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from horovodish.predictions.quantities import QuantityError, bandwidth, count, read_yaml, seconds, size

__all__ = ["LINKS", "Cluster", "read_cluster"]

LINKS = {
    "ethernet-1g": (1e9 / 8, 50e-6),
    "ethernet-10g": (10e9 / 8, 30e-6),
    "ethernet-25g": (25e9 / 8, 20e-6),
    "ethernet-100g": (100e9 / 8, 10e-6),
    "infiniband-edr": (100e9 / 8, 2e-6),
    "infiniband-hdr": (200e9 / 8, 2e-6),
    "infiniband-ndr": (400e9 / 8, 2e-6),
}
"""Bytes per second and seconds of a link. The rates are those of IEEE 802.3 and of the InfiniBand Trade Association's
roadmap; the latencies are round numbers for MPI over TCP and over verbs."""


@dataclass(frozen=True)
class Cluster:
    """Hosts that are alike.

    Attributes:
        ranks_per_host: how many ranks share a host.
        bandwidth: of the link of a host, bytes per second in each direction.
        latency: of a message between hosts, seconds.
        memory: how many bytes per second the ranks of a host reduce, in an allreduce within the host.
        wake: how long a rank needs to see what another rank of its host has done, seconds.
        operation: what the engines need for each of many small operations, one after the other, seconds.
        efficiency: which share of the link's rate large messages get.
        encode: how many bytes per second a rank encodes and decodes for a codec.
        rank_memory: bytes of memory of a rank; 0: not known.
    """

    ranks_per_host: int = 8
    bandwidth: float = LINKS["ethernet-25g"][0]
    latency: float = LINKS["ethernet-25g"][1]
    memory: float = 5e9
    wake: float = 10e-6
    operation: float = 20e-6
    efficiency: float = 0.9
    encode: float = 1.5e9
    rank_memory: float = 0.0


def read_cluster(path: Path) -> Cluster:
    """The cluster of a YAML file, whose keys are the attributes of `Cluster`, and `link` for a known kind of link.

    Raises:
        QuantityError: it makes no sense.
    """
    keys = {
        "ranks_per_host": _ranks,
        "bandwidth": bandwidth,
        "latency": seconds,
        "memory": bandwidth,
        "wake": seconds,
        "operation": seconds,
        "efficiency": count,
        "encode": bandwidth,
        "rank_memory": size,
        "link": _link,
    }
    assert set(keys) == {each.name for each in fields(Cluster)} | {"link"}
    values: dict[str, Any] = read_yaml(path, keys, frozenset())
    if "link" in values:
        rate, delay = values.pop("link")
        values = {"bandwidth": rate, "latency": delay, **values}
    for key in ("bandwidth", "memory", "efficiency", "encode"):
        if values.get(key, 1.0) <= 0:
            raise QuantityError(f"{path}: {key} must be more than 0")
    return Cluster(**values)


def _ranks(given: Any) -> int:
    ranks = count(given)
    if ranks < 1 or ranks != int(ranks):
        raise QuantityError(f"{given!r} is not a number of ranks")
    return int(ranks)


def _link(given: Any) -> tuple[float, float]:
    if given not in LINKS:
        raise QuantityError(f"{given!r} is not a link; known are {', '.join(LINKS)}")
    return LINKS[given]
