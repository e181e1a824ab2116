"""The work of a rank in a step, from a report of a run or from a description of a model."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from horovodish.gradients.plan import Payload, plan_buckets
from horovodish.predictions.cluster import Cluster
from horovodish.predictions.quantities import LARGEST, QuantityError, count, read_yaml, seconds, size
from horovodish.settings import Settings

__all__ = ["NEEDED", "Bucket", "Workload", "read_workload", "recut", "workload_from"]

NEEDED = (
    "a prediction takes steps of two or more ranks, whose wrapped optimizer reduces the same buckets in each step, "
    "without sync= or shard="
)

_MOST_BUCKETS = 1 << 20
_MOST_BYTES = 1 << 62
"""The engine counts bytes in 64 bits."""
_REPORT = re.compile(r'<script type="application/json" id="report">(.*?)</script>', re.DOTALL)
UTILIZATION = 0.4
"""Which share of a GPU's peak a model gets, if its description does not say it."""
_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
_STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together.

    Attributes:
        ready: when they are there, in seconds of the rank's own work since the first bucket of the step was.
        bytes: how long they are.
        element_bytes: of each number.
        tensors: how many they are.
    """

    ready: float
    bytes: float
    element_bytes: int = 4
    tensors: int = 1


@dataclass(frozen=True)
class Workload:
    """A step of a rank. A step begins when its first bucket is ready, and the script waits after its last one.

    Attributes:
        work: the rank's own work, in seconds.
        buckets: by the time when they are ready.
        spread: the standard deviation of the own work between ranks, as a share of it.
        ranks: with how many it was measured; 1 for a description.
        states: numbers of the optimizer for each parameter.
        activations: bytes of memory that are no weights, gradients or states.
        steps: which `ranks` ranks take in all; 0: not known.
    """

    work: float
    buckets: tuple[Bucket, ...]
    spread: float = 0.0
    ranks: int = 1
    states: int = 2
    activations: float = 0.0
    steps: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError unless a step can be like this."""
        times = [bucket.ready for bucket in self.buckets]
        sizes = [size for each in self.buckets for size in (each.bytes, each.element_bytes, each.tensors)]
        if not (0 < self.work <= LARGEST and 0 <= self.spread <= LARGEST and 1 <= self.ranks <= LARGEST):
            raise ValueError(f"a step of {self.work} s with a spread of {self.spread} on {self.ranks} ranks")
        if not times or times != sorted(times) or not all(0 <= time <= LARGEST for time in times):
            raise ValueError(f"buckets that are ready at {times} s")
        if not all(1 / LARGEST <= size <= LARGEST for size in sizes) or self.bytes > _MOST_BYTES:
            raise ValueError(f"buckets of {self.bytes} bytes in all, or one without a size")

    @cached_property
    def bytes(self) -> float:
        """Bytes of all gradients."""
        return sum(bucket.bytes for bucket in self.buckets)


def read_workload(path: Path, cluster: Cluster) -> Workload:
    """The workload of a page of `horovodish report`, or of MODEL.yaml, with the GPUs of the cluster.

    Raises:
        QuantityError: it has none.
    """
    if path.suffix in (".html", ".htm"):
        return _of_page(path)
    if path.suffix in (".yaml", ".yml"):
        return _of_yaml(path, cluster)
    raise QuantityError(f"{path}: give a page of `horovodish report` (.html) or the description of a model (.yaml)")


def recut(workload: Workload, threshold_bytes: int) -> Workload:
    """The same tensors in the buckets that another fusion threshold makes.

    The workload says how many tensors a bucket has. They count as equal, and as ready one after the other since the
    bucket before was.
    """
    ready: list[float] = []
    elements: list[int] = []
    payloads: list[Payload] = []
    before = 0.0
    for bucket in workload.buckets:
        spacing = (bucket.ready - before) / bucket.tensors
        ready += [bucket.ready - spacing * left for left in reversed(range(bucket.tensors))]
        payloads += [Payload(round(bucket.bytes / bucket.tensors), bucket.element_bytes)] * bucket.tensors
        elements += [bucket.element_bytes] * bucket.tensors
        before = bucket.ready
    cut = [
        Bucket(
            max(ready[each] for each in members),
            sum(payloads[each].size_bytes for each in members),
            elements[members[0]],
            len(members),
        )
        for members in plan_buckets(payloads, threshold_bytes)
    ]
    return replace(workload, buckets=tuple(sorted(cut, key=lambda bucket: bucket.ready)))


def _of_page(path: Path) -> Workload:
    try:
        found = _REPORT.search(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as problem:
        raise QuantityError(f"{path} cannot be read: {problem.strerror}") from problem
    try:
        known = json.loads(found[1]) if found else {}
        if "workload" in known or "figures" not in known:
            return workload_from(known["workload"])
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as problem:
        remedy = "name a page of `horovodish report`, of a run with steps; make a page of another version again"
        raise QuantityError(f"{path} says nothing about steps that this version can read: {remedy}") from problem
    raise QuantityError(f"{path} has nothing to predict from: {NEEDED}")


def workload_from(its: Mapping[str, Any]) -> Workload:
    """The workload that a report has found."""
    buckets = tuple(
        Bucket(float(ready), float(length), int(element), int(tensors))
        for ready, length, element, tensors in its["buckets"]
    )
    return Workload(float(its["work"]), buckets, float(its["spread"]), int(its["ranks"]))


def _of_yaml(path: Path, cluster: Cluster) -> Workload:
    keys = {
        "parameters": count,
        "dtype": _dtype,
        "step": seconds,
        "flops": count,
        "utilization": count,
        "backward": count,
        "fusion_threshold": size,
        "spread": count,
        "optimizer": _states,
        "activations": size,
        "samples": count,
        "epochs": count,
        "batch": count,
    }
    its = read_yaml(path, keys, frozenset({"parameters"}))
    element = its.get("dtype", 4)
    whole = its["parameters"] * element
    states = its.get("optimizer", 2)
    if "step" in its and (others := " and ".join(sorted(its.keys() & {"flops", "utilization"}))):
        raise QuantityError(f"{path}: step and {others} both say how long a step takes: leave one out")
    if its.get("spread", 0.0) > 1:
        raise QuantityError(f"{path}: spread is a share of step, at most 1")
    step = its["step"] if "step" in its else _step_on_gpu(path, its, whole, states, cluster)
    backward = its.get("backward", 2 / 3)
    if not 0 < backward <= 1 or whole <= 0 or step <= 0:
        raise QuantityError(f"{path}: parameters and step must be more than 0, and backward a share of at most 1")
    threshold = its.get("fusion_threshold", Settings().bucket_mb(on_gpu=cluster.gpu is not None) * 2**20)
    if threshold <= 0:
        raise QuantityError(f"{path}: fusion_threshold must be more than 0, such as 4 MB")
    if whole > _MOST_BYTES:
        raise QuantityError(f"{path}: parameters take {_MOST_BYTES:.3g} bytes at most: look at their unit")
    number = max(1, math.ceil(whole / threshold))
    if number > _MOST_BUCKETS:
        raise QuantityError(
            f"{path}: the gradients make {number:.3g} buckets, and a prediction takes {_MOST_BUCKETS} at most: look at "
            "the unit of parameters, or give a larger fusion_threshold, such as 64 MB"
        )
    spacing = step * backward / number
    buckets = tuple(Bucket(spacing * index, whole / number, element) for index in range(number))
    activations, steps = its.get("activations", 0.0), _steps(path, its)
    return Workload(step, buckets, its.get("spread", 0.0), 1, states, activations, steps)


def _step_on_gpu(path: Path, its: dict[str, Any], whole: float, states: int, cluster: Cluster) -> float:
    """The own work of a step: its operations, then the optimizer, which goes once through the memory."""
    if "flops" not in its:
        raise QuantityError(f"{path} lacks step, such as step: 90 ms; or flops, such as flops: 1.2 T")
    if cluster.gpu is None:
        raise QuantityError(f"{path}: flops needs the GPU in the file of --cluster, such as gpu: a100; or give step")
    utilization = its.get("utilization", UTILIZATION)
    if not 0 < utilization <= 1:
        raise QuantityError(f"{path}: utilization is a share of the GPU's peak: more than 0 and at most 1")
    # It reads gradients, and reads and writes weights and states.
    moved = (3 + 2 * states) * whole
    return float(its["flops"] / (utilization * cluster.gpu.flops) + moved / cluster.gpu.bandwidth)


def _steps(path: Path, its: dict[str, Any]) -> float:
    """Which one rank takes for all epochs; 0 where the description does not say it."""
    given = its.keys() & {"samples", "epochs", "batch"}
    if not given:
        return 0.0
    if lacks := sorted({"samples", "batch"} - given):
        raise QuantityError(f"{path} lacks {' and '.join(lacks)}: the time to train needs samples and batch")
    if none := sorted(each for each in given if its[each] == 0):
        raise QuantityError(f"{path}: {' and '.join(none)} must be more than 0")
    steps = float(its["samples"] * its.get("epochs", 1.0) / its["batch"])
    if steps < 1:
        raise QuantityError(f"{path}: batch is larger than samples in all epochs: training takes a step or more")
    return steps


def _dtype(given: Any) -> int:
    if given not in _DTYPES:
        raise QuantityError(f"{given!r} is not one of {', '.join(_DTYPES)}")
    return _DTYPES[given]


def _states(given: Any) -> int:
    if given not in _STATES:
        raise QuantityError(f"{given!r} is not one of {', '.join(_STATES)}")
    return _STATES[given]
