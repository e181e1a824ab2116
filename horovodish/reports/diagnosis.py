"""What a report begins with: sentences that a person can act on, each with the figure from which it follows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from horovodish.reports.durations import text_of_bytes, text_of_seconds
from horovodish.reports.figures import Figures, TensorFigures

__all__ = ["sentences"]

SENTENCES = 3
WORTH_SAYING = 0.03
"""Of the time of a step. What costs less is no illness."""
MOSTLY = 0.6
"""From this share on, one rank or bucket, or a few steps, are the cause."""
FEW_STEPS = 0.2
"""A rank that loses most of the time in a smaller share of the steps stops now and then. Otherwise it is slow."""
MANY_OPERATIONS, SMALL_BYTES = 64, 64 << 10
STALL_SECONDS = 10.0


def sentences(figures: Figures) -> list[str]:
    """The most important things first. There is at least one."""
    found = sorted(_findings(figures), key=lambda finding: -finding[0])
    return [text for _, text in found[:SENTENCES]]


def _findings(figures: Figures) -> Iterator[tuple[float, str]]:
    """Each with the share of the time that it costs."""
    if not figures.steps.size:
        yield 0.0, "No step of a wrapped optimizer was recorded, so the report has no shares of a step."
        yield from _long_waits(figures)
        return
    late, exposed = figures.share(figures.late), figures.share(figures.exposed)
    if late >= WORTH_SAYING:
        yield late, _who_is_late(figures, late)
    if exposed >= WORTH_SAYING:
        yield exposed, _what_limits(figures, exposed)
    yield from _uneven(figures)
    yield from _long_waits(figures)
    hidden = figures.share(figures.hidden)
    total = hidden + exposed
    computing = (
        f"The ranks do their own work in {1 - late - exposed:.0%} of a step of {text_of_seconds(figures.step_seconds)}"
    )
    if total > 0:
        computing += f", and hide {hidden / total:.0%} of the communication behind it"
    yield WORTH_SAYING / 2, f"{computing}."


def _who_is_late(figures: Figures, share: float) -> str:
    blamed, lags = figures.blamed()[figures.steady], figures.lags()[figures.steady]
    total = np.bincount(blamed, lags, len(figures.records))
    worst = int(total.argmax())
    rank = figures.records[worst].rank
    if total[worst] < MOSTLY * total.sum():
        median = float(np.median(lags))
        return (
            f"The ranks take turns to be late, by {text_of_seconds(median)} in the median step, which is "
            f"{median / figures.step_seconds:.0%} of it: their work is uneven, so that they wait {share:.0%} of the "
            "time. Give all ranks batches of the same cost, for example sequences of like length."
        )
    where = f"Rank {rank}" + (f" on {figures.host_of(rank)}" if len(figures.hosts) > 1 else "")
    ranks = len(figures.records)
    costs = f"the others wait {share * ranks / (ranks - 1):.0%} of the time"
    own = np.where(blamed == worst, lags, 0.0)
    few = np.sort(own)[::-1][: max(1, int(FEW_STEPS * own.size))]
    if own.size > 1 / FEW_STEPS and few.sum() >= MOSTLY * own.sum():
        return (
            f"{where} stops now and then: in {int((own > own.max() / 2).sum())} of {own.size} steps it is up to "
            f"{text_of_seconds(float(own.max()))} late, and {costs}. Look for swapping, for other processes there and "
            "for reads that stall."
        )
    return (
        f"{where} comes {text_of_seconds(float(np.median(own[own > 0])))} late in {(own > 0).mean():.0%} of the "
        f"steps: {costs}. Compare its processor, its disk and its batches with those of other ranks."
    )


def _what_limits(figures: Figures, share: float) -> str:
    phases = figures.phase_seconds()
    between = sum(phases.get(phase, 0.0) for phase in ("exchange", "encode"))
    work = sum(phases.values()) or 1.0
    per_step = figures.operations_per_step
    mean_bytes = figures.bytes_per_step / max(1.0, per_step)
    step = text_of_seconds(figures.step_seconds)
    of_step = f"is exposed for {text_of_seconds(share * figures.step_seconds)} of a step of {step}"
    if per_step >= MANY_OPERATIONS and mean_bytes <= SMALL_BYTES:
        return (
            f"A step has {per_step:.0f} operations of {text_of_bytes(mean_bytes)} on average, whose communication "
            f"{of_step}. Reduce small tensors together: with hvd.grouped_allreduce(), or by a larger fusion threshold."
        )
    if between >= work / 2 and len(figures.hosts) > 1:
        moved = figures.bytes_per_step * figures.steps.size / max(between, 1e-9)
        return (
            f"The link between the hosts is slow: the exchange there is {between / work:.0%} of the work of "
            f"communication, which moves {text_of_bytes(moved)} of gradients per second and {of_step}. Send less "
            '(compression="int8", LocalSGD), or use a faster network (--network-interfaces).'
        )
    largest = max(figures.tensors, key=lambda each: each.track.bytes or 0)
    size = largest.track.bytes or 0
    if per_step > 1 and size > SMALL_BYTES and size >= MOSTLY * figures.bytes_per_step:
        return (
            f"The {_bucket(largest)} has {text_of_bytes(size)}, {size / figures.bytes_per_step:.0%} of all "
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
                f"Rank {each.rank} once waited {text_of_seconds(waits.max() / 1e9)} for other ranks, in {track.kind} "
                f"'{track.name}' of step {step}.",
            )
    if longest[1]:
        yield WORTH_SAYING, longest[1]
