"""What a rank does in a step, from a report of a run or from a description of a model."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovodish.predictions.quantities import QuantityError, count, read_yaml, seconds, size

__all__ = ["Bucket", "Workload", "read_workload"]

FUSION_BYTES = 4 << 20
_REPORT = re.compile(r'<script type="application/json" id="report">(.*?)</script>', re.DOTALL)
_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
_STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together.

    Attributes:
        ready: when they are there, in seconds of the rank's own work since the first bucket of the step was.
        bytes: how long they are.
    """

    ready: float
    bytes: float


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
    """

    work: float
    buckets: tuple[Bucket, ...]
    spread: float = 0.0
    ranks: int = 1
    states: int = 2
    activations: float = 0.0

    @property
    def bytes(self) -> float:
        """Of all gradients."""
        return sum(bucket.bytes for bucket in self.buckets)


def read_workload(path: Path) -> Workload:
    """The workload of a page of `horovodish report`, or of MODEL.yaml.

    Raises:
        QuantityError: it has none.
    """
    if path.suffix in (".html", ".htm"):
        return _of_page(path)
    if path.suffix in (".yaml", ".yml"):
        return _of_yaml(path)
    raise QuantityError(f"{path}: give a page of `horovodish report` (.html) or the description of a model (.yaml)")


def _of_page(path: Path) -> Workload:
    try:
        found = _REPORT.search(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as problem:
        raise QuantityError(f"{path} cannot be read: {problem.strerror}") from problem
    known: dict[str, Any] = json.loads(found[1]) if found else {}
    if "workload" not in known:
        raise QuantityError(f"{path} is no page of `horovodish report`, or of a run without steps")
    its = known["workload"]
    buckets = tuple(Bucket(float(ready), float(length)) for ready, length in its["buckets"])
    return Workload(float(its["work"]), buckets, float(its["spread"]), int(its["ranks"]))


def _of_yaml(path: Path) -> Workload:
    keys = {
        "parameters": count,
        "dtype": _dtype,
        "step": seconds,
        "backward": count,
        "fusion_threshold": size,
        "spread": count,
        "optimizer": _states,
        "activations": size,
    }
    its = read_yaml(path, keys, frozenset({"parameters", "step"}))
    whole = its["parameters"] * its.get("dtype", 4)
    backward = its.get("backward", 2 / 3)
    if not 0 < backward <= 1 or whole <= 0 or its["step"] <= 0:
        raise QuantityError(f"{path}: parameters and step must be more than 0, and backward a share of at most 1")
    number = max(1, math.ceil(whole / (its.get("fusion_threshold") or FUSION_BYTES)))
    spacing = its["step"] * backward / number
    buckets = tuple(Bucket(spacing * index, whole / number) for index in range(number))
    return Workload(
        its["step"], buckets, its.get("spread", 0.0), 1, its.get("optimizer", 2), its.get("activations", 0.0)
    )


def _dtype(given: Any) -> int:
    if given not in _DTYPES:
        raise QuantityError(f"{given!r} is not one of {', '.join(_DTYPES)}")
    return _DTYPES[given]


def _states(given: Any) -> int:
    if given not in _STATES:
        raise QuantityError(f"{given!r} is not one of {', '.join(_STATES)}")
    return _STATES[given]
