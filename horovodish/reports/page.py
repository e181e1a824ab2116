"""`horovodish report`: one page about a run, or about two beside each other, that needs no network."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import sys
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from horovodish.reports.diagnosis import sentences
from horovodish.reports.document import Data, document, drawn, findings, table
from horovodish.reports.durations import text_of_bytes, text_of_seconds
from horovodish.reports.figures import Figures, figures_of, workload_of
from horovodish.reports.merge_traces import SUFFIX, events_beside
from horovodish.reports.outlook import outlook
from horovodish.reports.picture import step_picture
from horovodish.reports.records import NothingRecordedError, RecordsError, read, trace_events

__all__ = ["report"]

MOST_POINTS = 800
MOST_TENSORS, MOST_RANKS, MOST_EVENTS = 60, 256, 200
MOST_TRACED_EVENTS = 4000
KEYS = (("own", "own work"), ("late", "waits for late ranks"), ("exposed", "waits for communication"))
OPERATIONS = (("late", "not submitted by all"), ("hidden-part", "communicates"))
_REPORT = re.compile(r'<script type="application/json" id="report">(.*?)</script>', re.DOTALL)


def report(files: Sequence[str], output: str, *, without_names: bool = False) -> int:
    """Write a page, and return the exit status.

    Args:
        files: the records of the ranks of one run, or two pages to compare.
        output: where the page goes.
        without_names: leave out names of hosts, the command, settings, marks and errors.
    """
    try:
        if files and all(name.endswith((".html", ".htm")) for name in files):
            text = _comparison(files)
        else:
            worlds, stem = _worlds(files)
            text = _page(worlds, _events(events_beside(stem)), _Names(hidden=without_names))
        Path(output).write_text(text, encoding="utf-8")
    except RecordsError as problem:
        return _failed(str(problem))
    except OSError as problem:
        return _failed(f"{problem.filename or output}: {problem.strerror}")
    return 0


def _failed(what: str) -> int:
    print(f"horovodish: {what}", file=sys.stderr)
    return 1


def _events(path: Path) -> list[tuple[float, str]]:
    """What an elastic job has told of itself, and when."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            record = json.loads(line)
            found.append((float(record["time"]), str(record["text"])))
    return found


def _worlds(files: Sequence[str]) -> tuple[list[Figures], str]:
    """Each start of the engines of one run is a world, with files of its own: x.rank-0, then x.2.rank-0.

    Returns:
        The worlds, and x as the name of a page.
    """
    groups: dict[str, list[Path]] = {}
    for name in dict.fromkeys(files):
        if not name.endswith(SUFFIX):
            raise RecordsError(
                f'{name} is no file of records: their names end in "{SUFFIX}"; see `horovodish report -h`'
            )
        path = Path(name)
        stem = re.sub(r"\.rank-\d+$", "", path.stem)
        groups.setdefault(str(path.with_name(stem)), []).append(path)
    first = min(groups, key=len, default="")  # a name such as lr-0.5 has a number of its own
    runs = {re.sub(r"\.\d+$", "", stem) for stem in groups}
    if len(runs) > 1 and not all(re.fullmatch(re.escape(first) + r"(\.\d+)?", stem) for stem in groups):
        one, other, *_ = sorted(runs)
        raise RecordsError(
            f"{one} and {other} are two runs: make a page of each, then `horovodish report A.html B.html`"
        )
    worlds, empty = [], RecordsError("there are no files")
    for paths in groups.values():
        records = []
        for path in paths:
            try:
                records.append(read(path))
            except NothingRecordedError as problem:
                empty = problem
        try:
            worlds += [figures_of(records)] if records else []
        except NothingRecordedError as problem:  # for example while an elastic job waited for hosts
            empty = problem
    if not worlds:
        raise empty
    return sorted(worlds, key=lambda world: int(world.records[0].about["begun"])), f"{first}.html"


class _Names:
    """Names of hosts, or what stands for them. Where names are hidden, the page has no marks and no errors either."""

    def __init__(self, hidden: bool) -> None:
        self.hidden = hidden
        self._hosts: dict[str, str] = {}

    def host(self, name: str) -> str:
        if not self.hidden:
            return name
        return self._hosts.setdefault(name, f"host-{len(self._hosts) + 1}")


def _page(worlds: Sequence[Figures], events: Sequence[tuple[float, str]], names: _Names) -> str:
    for world in worlds:
        for each in world.records:
            each.about["host"] = names.host(str(each.about.get("host", "")))
    main = max(worlds, key=lambda world: float(world.durations.sum()))
    found = sentences(main)
    about = main.records[0].about
    command = "" if names.hidden else " ".join(map(str, about.get("command", [])))
    starts = (
        f" The engines started {len(worlds)} times; the sentences are about the longest." if len(worlds) > 1 else ""
    )
    data = Data(figures=_summary(main), sentences=found, title=command or "a run")
    if (workload := workload_of(main)) is not None:
        data.known["workload"] = workload
    sections = [
        _world(world, names, data, f" of start {index + 1}" if len(worlds) > 1 else "")
        for index, world in enumerate(worlds)
    ]
    body = (
        f"<h1>Report of a run</h1><p class=soft>{escape(command)}<br>{_size_of(main)}.{starts}</p>"
        + findings(found)
        + "".join(sections)
        + ("" if names.hidden else _elastic_events(events, int(worlds[0].records[0].about["begun"]) / 1e9))
        + _about(about, names)
        + f"<h2>What more ranks would give</h2>{findings(outlook(main))}"
    )
    return document("Report of a run", body, data)


def _size_of(figures: Figures) -> str:
    ranks = sum(map(len, figures.hosts)) or len(figures.records)
    hosts = len(figures.hosts) or 1
    begin = min((each.begin for each in figures.records if each.begin), default=0)
    seconds = (max(each.end for each in figures.records) - begin) / 1e9
    return (
        f"{ranks} rank{'s' * (ranks > 1)} on {hosts} host{'s' * (hosts > 1)}, "
        f"{figures.steps.size} whole steps in {text_of_seconds(seconds)}"
    )


def _summary(figures: Figures) -> dict[str, Any]:
    """The figures that two reports compare: a number and its unit."""
    own = figures.durations - figures.late - figures.exposed
    return {
        "ranks": [len(figures.records), ""],
        "steps": [int(figures.steps.size), ""],
        "median step": [figures.step_seconds, "s"],
        "own work per step": [figures.median(own), "s"],
        "waits for late ranks per step": [figures.median(figures.late), "s"],
        "waits for communication per step": [figures.median(figures.exposed), "s"],
        "hidden communication per step": [figures.median(figures.hidden), "s"],
        "operations per step": [figures.median(figures.operations), ""],
        "bytes per step": [figures.median(figures.bytes), "B"],
    }


def _world(figures: Figures, names: _Names, data: Data, of: str) -> str:
    parts = [_notes(figures)]
    if figures.steps.size:
        steps = figures.steps.tolist()
        slowest = figures.durations.max(axis=0) * 1e3
        shares = {"late": figures.late, "exposed": figures.exposed, "hidden": figures.hidden}
        means = {key: part.mean(axis=0) * 1e3 for key, part in shares.items()}
        parts += [
            f"<h2>Step time{of}</h2>",
            _chart(data, steps, "ms", [("time", "own", slowest, "mean"), ("longest", "late", slowest, "max")]),
            f"<h2>What steps pay for{of}</h2>",
            _chart(data, steps, "ms", [
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
        ranks = ", ".join(map(str, figures.missing))
        notes.append(
            f"There are no records of rank {ranks}: waits for them count as communication. Records lie on the host of "
            "their rank; copy them here, and call `horovodish report`."
        )
    for each in figures.records:
        if each.dropped:
            notes.append(f"Rank {each.rank} had no time to write {each.dropped:,} records, so figures are too small.")
        if each.is_cut:
            notes.append(f"The records of rank {each.rank} end early: it was killed, or could not write.")
    return "".join(f"<p><strong>Note.</strong> {escape(note)}</p>" for note in notes)


def _chart(data: Data, steps: list[int], unit: str, series: Iterable[tuple[str, str, Any, str]]) -> str:
    """A chart that the page draws, and the same as a table."""
    edges = np.unique(np.linspace(0, len(steps), min(len(steps), MOST_POINTS) + 1).astype(int))[:-1]
    sizes = np.diff(np.append(edges, len(steps)))
    columns: list[list[Any]] = [[steps[edge] for edge in edges]]
    labels = []
    for label, color, values, how in series:
        if how == "max" and len(edges) == len(steps):
            continue  # a point for each step has no longest one
        reduced = np.maximum.reduceat(values, edges) if how == "max" else np.add.reduceat(values, edges) / sizes
        columns.append([round(float(value), 4) for value in reduced])
        labels.append({"label": label, "color": color})
    # The first steps compile and connect. They would make all others flat.
    top = max((value for column in columns[1:] for value in column[2 if len(edges) > 5 else 0 :]), default=0.0)
    place = drawn(data, {"unit": unit, "series": labels, "data": columns, "top": top})
    stride = max(1, len(columns[0]) // 50)
    rows = list(zip(*(column[::stride] for column in columns), strict=True))
    head = ("step", *(f"{each['label']}, {unit}" for each in labels))
    return f"<figure>{place}</figure><details><summary>as a table</summary>{table(head, rows)}</details>"


def _pictures(figures: Figures, names: _Names, data: Data, of: str) -> Iterable[str]:
    longest = figures.durations.max(axis=0)
    offset = figures.steady.start
    kept = longest[offset:]
    typical = offset + int(np.abs(kept - np.median(kept)).argmin())
    slowest = offset + int(kept.argmax())
    keys = "".join(f'<span class="key {kind}"></span>{text}' for kind, text in (*KEYS, *OPERATIONS))
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
    """Sums over the tensors of a dtype, as a rank has them, and over what travelled between hosts."""
    sums: dict[tuple[str, str], tuple[int, float, float]] = {}
    for each in figures.tensors:
        key = (each.track.dtype, "memory of the host" if each.track.on_host else "GPU")
        count, size, seconds = sums.get(key, (0, 0.0, 0.0))
        size += each.count * (each.track.bytes or 0)
        sums[key] = count + each.count, size, seconds + each.count * each.communication
    rows: list[Sequence[Any]] = [
        (
            *key,
            count,
            text_of_bytes(size),
            text_of_seconds(seconds),
            text_of_bytes(size / seconds if seconds else 0.0) + "/s",
        )
        for key, (count, size, seconds) in sorted(sums.items(), key=lambda item: -item[1][1])
    ]
    phases = figures.phase_seconds()
    if (seconds := phases.get("exchange", 0.0) + phases.get("encode", 0.0)) > 0:
        size = sum(size for _, size, _ in sums.values())
        rows.append(
            (
                "all",
                "link between hosts",
                "",
                text_of_bytes(size),
                text_of_seconds(seconds),
                text_of_bytes(size / seconds) + "/s",
            )
        )
    return table(("dtype", "where", "operations", "bytes", "communicates", "bandwidth"), rows)


def _elastic_events(events: Sequence[tuple[float, str]], begun: float) -> str:
    rows = [(text, text_of_seconds(max(0.0, at - begun))) for at, text in events[:MOST_EVENTS]]
    return f"<h2>Elastic events</h2>{table(('what', 'after'), rows)}" if rows else ""


def _limit_of(wait: float, communication: float, queue: float, phase: str) -> str:
    if wait > communication:
        return "late ranks"
    return "agreement" if queue > communication / 2 else phase or "agreement"


def _about(about: dict[str, Any], names: _Names) -> str:
    settings = {} if names.hidden else about.get("settings", {})
    rows = [*about.get("versions", {}).items(), *settings.items()]
    note = "<p class=soft>Settings that have their default are left out.</p>" if not names.hidden else ""
    return f"<h2>Versions and settings</h2>{table(('name', 'value'), rows)}{note}"


def _comparison(files: Sequence[str]) -> str:
    if len(files) != 2:
        raise RecordsError("two pages are compared: horovodish report before.html after.html")
    found = []
    for name in files:
        match = _REPORT.search(Path(name).read_text(encoding="utf-8", errors="replace"))
        try:
            found.append(json.loads(match[1]) if match else {})
        except ValueError:
            found.append({})
        if "figures" not in found[-1]:
            raise RecordsError(f"{name} is no page of `horovodish report`")
    before, after = found
    rows = []
    for key, (value, unit) in before["figures"].items():
        other = after["figures"].get(key, [0, unit])[0]
        rows.append((key, _number(value, unit), _number(other, unit), f"{other / value:.2f}" if value else ""))
    titles = [f"{Path(name).name}: {each['title']}" for name, each in zip(files, found, strict=True)]
    lists = _pair(
        f"<h2>{escape(title)}</h2>{findings(each['sentences'])}" for title, each in zip(titles, found, strict=True)
    )
    data = Data()
    charts = ""
    for place, heading in ((0, "Step time"), (1, "What steps pay for")):
        pair = [each["charts"][place] for each in found if place < len(each["charts"])]
        top = max((chart["top"] for chart in pair), default=0.0)
        charts += f"<h2>{heading}</h2>" + _pair(drawn(data, {**chart, "top": top}) for chart in pair)
    head = ("", Path(files[0]).name, Path(files[1]).name, "ratio")
    body = f"<h1>Two runs beside each other</h1>{table(head, rows)}{lists}{charts}"
    return document("Two runs beside each other", body, data)


def _pair(parts: Iterable[str]) -> str:
    return f'<div class="pair">{"".join(f"<div>{part}</div>" for part in parts)}</div>'


def _number(value: float, unit: str) -> str:
    if unit == "s":
        return text_of_seconds(value)
    return text_of_bytes(value) if unit == "B" else f"{value:.4g}"
