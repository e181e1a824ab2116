"""The beginning of a report: sentences that a person can act on, each with the figure that supports it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from horovodish.reports.durations import text_of_bytes
from horovodish.reports.durations import text_of_seconds as _seconds
from horovodish.reports.figures import Figures, TensorFigures

__all__ = ["sentences"]

SENTENCES = 3
WORTH_SAYING = 0.03
"""Share of the time of a step. A smaller cost is not reported as a problem."""
MOSTLY = 0.6
"""From this share on, one rank or bucket, or a few steps, are the cause."""
FEW_STEPS = 0.2
"""A rank that loses most of the time in a smaller share of the steps stops now and then. Otherwise it is slow."""
MOST_NAMED = 8
MANY_OPERATIONS, SMALL_BYTES = 64, 64 << 10
STALL_SECONDS = 10.0


def sentences(figures: Figures) -> list[str]:
    """The most important things first. There is at least one."""
    found = sorted(_findings(figures), key=lambda finding: -finding[0])
    return [text for _, text in found[:SENTENCES]]


def _findings(figures: Figures) -> Iterator[tuple[float, str]]:
    """Each with the share of the time that it costs."""
    yield from _long_waits(figures)
    if not figures.steps.size:
        yield from _without_steps(figures)
        return
    late, exposed, hidden = (figures.share(part) for part in (figures.late, figures.exposed, figures.hidden))
    if late >= WORTH_SAYING and len(figures.records) > 1:
        yield late, _who_is_late(figures, late)
    if exposed >= WORTH_SAYING:
        yield exposed, _what_limits(figures)
    yield from _uneven(figures)
    own = f"The ranks do their own work in {1 - late - exposed:.0%} of a step of {_seconds(figures.step_seconds)}"
    if hidden + exposed > 0:
        own += f", and hide {hidden / (hidden + exposed):.0%} of the communication behind it"
    yield WORTH_SAYING / 2, f"{own}."


def _without_steps(figures: Figures) -> Iterator[tuple[float, str]]:
    yield 0.0, "No step of a wrapped optimizer was recorded, so the report has no shares of a step."
    worst = int(figures.late_seconds.argmax())
    late, operations = float(figures.late_seconds[worst]), int(figures.times_last.sum())
    lasted = max((each.end - each.begin) / 1e9 for each in figures.records)
    if operations and late >= WORTH_SAYING * lasted:
        yield (
            late / lasted,
            f"{_named(figures, worst)} was last in {int(figures.times_last[worst])} of {operations} operations. "
            f"Another rank has waited {_seconds(late)} for it in all, of {_seconds(lasted)} that were recorded.",
        )


def _named(figures: Figures, index: int) -> str:
    rank = figures.records[index].rank
    return f"Rank {rank}" + (f" on {figures.host_of(rank)}" if len(figures.hosts) > 1 else "")


def _who_is_late(figures: Figures, share: float) -> str:
    total = figures.caused.sum(axis=0)
    steady = figures.steady
    if total.sum() < MOSTLY * figures.late[:, steady].sum():
        return (
            f"The ranks wait {share:.0%} of the time until enough of them have a gradient (wait_for=). "
            "hvd.straggler_report() says which rank misses steps."
        )
    reduces = figures.operations[:, steady].any(axis=0)
    worst = int(total.argmax())
    if total[worst] < MOSTLY * total.sum():
        median = float(np.median(figures.lags[:, steady].max(axis=0)[reduces]))
        return (
            f"The ranks take turns to be late, by {_seconds(median)} in the median step, which is "
            f"{median / figures.step_seconds:.0%} of it: their work is uneven, so that they wait {share:.0%} of the "
            "time. Give all ranks batches of the same cost, for example sequences of like length."
        )
    waits = figures.caused[:, worst] / figures.durations[:, steady].sum(axis=1)
    waiting = np.flatnonzero(waits >= waits.max() / 2)
    who = "the others wait"
    if waiting.size < len(figures.records) - 1:
        ranks = ", ".join(str(figures.records[each].rank) for each in waiting[:MOST_NAMED])
        who = f"rank {ranks} waits" if waiting.size == 1 else f"ranks {ranks} wait"
    costs = f"{who} {waits[waiting].mean():.0%} of the time"
    own = figures.lags[worst, steady][reduces]
    few = np.sort(own)[::-1][: max(1, int(FEW_STEPS * own.size))]
    if own.size > 1 / FEW_STEPS and few.sum() >= MOSTLY * own.sum():
        return (
            f"{_named(figures, worst)} stops now and then: in {int((own > own.max() / 2).sum())} of {own.size} steps "
            f"it is up to {_seconds(float(own.max()))} late, and {costs}. Look for swapping, for other processes there "
            "and for reads that stall."
        )
    with_it = "" if reduces.all() else " where ranks meet"
    return (
        f"{_named(figures, worst)} comes {_seconds(float(np.median(own[own > 0])))} late in {(own > 0).mean():.0%} of "
        f"the steps{with_it}: {costs}. Compare its processor, disk and batches with another rank's."
    )


def _what_limits(figures: Figures) -> str:
    phases = figures.phase_seconds()
    between = sum(phases.get(phase, 0.0) for phase in ("exchange", "encode"))
    work = sum(phases.values()) or 1.0
    per_step, per_step_bytes = figures.median(figures.operations), figures.median(figures.bytes)
    mean_bytes = per_step_bytes / max(1.0, per_step)
    step = _seconds(figures.step_seconds)
    of_step = f"is exposed for {_seconds(figures.median(figures.exposed))} of a step of {step}"
    if per_step >= MANY_OPERATIONS and mean_bytes <= SMALL_BYTES:
        return (
            f"A step has {per_step:.0f} operations of {text_of_bytes(mean_bytes)} on average, whose communication "
            f"{of_step}. Reduce small tensors together: with hvd.grouped_allreduce(), or by a larger fusion threshold."
        )
    if between >= work / 2 and len(figures.hosts) > 1:
        moved = float(figures.bytes.mean(axis=0).sum()) / max(between, 1e-9)
        return (
            f"The link between the hosts is slow: the exchange there is {between / work:.0%} of the work of "
            f"communication, which moves {text_of_bytes(moved)} of gradients per second and {of_step}. Send less "
            '(compression="int8", LocalSGD), or use a faster network (--network-interfaces).'
        )
    largest = max(figures.tensors, key=lambda each: each.track.bytes or 0)
    size = largest.track.bytes or 0
    if per_step > 1 and size > SMALL_BYTES and size >= MOSTLY * per_step_bytes:
        return (
            f"The {_bucket(largest)} has {text_of_bytes(size)}, {min(1.0, size / per_step_bytes):.0%} of all "
            f"bytes of a step, and communication {of_step}. A large bucket starts when its last gradient is there: a "
            "smaller fusion threshold cuts it."
        )
    return f"Communication {of_step}; most of it is the {_bucket(figures.tensors[0])}."


def _bucket(tensor: TensorFigures) -> str:
    return f"{'bucket' if tensor.track.tensors > 1 else 'tensor'} '{tensor.track.name}'"


def _uneven(figures: Figures) -> Iterator[tuple[float, str]]:
    counts = {each.rank: each.step_numbers.size for each in figures.records if not each.is_cut}
    if not counts or max(counts.values()) - min(counts.values()) < 2:
        return
    least, most = min(counts, key=lambda rank: counts[rank]), max(counts, key=lambda rank: counts[rank])
    share = 1 - counts[least] / counts[most]
    yield (
        share,
        f"Rank {least} took {counts[least]} steps and rank {most} {counts[most]}: their data is uneven, so that rank "
        f"{least} had nothing to do in {share:.0%} of the steps. Give all ranks as many batches.",
    )


def _long_waits(figures: Figures) -> Iterator[tuple[float, str]]:
    """A wait of many seconds is worth a sentence, however many steps there are."""
    longest = (STALL_SECONDS * 1e9, "")
    for each, last in zip(figures.records, figures.last_submissions, strict=True):
        waits = last - each.submitted
        if waits.size and waits.max() > longest[0]:
            at = int(waits.argmax())
            track = each.tracks[int(each.track[at])]
            step = int(np.searchsorted(each.step_begins, each.submitted[at], side="right"))
            longest = (
                float(waits.max()),
                f"Rank {each.rank} once waited {_seconds(waits.max() / 1e9)} for other ranks, in {track.kind} "
                f"'{track.name}' of step {step}.",
            )
    if longest[1]:
        yield WORTH_SAYING, longest[1]
