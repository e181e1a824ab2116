"""The time of a step, simulated: buckets go through the stages of the engine, one after the other.

Hosts are alike, and ranks are. So one host stands for all: its memory, in which its ranks publish, combine and collect,
and its link. A bucket enters when the ranks have agreed on it, in the order of the engine. Chunks are in the memory and
on the link at the same time, also those of different buckets. The schedules and the tree are the engine's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from horovodish import _native
from horovodish.predictions.cluster import Cluster
from horovodish.predictions.workload import Bucket, Workload

__all__ = ["STRATEGIES", "Prediction", "Strategy", "predict", "wire_bytes"]

CHUNK_BYTES = 256 << 10
SLOTS = 4
"""How many chunks are under way at once."""
MESSAGE_SECONDS = 2e-6
"""What a rank needs for a message of the negotiation."""


@dataclass(frozen=True)
class Strategy:
    """What travels.

    Attributes:
        name: in tables.
        between: bytes between hosts for each byte of a gradient.
        traffic: how many times what an allreduce sends.
        every: ranks meet in one of so many steps.
        encodes: whether values are encoded between hosts.
        shards: of weights, gradients and states, which the ranks share.
        is_exposed: sends as much again during the forward pass, which waits for it.
    """

    name: str
    between: float = 1.0
    traffic: float = 1.0
    every: int = 1
    encodes: bool = False
    shards: frozenset[str] = frozenset()
    is_exposed: bool = False


STRATEGIES = (
    Strategy("allreduce"),
    Strategy("bfloat16", between=0.5),
    Strategy("int8", between=0.27, encodes=True),
    Strategy("LocalSGD(8)", every=8),
    Strategy("DiLoCo(100)", every=100),
    Strategy("ZeRO-1", shards=frozenset({"states"})),
    Strategy("ZeRO-2", shards=frozenset({"states", "gradients"})),
    Strategy("ZeRO-3", shards=frozenset({"states", "gradients", "weights"}), traffic=1.5),
)


@dataclass(frozen=True)
class Prediction:
    """Of a number of ranks.

    Attributes:
        ranks: how many.
        step: seconds of a step.
        exposed: of these, how many the ranks wait for communication.
        late: how many they wait for the slowest of them.
        efficiency: the own work as a share of the step.
        memory: bytes that a rank needs.
    """

    ranks: int
    step: float
    exposed: float
    late: float
    efficiency: float
    memory: float


def predict(
    workload: Workload, cluster: Cluster, ranks: int, strategy: Strategy, *, strong: bool = False
) -> Prediction:
    """What a step takes.

    Args:
        workload: of a rank.
        cluster: the machines.
        ranks: how many.
        strategy: what travels.
        strong: the ranks share the batch that `workload.ranks` had, so that each has less work.
    """
    if strong:
        share = workload.ranks / ranks
        buckets = tuple(Bucket(each.ready * share, each.bytes) for each in workload.buckets)
        workload = replace(workload, work=workload.work * share, buckets=buckets)
    late = workload.work * workload.spread * math.sqrt(2 * math.log(ranks)) if ranks > 1 else 0.0
    waits_at = workload.buckets[-1].ready if workload.buckets else 0.0
    ends = _end_of_communication(workload, cluster, ranks, strategy) if ranks > 1 else 0.0
    exposed = max(0.0, ends - waits_at) / strategy.every
    step = workload.work + late + exposed
    return Prediction(ranks, step, exposed, late, workload.work / step, _memory(workload, ranks, strategy))


def _end_of_communication(workload: Workload, cluster: Cluster, ranks: int, strategy: Strategy) -> float:
    local = min(ranks, cluster.ranks_per_host)
    hosts = math.ceil(ranks / local)
    agreement = _agreement(cluster, local, hosts)
    combine = 1 / cluster.memory if local > 1 else 0.0  # seconds per byte, in the memory of a host
    entered = exchanged = left = 0.0
    factor = strategy.traffic
    buckets = workload.buckets
    if strategy.every > 1:  # a meeting sends all at its end
        buckets = (Bucket(buckets[-1].ready, workload.bytes),)
    for bucket in buckets:
        chunks = max(1.0, bucket.bytes / CHUNK_BYTES)
        chunk = bucket.bytes / chunks
        copy = factor * chunk * combine
        exchange = factor * _exchange(cluster, local, hosts, chunk, strategy)
        # Chunks enter the link evenly, so the first or the last one says when it is through with all.
        begins = max(entered, bucket.ready + agreement) + cluster.operation
        first, entered = begins + copy, begins + chunks * copy
        exchanged = max(max(exchanged, first) + chunks * exchange, entered + exchange)
        left = max(left, exchanged + _latency(cluster, local, hosts, chunk))
    return left


def _agreement(cluster: Cluster, local: int, hosts: int) -> float:
    """From the last submission to the decision: up the tree and down."""
    arity = _native.TREE_ARITY
    depth = math.ceil(math.log(hosts * (arity - 1) + 1, arity)) - 1 if hosts > 1 else 0
    within = cluster.wake if local > 1 else 0.0
    return 2 * (within + depth * (cluster.latency + min(hosts, arity) * MESSAGE_SECONDS))


@lru_cache(maxsize=1 << 14)
def _steps_and_bytes(hosts: int, length: float) -> tuple[int, float]:
    """Of the schedule that the engine takes: its steps, and how many times the length a host sends."""
    kind = _native.fastest_allreduce(hosts, int(length))
    halvings = hosts.bit_length() - 1
    helped = 1 << halvings != hosts
    return {
        "direct": (1, hosts - 1.0),
        "halving": (2 * halvings + 2 * helped, 2 * ((1 << halvings) - 1) / (1 << halvings) + 2 * helped),
        "ring": (2 * (hosts - 1), 2 * (hosts - 1) / hosts),
    }[kind]


def wire_bytes(hosts: int, length: float) -> float:
    """What a host sends in an allreduce of one rank for each host."""
    return _steps_and_bytes(hosts, CHUNK_BYTES)[1] * length


def _exchange(cluster: Cluster, local: int, hosts: int, length: float, strategy: Strategy) -> float:
    """How long the link is taken by a chunk, whose shards travel at once. Steps of several chunks overlap."""
    if hosts == 1:
        return 0.0
    steps, times = _steps_and_bytes(hosts, length / local)
    wire = times * length * strategy.between / (cluster.bandwidth * cluster.efficiency)
    codes = 2 * length / local / cluster.encode if strategy.encodes else 0.0
    return max(wire, codes, (wire + steps * cluster.latency) / SLOTS)


def _latency(cluster: Cluster, local: int, hosts: int, length: float) -> float:
    """What the last chunk of a bucket needs beyond its turn in each stage."""
    steps = _steps_and_bytes(hosts, length / local)[0] if hosts > 1 else 0
    return steps * cluster.latency + (2 * cluster.wake if local > 1 else 0.0)


def _memory(workload: Workload, ranks: int, strategy: Strategy) -> float:
    parts = {"weights": 1.0, "gradients": 1.0, "states": float(workload.states)}
    shared = sum(part / (ranks if name in strategy.shards else 1) for name, part in parts.items())
    return shared * workload.bytes + workload.activations
