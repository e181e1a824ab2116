"""The bits of every collective in every world, as they were recorded: a change of how they travel does not change them.

Where a change of the bits is meant, `python -c "from support.bits import record; record()"` in tests/ records anew.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import horovodish as hvd
from support.model import FLOATS, Array, values

TABLE = Path(__file__).with_name("bits.json")
LENGTHS = [1, 7, 4097, 300_007]
WORLDS = [(1, "auto"), *((np, plane) for np in (2, 3, 4) for plane in ("auto", "mpi_ring"))]
"""The worlds on this machine alone. With `mpi_ring` each rank is a host."""
LAYOUTS = [[1, 1], [2, 2], [2, 1, 2]]
"""Ranks of each host."""
ENVIRONMENT = {"HOROVODISH_RING_SEGMENT_KB": "252"}
"""The order of additions between three hosts or more depends on it, and its default on what MPI was started with."""


def checksums() -> dict[str, int]:
    """One for each kind of collective, of this rank's results. On every rank."""
    hvd.init()
    return {name: zlib.crc32(b"".join(result.tobytes() for result in results())) for name, results in KINDS.items()}


def _reduced(*ops: str) -> Callable[[], Iterator[Array]]:
    def results() -> Iterator[Array]:
        for op in ops:
            for dtype in [*FLOATS, *(["int32", "uint8"] if op != "Adasum" else [])]:
                for length in LENGTHS:
                    own = values(dtype, length, hvd.rank(), "Product" if op == "Product" else "Sum")
                    for _ in range(2):  # what is small travels with the negotiation from the second time on
                        yield hvd.allreduce(own, op=getattr(hvd, op), name=f"{op} {dtype} {length}")

    return results


def _scaled() -> Iterator[Array]:
    for dtype in [*FLOATS, "int32"]:
        for length in LENGTHS:
            own = values(dtype, length, hvd.rank())
            factors = {"prescale_factor": 0.3, "postscale_factor": 1.7}
            yield hvd.allreduce(own, op=hvd.Average, name=f"scaled {dtype} {length}", **factors)


def _grouped() -> Iterator[Array]:
    kinds = [("float32", 70_001), ("int16", 3), ("bfloat16", 999), ("float32", 9), ("float32", 600_011), ("float64", 0)]
    for op in ("Sum", "Average", "Max"):
        group = [values(dtype, length, hvd.rank()) for dtype, length in kinds]
        yield from hvd.grouped_allreduce(group, op=getattr(hvd, op), name=f"group {op}")
    yield from hvd.grouped_allreduce(group[3:5], op=hvd.Adasum, name="group Adasum")


def _scattered() -> Iterator[Array]:
    for op in ("Sum", "Average", "Min"):
        for shape in ((2, 3), (7,), (4099, 5), (200_003,)):
            for dtype in ("float32", "float16", "int32"):
                own = values(dtype, shape, hvd.rank())
                yield hvd.reducescatter(own, op=getattr(hvd, op), name=f"scattered {op} {shape} {dtype}")
        group = [values("float32", length, hvd.rank()) for length in (5, 70_003)]
        yield from hvd.grouped_reducescatter(group, op=getattr(hvd, op), name=f"scattered {op}")


def _moved() -> Iterator[Array]:
    own, size = hvd.rank(), hvd.size()
    for most in (1, 50_021):
        rows = values("float32", (own % 3 * most, 2), own)
        yield hvd.allgather(rows, name="rows")
        yield from hvd.grouped_allgather([rows, rows[:1]], name="group of rows")
        splits = [(own + 2 * to) % 3 * most for to in range(size)]
        yield from hvd.alltoall(values("int16", (sum(splits), 3), own), splits, name="exchange")
        for root in range(size):
            yield hvd.broadcast(values("float64", 7 * most, own), root, name=f"from {root} {most}")


def _with_a_rank_that_has_joined() -> Iterator[Array]:
    if hvd.rank() != hvd.size() - 1 or hvd.size() == 1:
        for length in LENGTHS:
            for op in ("Sum", "Average", "Max"):
                own = values("float32", length, hvd.rank())
                yield hvd.allreduce(own, op=getattr(hvd, op), name=f"joined {op} {length}")
    hvd.join()


KINDS: dict[str, Callable[[], Iterator[Array]]] = {
    "sums": _reduced("Sum", "Average"),
    "others": _reduced("Min", "Max", "Product"),
    "adasum": _reduced("Adasum"),
    "scaled": _scaled,
    "grouped": _grouped,
    "scattered": _scattered,
    "moved": _moved,
    "joined": _with_a_rank_that_has_joined,
}


def difference(world: str, of_ranks: list[dict[str, int]]) -> str:
    """What is not as it was recorded, or nothing."""
    recorded = json.loads(TABLE.read_text())[world]
    return ", ".join(
        f"{kind} on rank {rank}"
        for rank, found in enumerate(of_ranks)
        for kind in KINDS
        if found[kind] != recorded[kind][rank]
    )


def record() -> None:
    """Write the table. On one process, which starts the ranks."""
    from support.hosts import hosts, run_on_hosts
    from support.ranks import run_ranks

    found = {
        f"{np} {plane}": run_ranks(checksums, np, env={**ENVIRONMENT, "HOROVODISH_PLANE": plane})
        for np, plane in WORLDS
    }
    with hosts(3) as made:
        found |= {f"hosts {layout}": run_on_hosts(checksums, made, layout, env=ENVIRONMENT) for layout in LAYOUTS}
    table = {world: {kind: [each[kind] for each in of_ranks] for kind in KINDS} for world, of_ranks in found.items()}
    TABLE.write_text(json.dumps(table, indent=1).replace("\n   ", " ").replace("\n  ]", " ]") + "\n")
