"""Files of records as ranks write them, of training that is made up."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

RECORD = np.dtype([("at", "<i8"), ("length", "<f4"), ("bits", "<u4")])
SUBMITTED, DECIDED, PHASE, SETTLED, FAILED = range(1, 6)
PHASES = {"reduce": 1, "exchange": 2, "wait": 8}
WAITS_TRACK, FIRST_TRACK = 3, 4
MS = 1_000_000


@dataclass
class Bucket:
    """What each step reduces. Times are milliseconds after the ranks' own work: ready: a share of the work."""

    name: str
    bytes: int
    ready: float
    takes: float
    tensors: int = 1


def block(kind: bytes, content: bytes) -> bytes:
    return kind + len(content).to_bytes(8, "little") + content


def objects(*each: dict[str, Any]) -> bytes:
    return block(b"objects\n", "".join(json.dumps(one) + "\n" for one in each).encode())


def write_run(
    folder: Path,
    work: Callable[[int, int], float],
    buckets: Sequence[Bucket],
    *,
    steps: int = 60,
    ranks: int = 4,
    hosts: Sequence[Sequence[int]] | None = None,
    phase: str = "reduce",
    begun: int = 1,
    name: str = "run",
    killed: Sequence[int] = (),
    every: int = 1,
    burst: int = 0,
    offset: int = 0,
    buckets_of: str = "",
) -> list[str]:
    """Write the records of a synchronous run.

    Args:
        folder: where.
        work: how long a rank computes in a step, in milliseconds.
        buckets: what it reduces.
        steps, ranks, hosts: how many, and which ranks a host has.
        phase: where the engine spends its time.
        begun: what tells runs apart.
        name: of the files.
        killed: ranks whose records have no end.
        every: the ranks reduce once in this many steps.
        burst: one step reduces its last bucket this many times more.
        offset: the first rank.
        buckets_of: a process set, as the names of its tracks begin.

    Returns:
        The files.
    """
    records: list[list[tuple[int, float, int]]] = [[] for _ in range(ranks)]
    begins = np.zeros((ranks, steps + 1))
    now = np.zeros(ranks)
    for step in range(steps):
        begins[:, step] = now
        takes = np.array([work(rank, step) for rank in range(ranks)])
        reduced = [] if (step + 1) % every else [*enumerate(buckets)]
        if step == steps // 2 and burst:
            last = len(buckets) - 1
            reduced += [(last, Bucket(buckets[last].name, buckets[last].bytes, 1.0, 0.05))] * burst
        submitted = [now + takes * bucket.ready for _, bucket in reduced]
        computed, free = now + takes, 0.0
        settled = []
        for (_, bucket), times in zip(reduced, submitted, strict=True):
            free = max(free, float(times.max())) + bucket.takes
            settled.append(free)
        end = np.maximum(computed, free)
        for rank in range(ranks):
            for (number, bucket), times, done in zip(reduced, submitted, settled, strict=True):
                bits = (FIRST_TRACK + number) << 8
                records[rank] += [
                    (int(times[rank] * MS), 0, bits | SUBMITTED),
                    (int(times.max() * MS), 0, bits | DECIDED),
                    (int(done * MS), bucket.takes * MS, bits | PHASES[phase] << 4 | PHASE),
                    (int(done * MS), 0, bits | SETTLED),
                ]
            waited = end[rank] - computed[rank]
            if waited > 0:
                bits = WAITS_TRACK << 8 | PHASES["wait"] << 4 | PHASE
                records[rank].append((int(end[rank] * MS), waited * MS, bits))
        now = end
    begins[:, steps] = now
    return [
        _write(folder / f"{name}.rank-{rank + offset}.records", rank + offset, records[rank], begins[rank],
               [replace(bucket, name=buckets_of + bucket.name) for bucket in buckets],
               [list(one) for one in hosts or [range(ranks)]], begun, rank in killed)
        for rank in range(ranks)
    ]  # fmt: skip


def _write(
    path: Path,
    rank: int,
    records: list[tuple[int, float, int]],
    begins: Any,
    buckets: Sequence[Bucket],
    hosts: list[list[int]],
    begun: int,
    is_cut: bool,
) -> str:
    host = next(index for index, ranks in enumerate(hosts) if rank in ranks)
    about = {"rank": rank, "hosts": hosts, "host": f"node-{host}", "begun": begun, "command": ["/home/me/train.py"]}
    tracks = [
        {"track": FIRST_TRACK + number, "name": each.name, "kind": "allreduce", "bytes": each.bytes,
         "tensors": each.tensors, "dtype": "float32", "on_host": True}
        for number, each in enumerate(buckets)
    ]  # fmt: skip
    steps = [{"step": f"step {number + 1}", "at": int(at * MS)} for number, at in enumerate(begins)]
    ended = [] if is_cut else [{"ended": int(begins[-1] * MS)}]
    data = objects(about, *tracks, *steps)
    middle = len(records) // 2
    for part in (records[:middle], records[middle:]):
        data += block(b"records\n", np.array(part, RECORD).tobytes())
    path.write_bytes(data + objects(*ended) if ended else data)
    return str(path)
