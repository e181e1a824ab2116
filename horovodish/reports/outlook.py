"""The end of a report: the gain of more ranks, int8 and another fusion threshold for this run."""

from __future__ import annotations

from collections.abc import Iterator

from horovodish.gradients.autotune import CHOICES, WORTH
from horovodish.predictions.cluster import Cluster
from horovodish.predictions.steps import STRATEGIES, predict
from horovodish.predictions.workload import NEEDED, Workload, recut, workload_from
from horovodish.reports.durations import text_of_seconds
from horovodish.reports.figures import Figures, workload_of

__all__ = ["outlook"]

FURTHER = (4, 16)
"""How many times as many ranks."""
FITS = 0.25
"""A prediction that is further off for the run itself says nothing about others."""


def outlook(figures: Figures) -> list[str]:
    """Sentences for a list. There is at least one."""
    known = workload_of(figures)
    if known is None:
        return [f"Nothing is predicted: {NEEDED}."]
    return list(_sentences(figures, workload_from(known)))


def _sentences(figures: Figures, workload: Workload) -> Iterator[str]:
    cluster = Cluster(ranks_per_host=max(map(len, figures.hosts), default=workload.ranks))
    plain, _, int8, *_ = STRATEGIES
    now = predict(workload, cluster, workload.ranks, plain)
    yield (
        f"Assumed are hosts of {cluster.ranks_per_host} ranks, and links of {cluster.bandwidth * 8 / 1e9:g} Gbit/s and "
        f"{text_of_seconds(cluster.latency)} between them. For this run, the prediction is a step of "
        f"{text_of_seconds(now.step)}; measured were {text_of_seconds(figures.step_seconds)}."
    )
    if abs(now.step / figures.step_seconds - 1) > FITS:
        yield "That does not fit, so nothing more is predicted here: describe your machines to horovodish predict."
        return
    for times in FURTHER:
        ranks = times * workload.ranks
        gains = [times * now.step / predict(workload, cluster, ranks, strategy).step for strategy in (plain, int8)]
        yield (
            f"With {ranks} ranks, each with the batch that it has now, the run would do {gains[0]:.3g} times the work "
            f"per second, and with int8 {gains[1]:.3g} times."
        )
    steps = {
        threshold: predict(recut(workload, int(threshold * 2**20)), cluster, workload.ranks, plain).step
        for threshold in CHOICES["fusion_threshold_mb"]
    }
    best = min(steps, key=lambda threshold: steps[threshold])
    if steps[best] < now.step * (1 - WORTH):
        yield (
            f"A fusion threshold of {best:g} MB would give a step of {text_of_seconds(steps[best])} instead of "
            f"{text_of_seconds(now.step)}, if the tensors of a bucket are alike (--fusion-threshold-mb {best:g})."
        )
    else:
        yield f"No fusion threshold from {min(steps):g} to {max(steps):g} MB would make the step {WORTH:.0%} shorter."
