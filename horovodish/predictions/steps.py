"""The time of a step, simulated: buckets go through the stages of the engine, one after the other.

All hosts are alike, and all ranks are alike. So one host stands for all. It has a link, and a memory where its ranks
publish, combine and collect. A bucket enters when the ranks have agreed on it, in the order of the engine. Chunks are
in the memory and on the link at the same time, also chunks of different buckets. The schedules and the tree are the
engine's own.

NumPy takes all cases through a bucket at once: a page has thousands of cases, and a large model thousands of buckets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from horovodish import _native
from horovodish.predictions.cluster import Cluster
from horovodish.predictions.workload import Bucket, Workload

__all__ = [
    "PRECISIONS",
    "STRATEGIES",
    "Case",
    "Precision",
    "Prediction",
    "Strategy",
    "predict",
    "predicted",
    "steps_and_bytes",
    "steps_to_train",
    "wire_bytes",
]

CHUNK_BYTES, LARGEST_CHUNK_BYTES, SEGMENT_BYTES = 256 << 10, 1 << 20, 64 << 10
"""Of ranks that share hosts, as the engine has them without settings."""
SLOTS = 4
"""How many chunks are under way at once."""
MESSAGE_SECONDS = 2e-6
"""The time that a rank needs for a message of the negotiation."""

_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Precision:
    """How gradients travel: between hosts only if they are encoded, otherwise within a host, too.

    Attributes:
        name: in tables.
        bytes: of each number; 0: as it was computed.
        encodes: whether the engine encodes and decodes.
    """

    name: str
    bytes: float = 0.0
    encodes: bool = False

    def between(self, element_bytes: int) -> float:
        """Bytes that travel for each byte of a gradient whose numbers have this length."""
        return min(1.0, self.bytes / element_bytes) if self.bytes else 1.0


PRECISIONS = (Precision("as computed"), Precision("bfloat16", 2.0), Precision("int8", 1.02, encodes=True))
"""docs/slow_links.md has the same lengths."""


@dataclass(frozen=True)
class Strategy:
    """How the ranks exchange values.

    Attributes:
        name: in tables.
        precision: of the values that travel.
        traffic: the bytes sent while buckets become ready, as a multiple of an allreduce's bytes.
        after: likewise, at the end of a step, when nothing is left to hide it.
        every: ranks meet once per this many steps.
        shards: of weights, gradients and states, which the ranks share.
    """

    name: str
    precision: Precision = PRECISIONS[0]
    traffic: float = 1.0
    after: float = 0.0
    every: int = 1
    shards: frozenset[str] = frozenset()

    def takes(self, precision: Precision) -> bool:
        """False for `shard=` with a codec, which the optimizers refuse."""
        return not (self.shards and precision.encodes)


STRATEGIES = (
    Strategy("allreduce"),
    *(Strategy(precision.name, precision) for precision in PRECISIONS[1:]),
    Strategy("LocalSGD(8)", every=8),
    Strategy("DiLoCo(100)", every=100),
    Strategy("ZeRO-1", traffic=0.5, after=0.5, shards=frozenset({"states"})),
    Strategy("ZeRO-2", traffic=0.5, after=0.5, shards=frozenset({"states", "gradients"})),
    Strategy("ZeRO-3", shards=frozenset({"states", "gradients", "weights"}), traffic=1.5),
)


@dataclass(frozen=True)
class Case:
    """The subject of a prediction.

    Attributes:
        cluster: the machines.
        ranks: how many.
        strategy: what travels.
        strong: the ranks share the batch that `Workload.ranks` had, so that each has less work.
    """

    cluster: Cluster
    ranks: int
    strategy: Strategy
    strong: bool = False


@dataclass(frozen=True)
class Prediction:
    """The simulated step of a case.

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
    """The time of a step; the arguments are the attributes of `Case`."""
    return predicted(workload, [Case(cluster, ranks, strategy, strong)])[0]


def predicted(workload: Workload, cases: Sequence[Case]) -> list[Prediction]:
    """The time of a step in each case."""
    routes = [_routes(workload, case) for case in cases]
    # A meeting sends all at its end.
    meeting = [replace(bucket, bytes=workload.bytes) for bucket in workload.buckets[-1:]]
    ends: dict[_Route, float] = {}
    for meets, buckets in ((False, workload.buckets), (True, meeting)):
        if alike := list(dict.fromkeys(each for its in routes for each in its if each.meets == meets)):
            ends |= _ends(buckets, alike)
    return [
        _prediction(workload, case, its[0].share, [ends[each] for each in its])
        for case, its in zip(cases, routes, strict=True)
    ]


def steps_to_train(workload: Workload, ranks: int, *, strong: bool) -> float:
    """How many steps take the samples of `Workload.steps` steps. With weak scaling a step has more of them."""
    return workload.steps if strong else workload.steps * workload.ranks / ranks


def _prediction(workload: Workload, case: Case, share: float, ends: Sequence[float]) -> Prediction:
    work, several = workload.work * share, case.ranks > 1
    late = work * workload.spread * _slowest_of(case.ranks) / math.sqrt(case.strategy.every) if several else 0.0
    waits_at = workload.buckets[-1].ready * share if workload.buckets else 0.0
    exposed = sum(max(0.0, end - waits_at) for end in ends) / case.strategy.every if several else 0.0
    step = work + late + exposed
    memory = _memory(workload, case.ranks, case.strategy, share)
    return Prediction(case.ranks, step, exposed, late, work / step, memory)


def _slowest_of(ranks: int) -> float:
    """Return the mean of the largest of N draws from a standard normal distribution, within 5 % (Blom, 1958).

    What a rank does in several steps varies less than its steps do: by the square root of their number.
    """
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


@dataclass(frozen=True)
class _Route:
    """The inputs that determine the time of communication. Many cases share them."""

    cluster: Cluster
    ranks: int
    share: float
    precision: Precision
    traffic: float
    meets: bool

    @property
    def local(self) -> int:
        return min(self.ranks, self.cluster.ranks_per_host)

    @property
    def hosts(self) -> int:
        return math.ceil(self.ranks / self.local)


def _routes(workload: Workload, case: Case) -> list[_Route]:
    """The route while buckets become ready, or when the ranks meet; and the route of the traffic after it."""
    share = workload.ranks / case.ranks if case.strong else 1.0
    strategy = case.strategy
    route = _Route(case.cluster, case.ranks, share, strategy.precision, strategy.traffic, strategy.every > 1)
    return [route, replace(route, traffic=strategy.after, meets=True)] if strategy.after else [route]


def _ends(buckets: Sequence[Bucket], routes: Sequence[_Route]) -> dict[_Route, float]:
    """When the last bucket has been reduced, by route."""
    links = _Links(routes)
    share = np.array([route.share for route in routes])
    stages: dict[tuple[float, int], _Stages] = {}
    entered = exchanged = left = np.zeros(len(routes))
    for run in _runs(buckets):
        key = (run[0].bytes, run[0].element_bytes)
        if key not in stages:
            stages[key] = links.stages(run[0])
        its, more = stages[key], len(run) - 1
        # Chunks enter the link evenly, so the first or the last one says when it is through with all. For the same
        # reason, the first or the last bucket of a run says when the run is through.
        begins = np.maximum(entered, run[0].ready * share + links.agreement) + links.operation
        first, takes = begins + its.first_copy, links.operation + its.copies
        entered = np.maximum(begins + its.copies + more * takes, run[-1].ready * share + links.agreement + takes)
        last = entered - its.copies + its.first_copy
        exchanged = np.maximum(np.maximum(exchanged, first) + more * its.exchanges, last) + its.exchanges
        exchanged = np.maximum(exchanged, entered + its.last_exchange)
        left = np.maximum(left, exchanged + its.latency)
    return dict(zip(routes, left.tolist(), strict=True))


def _runs(buckets: Sequence[Bucket]) -> Iterator[list[Bucket]]:
    """Runs of adjacent buckets with one length that become ready at even intervals, as in a described model."""
    run: list[Bucket] = []
    interval = 0.0
    for bucket in buckets:
        if run:
            same = (bucket.bytes, bucket.element_bytes) == (run[0].bytes, run[0].element_bytes)
            after = bucket.ready - run[-1].ready
            if same and (len(run) == 1 or math.isclose(after, interval, rel_tol=1e-6)):
                interval = after if len(run) == 1 else interval
                run.append(bucket)
                continue
            yield run
        run = [bucket]
    if run:
        yield run


@dataclass(frozen=True)
class _Stages:
    """The time of a bucket, in seconds by route: in memory and on the link, a chunk and all, and beyond its turns."""

    first_copy: _Floats
    copies: _Floats
    last_exchange: _Floats
    exchanges: _Floats
    latency: _Floats


class _Links:
    """The figures of the routes, as arrays."""

    def __init__(self, routes: Sequence[_Route]) -> None:
        clusters = [route.cluster for route in routes]
        self.routes = routes
        self.local = np.array([route.local for route in routes])
        self.traffic = np.array([route.traffic for route in routes])
        self.encodes = np.array([route.precision.encodes for route in routes])
        self.latency = np.array([cluster.latency for cluster in clusters])
        self.rate = np.array([cluster.bandwidth * cluster.efficiency for cluster in clusters])
        self.encode = np.array([cluster.encode for cluster in clusters])
        self.processing = np.array([1 / cluster.processing if cluster.processing else 0.0 for cluster in clusters])
        self.operation = np.array([cluster.operation for cluster in clusters])
        shares_memory = self.local > 1
        self.combine = np.where(shares_memory, [1 / cluster.memory for cluster in clusters], 0.0)  # seconds per byte
        self.wakes = np.where(shares_memory, [2 * cluster.wake for cluster in clusters], 0.0)
        self.agreement = np.array([_agreement(route.cluster, route.local, route.hosts) for route in routes])

    def stages(self, bucket: Bucket) -> _Stages:
        between = np.array([route.precision.between(bucket.element_bytes) for route in self.routes])
        cast, coded = np.where(self.encodes, 1.0, between), np.where(self.encodes, between, 1.0)
        length = bucket.bytes * cast
        longest = [chunk_bytes(route.hosts, route.local, each) for route, each in zip(self.routes, length, strict=True)]
        chunk = np.minimum(length, longest)
        chunks = length / chunk
        schedules = [
            steps_and_bytes(route.hosts, float(each) / route.local, coded=route.precision.encodes)
            for route, each in zip(self.routes, chunk, strict=True)
        ]
        steps, times = np.array(schedules, np.float64).reshape(-1, 2).T
        wire = times * chunk * coded / self.rate
        codes = np.where(self.encodes & (steps > 0), 2 * chunk / self.local / self.encode, 0.0)
        # The link is taken by a chunk, whose shards travel at once. Steps of several chunks overlap.
        exchange = self.traffic * np.maximum(np.maximum(wire, codes), (wire + steps * self.latency) / SLOTS)
        exchange += np.where((self.local > 1) & (steps > 0), self.traffic * chunk * self.processing, 0.0)
        copy = self.traffic * chunk * self.combine
        return _Stages(copy, chunks * copy, exchange, chunks * exchange, steps * self.latency + self.wakes)


def _agreement(cluster: Cluster, local: int, hosts: int) -> float:
    """From the last submission to the decision: up the tree and down."""
    arity = _native.TREE_ARITY
    depth = math.ceil(math.log(hosts * (arity - 1) + 1, arity)) - 1 if hosts > 1 else 0
    within = cluster.wake if local > 1 else 0.0
    return 2 * (within + depth * (cluster.latency + min(hosts, arity) * MESSAGE_SECONDS))


def chunk_bytes(hosts: int, local: int, length: float) -> float:
    """The size of an operation's chunks. `length`: of the operation, in bytes."""
    if hosts == 1:
        return CHUNK_BYTES
    if local == 1:
        return length
    return _native.exchanged_chunk(CHUNK_BYTES, SEGMENT_BYTES, hosts * local, LARGEST_CHUNK_BYTES)


@lru_cache(maxsize=1 << 14)
def steps_and_bytes(hosts: int, length: float, *, coded: bool = False) -> tuple[int, float]:
    """Return how many steps the engine's schedule has, and how many bytes a host sends, as a multiple of `length`.

    Args:
        hosts: how many exchange the length.
        length: in bytes.
        coded: with a codec, for which there is one schedule.
    """
    if hosts == 1:
        return 0, 0.0
    kind = "two_step" if coded else _native.fastest_allreduce(hosts, int(length))
    halvings = hosts.bit_length() - 1
    helped = 1 << halvings != hosts
    return {
        "direct": (1, hosts - 1.0),
        "two_step": (2, 2 * (hosts - 1) / hosts),
        "halving": (2 * halvings + 2 * helped, 2 * ((1 << halvings) - 1) / (1 << halvings) + 2 * helped),
        "ring": (2 * (hosts - 1), 2 * (hosts - 1) / hosts),
    }[kind]


def wire_bytes(hosts: int, length: float) -> float:
    """The amount that a host sends in an allreduce with one rank per host."""
    return steps_and_bytes(hosts, length)[1] * length


def _memory(workload: Workload, ranks: int, strategy: Strategy, share: float) -> float:
    parts = {"weights": 1.0, "gradients": 1.0, "states": float(workload.states)}
    shared = sum(part / (ranks if name in strategy.shards else 1) for name, part in parts.items())
    return shared * workload.bytes + share * workload.activations  # of the rank's share of the batch
