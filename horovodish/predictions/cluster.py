"""The machines that a prediction is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from horovodish.predictions.presets import GPUS, INSIDE, LINKS, Gpu
from horovodish.predictions.quantities import QuantityError, bandwidth, count, read_yaml, seconds, size

__all__ = ["Cluster", "read_cluster"]

T = TypeVar("T")

MOST_RANKS_OF_HOST = 4096
"""As the launcher has it."""


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
        processing: how many bytes per second the processors of a host handle beyond what memory and link take, where
            several ranks share it; 0: they are no limit.
        rank_memory: bytes of memory of a rank; 0: not known.
        gpu: of a rank; None: not known.
    """

    ranks_per_host: int = 8
    bandwidth: float = LINKS["ethernet-25g"].bandwidth
    latency: float = LINKS["ethernet-25g"].latency
    memory: float = 5e9
    wake: float = 10e-6
    operation: float = 20e-6
    efficiency: float = 0.9
    encode: float = 1.5e9
    processing: float = 0.0
    rank_memory: float = 0.0
    gpu: Gpu | None = None


def read_cluster(path: Path, ranks_per_host: int | None = None) -> Cluster:
    """The cluster of a YAML file. Its keys are the attributes of `Cluster`, and `link` and `inside` for known links.

    Args:
        path: of the file.
        ranks_per_host: overrides the number in the file.

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
        "processing": bandwidth,
        "rank_memory": size,
        "gpu": _one_of(GPUS, "GPU"),
        "link": _one_of(LINKS, "link"),
        "inside": _one_of(INSIDE, "link inside of a host"),
    }
    assert set(keys) == {each.name for each in fields(Cluster)} | {"link", "inside"}
    values: dict[str, Any] = read_yaml(path, keys, frozenset())
    for key in ("bandwidth", "memory", "efficiency", "encode", "processing", "rank_memory"):
        if values.get(key, 1.0) <= 0:
            raise QuantityError(f"{path}: {key} must be more than 0")
    if values.get("efficiency", 1.0) > 1:
        raise QuantityError(f"{path}: efficiency is a share of the link's rate: at most 1, such as 0.9")
    if ranks_per_host:
        values["ranks_per_host"] = ranks_per_host
    # A value that the file gives overrides the value that follows from a link's name.
    if link := values.pop("link", None):
        values = {"bandwidth": link.bandwidth, "latency": link.latency, **values}
    if inside := values.pop("inside", None):
        values = {"memory": inside.reduced(values.get("ranks_per_host", Cluster.ranks_per_host)), **values}
    if gpu := values.get("gpu"):
        values = {"rank_memory": gpu.memory, **values}
    return Cluster(**values)


def _ranks(given: Any) -> int:
    ranks = count(given)
    if not 1 <= ranks <= MOST_RANKS_OF_HOST or ranks != int(ranks):
        raise QuantityError(f"{given!r} is not a number of ranks from 1 to {MOST_RANKS_OF_HOST}")
    return int(ranks)


def _one_of(known: Mapping[str, T], what: str) -> Callable[[Any], T]:
    def chosen(given: Any) -> T:
        if given not in known:
            raise QuantityError(f"{given!r} is not a {what}; known are {', '.join(known)}")
        return known[given]

    return chosen
