"""Predicted scaling beside what papers have published:  python benchmarks/published.py

The papers do not say how much the work of a rank varies: SPREAD is one assumption for all of them. The example of 7 B
parameters has sequences of one length, and no spread.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from machine import command

from horovodish.predictions.cluster import read_cluster
from horovodish.predictions.steps import STRATEGIES, predict
from horovodish.predictions.workload import read_workload

SPREAD = 0.03


@dataclass(frozen=True)
class Figure:
    """What a paper says, and what is assumed. Efficiency counts from `base` ranks on."""

    name: str
    source: str
    published: str
    model: str
    cluster: str
    ranks: int
    base: int = 1
    spread: float = SPREAD


# Batches of 64. A P100 takes 142 and 154 images per second (https://www.tensorflow.org/performance/benchmarks); 130 is
# assumed for ResNet-101. PCIe 3.0 is assumed to move 16 GB/s, so that 4 GPUs reduce 10 GB/s.
_HOROVOD = "arXiv:1802.05799"
_P100 = "ranks_per_host: 4\nlink: ethernet-25g\nmemory: 10 GB/s\n"
# Assumed are 32 images in 218 ms, and NVLink of 80 GB/s, so that 8 GPUs reduce 45 GB/s.
_BIG_BASIN = "ranks_per_host: 8\nbandwidth: 50 Gbit/s\nlatency: 20 us\nmemory: 45 GB/s\n"
# Assumed are 90 ms for a step, and NVLink of 150 GB/s.
_V100 = "ranks_per_host: 8\nlink: ethernet-100g\nmemory: 85 GB/s\n"
# 16,384 tokens for each rank, with 6 operations for each token and parameter.
_SEVEN_B = "parameters: 7 B\ndtype: bfloat16\nflops: 688 T\n"
_A100 = "ranks_per_host: 8\nlink: ethernet-25g\ninside: nvlink-3\ngpu: a100\n"

FIGURES = (
    Figure("Inception V3", _HOROVOD, "90 %", "parameters: 27 M\nstep: 451 ms\n", _P100, 512),
    Figure("ResNet-101", _HOROVOD, "90 %", "parameters: 44.5 M\nstep: 492 ms\n", _P100, 512),
    Figure("VGG-16", _HOROVOD, "68 %", "parameters: 138 M\nstep: 416 ms\n", _P100, 512),
    Figure("ResNet-50", "arXiv:1706.02677", "about 90 %", "parameters: 25.6 M\nstep: 218 ms\n", _BIG_BASIN, 256, 8),
    Figure("ResNet-50", "arXiv:2006.15704", "near-linear", "parameters: 25.6 M\nstep: 90 ms\n", _V100, 256),
    *(
        Figure("7 B parameters", "", said, _SEVEN_B, _A100, ranks, spread=0.0)
        for ranks, said in ((8, ""), (16, "above 80 %"), (32, ""), (64, "collapses"), (256, "collapses"))
    ),
)


def efficiency(figure: Figure, spread: float) -> float:
    """How much of `base` ranks' work per rank and second the ranks have."""
    with tempfile.TemporaryDirectory() as folder:
        model, cluster = Path(folder, "model.yaml"), Path(folder, "cluster.yaml")
        model.write_text(f"{figure.model}spread: {spread}\n")
        cluster.write_text(figure.cluster)
        machines = read_cluster(cluster)
        workload = read_workload(model, machines)
    steps = [predict(workload, machines, ranks, STRATEGIES[0]).step for ranks in (figure.base, figure.ranks)]
    return steps[0] / steps[1]


def main() -> None:
    print(f"{command()}\n")
    print(f"{'model':<16} {'ranks':>5}  {'source':<18} {'published':>12} {'predicted':>10} {'without spread':>15}")
    for each in FIGURES:
        found, even = efficiency(each, each.spread), efficiency(each, 0.0)
        print(f"{each.name:<16} {each.ranks:>5}  {each.source:<18} {each.published:>12} {found:>10.0%} {even:>15.0%}")


if __name__ == "__main__":
    main()
