"""The sections of a report about one run."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import numpy as np

from horovodish.reports.document import PageData, step_chart, table
from horovodish.reports.durations import text_of_bytes, text_of_seconds
from horovodish.reports.figures import Figures, TensorFigures
from horovodish.reports.picture import step_picture
from horovodish.reports.records import trace_events

__all__ = ["Names", "about_section", "elastic_events", "world_section"]

MOST_TENSORS, MOST_RANKS, MOST_EVENTS = 60, 256, 200
MOST_TRACED_EVENTS = 4000
KEYS = (("own", "own work"), ("late", "waits for late ranks"), ("exposed", "waits for communication"))
OPERATIONS = (("late", "not submitted by all"), ("hidden-part", "communicates"))


class Names:
    """Names of hosts, or what stands for them. Where names are hidden, the page has no marks and no errors either."""

    def __init__(self, hidden: bool) -> None:
        self.hidden = hidden
        self._hosts: dict[str, str] = {}

    def host(self, name: str) -> str:
        if not self.hidden:
            return name
        return self._hosts.setdefault(name, f"host-{len(self._hosts) + 1}")


def world_section(figures: Figures, names: Names, data: PageData, of: str) -> str:
    parts = [_notes(figures)]
    if figures.steps.size:
        steps = figures.steps.tolist()
        slowest = figures.durations.max(axis=0) * 1e3
        shares = {"late": figures.late, "exposed": figures.exposed, "hidden": figures.hidden}
        means = {key: part.mean(axis=0) * 1e3 for key, part in shares.items()}
        parts += [
            f"<h2>Step time{of}</h2>",
            step_chart(data, steps, "ms", [("time", "own", slowest, "mean"), ("longest", "late", slowest, "max")]),
            f"<h2>What steps pay for{of}</h2>",
            step_chart(data, steps, "ms", [
                ("waits for late ranks", "late", means["late"], "mean"),
                ("waits for communication", "exposed", means["exposed"], "mean"),
                ("hidden communication", "hidden", means["hidden"], "mean"),
            ]),
            *_pictures(figures, names, data, of),
        ]  # fmt: skip
    parts += [f"<h2>Ranks{of}</h2>", _ranks(figures), f"<h2>Tensors and buckets{of}</h2>", _tensors(figures)]
    parts += [f"<h2>Dtypes and links{of}</h2>", _kinds(figures)]
    if phases := figures.phase_seconds():
        work = [(phase, text_of_seconds(seconds)) for phase, seconds in phases.items()]
        parts += [f"<h2>Work of communication{of}</h2>", table(("phase", "a rank's time, in all"), work)]
    events = [(at, each.rank, text) for each in figures.records for at, text in each.marks]
    if events and not names.hidden:
        rows = [(text, rank, text_of_seconds(at / 1e9)) for at, rank, text in sorted(events)[:MOST_EVENTS]]
        parts += [f"<h2>Marks and errors{of}</h2>", table(("what", "rank", "after"), rows)]
    return "".join(parts)


def _notes(figures: Figures) -> str:
    notes = []
    if figures.missing:
        notes.append(
            f"There are no records of {_ranks_named(figures.missing)}: waits for them count as communication. Records "
            "lie on the host of their rank; copy them here, and call `horovodish report`."
        )
    for each in figures.records:
        if each.dropped:
            notes.append(f"Rank {each.rank} had no time to write {each.dropped:,} records, so figures are too small.")
    if cut := [each.rank for each in figures.records if each.is_cut]:
        who = "it was" if len(cut) == 1 else "they were"
        notes.append(f"The records of {_ranks_named(cut)} end early: {who} killed, or could not write.")
    return "".join(f"<p><strong>Note.</strong> {escape(note)}</p>" for note in notes)


def _ranks_named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _pictures(figures: Figures, names: Names, data: PageData, of: str) -> Iterable[str]:
    longest = figures.durations.max(axis=0)
    offset = figures.steady.start
    kept = longest[offset:]
    typical = offset + int(np.abs(kept - np.median(kept)).argmin())
    slowest = offset + int(kept.argmax())
    keys = "".join(
        f'<span class="entry"><i class="key {kind}"></i>{text}</span> ' for kind, text in (*KEYS, *OPERATIONS)
    )
    for title, step in (("A typical step", typical), ("The slowest step", slowest)):
        begin = int(figures.begins[:, step].min())
        end = int((figures.begins[:, step] + figures.durations[:, step] * 1e9).max())
        events: list[dict[str, Any]] = []
        for each in figures.records:
            shown = itertools.islice(trace_events(each, begin, end), MOST_TRACED_EVENTS // len(figures.records))
            events += (event for event in shown if not (names.hidden and event["ph"] == "i"))
        number = len(data.traces)
        data.traces.append(events)
        name = f"step {figures.steps[step]}"
        rows = [
            (
                f"rank {each.rank}",
                *(
                    text_of_seconds(float(part[index, step]))
                    for part in (figures.durations, figures.late, figures.exposed, figures.hidden)
                ),
            )
            for index, each in enumerate(figures.records[:MOST_RANKS])
        ]
        head = ("rank", "step", "waits for late ranks", "waits for communication", "hidden communication")
        yield (
            f"<h2>{title}{of}: {name}</h2><figure><div class=scroll>{step_picture(figures, step)}</div>"
            f'<figcaption>{keys} <button data-trace="{number}" data-title="{name}">open in Perfetto</button>'
            f"</figcaption></figure><details><summary>as a table</summary>{table(head, rows)}</details>"
        )


def _ranks(figures: Figures) -> str:
    rows = []
    kept = figures.steady
    for index, each in enumerate(figures.records[:MOST_RANKS]):
        means = [
            float(part[index, kept].mean()) if part[index, kept].size else 0.0
            for part in (figures.durations, figures.late, figures.exposed, figures.hidden)
        ]
        own = max(0.0, means[0] - means[1] - means[2])
        hidden = means[3] / (means[2] + means[3]) if means[2] + means[3] > 0 else 0.0
        most = max(figures.tensors, key=lambda tensor: tensor.late.get(each.rank, 0.0))
        at = most.track.name if figures.late_seconds[index] > 0 else ""
        rows.append(
            (
                f"{each.rank} on {each.about['host']}",
                *(text_of_seconds(seconds) for seconds in (means[0], own, means[1], means[2])),
                f"{hidden:.0%}",
                int(figures.times_last[index]),
                text_of_seconds(float(figures.late_seconds[index])),
                at,
            )
        )
    head = (
        *("rank", "mean step", "own work", "waits for late ranks", "waits for communication"),
        *("communication hidden", "times last", "others waited", "most at"),
    )
    return table(head, rows)


def _tensors(figures: Figures) -> str:
    rows = [
        (
            each.track.name,
            each.track.kind,
            each.track.dtype + ("" if each.track.on_host else " on GPU"),
            each.track.tensors,
            text_of_bytes(each.track.bytes) if each.track.bytes is not None else "",
            each.count,
            text_of_seconds(each.wait),
            text_of_seconds(each.communication),
            text_of_bytes(each.bandwidth) + "/s" if each.track.bytes else "",
            _limit_of(each.wait, each.communication, each.queue, each.slowest_phase),
        )
        for each in figures.tensors[:MOST_TENSORS]
    ]
    head = (
        *("name", "operation", "dtype", "tensors", "bytes", "times", "waits for ranks", "communicates"),
        *("bandwidth", "limited by"),
    )
    more = len(figures.tensors) - len(rows)
    return table(head, rows) + (f"<p class=soft>and {more} more, with less communication</p>" if more > 0 else "")


def _kinds(figures: Figures) -> str:
    """Sums over the tensors of a dtype, as a rank has them, and over those that hosts exchanged."""
    parts: dict[tuple[str, str], list[TensorFigures]] = {}
    for each in figures.tensors:
        parts.setdefault((each.track.dtype, "memory of the host" if each.track.on_host else "GPU"), []).append(each)
    rows: list[Sequence[Any]] = []
    for key, its in sorted(parts.items(), key=lambda item: -_bytes_of(item[1])[0]):
        seconds = sum(each.count * each.communication for each in its)
        rows.append((*key, sum(each.count for each in its), *_rate(its, seconds)))
    note = ""
    phases = figures.phase_seconds()
    if (seconds := phases.get("exchange", 0.0) + phases.get("encode", 0.0)) > 0:
        on_host = [each for each in figures.tensors if each.track.on_host]
        rows.append(("all", "exchange between hosts", "", *_rate(on_host, seconds)))
        note = (
            "<p class=soft>Bytes are those of the tensors, also in the row of the exchange. A link carries another "
            "number of bytes: it depends on the operation and on the number of hosts, and a codec makes it smaller. "
            "<code>horovodish status --watch</code> shows it while a job runs.</p>"
        )
    return table(("dtype", "where", "operations", "bytes of tensors", "communicates", "bandwidth"), rows) + note


def _bytes_of(tensors: Iterable[TensorFigures]) -> tuple[int, bool]:
    """How many bytes were communicated, and whether some are not counted because their number is not known."""
    sizes = [each.track.bytes and each.count * each.track.bytes for each in tensors]
    return sum(size for size in sizes if size is not None), None in sizes


def _rate(tensors: Iterable[TensorFigures], seconds: float) -> tuple[str, str, str]:
    """The bytes of tensors, how long they took, and the bytes per second. What is not known is empty."""
    size, is_more = _bytes_of(tensors)
    more = " or more" if is_more else ""
    if is_more and size == 0:
        return "", text_of_seconds(seconds), ""
    rate = size / seconds if seconds else 0.0
    return f"{text_of_bytes(size)}{more}", text_of_seconds(seconds), f"{text_of_bytes(rate)}/s{more}"


def elastic_events(events: Sequence[tuple[float, str]], begun: float) -> str:
    rows = [(text, text_of_seconds(max(0.0, at - begun))) for at, text in events[:MOST_EVENTS]]
    return f"<h2>Elastic events</h2>{table(('what', 'after'), rows)}" if rows else ""


def _limit_of(wait: float, communication: float, queue: float, phase: str) -> str:
    if wait > communication:
        return "late ranks"
    return "agreement" if queue > communication / 2 else phase or "agreement"


def about_section(about: dict[str, Any], names: Names) -> str:
    settings = {} if names.hidden else about.get("settings", {})
    rows = [*about.get("versions", {}).items(), *settings.items()]
    note = "<p class=soft>Settings that have their default are left out.</p>" if not names.hidden else ""
    return f"<h2>Versions and settings</h2>{table(('name', 'value'), rows)}{note}"
