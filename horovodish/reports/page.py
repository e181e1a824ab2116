"""`horovodish report`: one page about a run, or about two beside each other, that needs no network."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from horovodish.reports.diagnosis import sentences
from horovodish.reports.document import PageData, document, drawn, findings, table
from horovodish.reports.durations import text_of_bytes, text_of_seconds
from horovodish.reports.figures import Figures, figures_of, workload_of
from horovodish.reports.merge_traces import SUFFIX, events_beside
from horovodish.reports.outlook import outlook
from horovodish.reports.records import NothingRecordedError, RecordsError, read
from horovodish.reports.sections import Names, about_section, elastic_events, world_section

__all__ = ["report"]

_REPORT = re.compile(r'<script type="application/json" id="report">(.*?)</script>', re.DOTALL)


def report(files: Sequence[str], output: str, *, without_names: bool = False) -> int:
    """Write a page, and return the exit status.

    Args:
        files: the records of the ranks of one run, or two pages to compare.
        output: where the page goes.
        without_names: leave out names of hosts, the command, settings, marks and errors.
    """
    if os.path.realpath(output) in map(os.path.realpath, files):
        return _failed(f"{output} is an input of the report: give the page another name")
    try:
        if files and all(name.endswith((".html", ".htm")) for name in files):
            if without_names:
                return _failed("--without-names is for records: make each page with it, and then compare them")
            text = _comparison(files)
        else:
            worlds, stem = _worlds(files)
            text = _page(worlds, _events(events_beside(stem)), Names(hidden=without_names))
        Path(output).write_text(text, encoding="utf-8", errors="replace")
    except RecordsError as problem:
        return _failed(str(problem))
    except OSError as problem:
        return _failed(f"{problem.filename or output}: {problem.strerror}")
    return 0


def _failed(what: str) -> int:
    print(f"horovodish: {what}", file=sys.stderr)
    return 1


def _events(path: Path) -> list[tuple[float, str]]:
    """The events of an elastic job, with their times."""
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
                f'{name} is not a file of records: their names end in "{SUFFIX}"; see `horovodish report -h`'
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


def _page(worlds: Sequence[Figures], events: Sequence[tuple[float, str]], names: Names) -> str:
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
    data = PageData(figures=_summary(main), sentences=found, title=command or "a run")
    if (workload := workload_of(main)) is not None:
        data.known["workload"] = workload
    sections = [
        world_section(world, names, data, f" of start {index + 1}" if len(worlds) > 1 else "")
        for index, world in enumerate(worlds)
    ]
    body = (
        f"<h1>Report of a run</h1><p class=soft>{escape(command)}<br>{_size_of(main)}.{starts}</p>"
        + findings(found)
        + "".join(sections)
        + ("" if names.hidden else elastic_events(events, int(worlds[0].records[0].about["begun"]) / 1e9))
        + about_section(about, names)
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
            raise RecordsError(f"{name} is not a page of `horovodish report`")
    before, after = found
    rows = []
    for key, (value, unit) in before["figures"].items():
        other = after["figures"].get(key, [0, unit])[0]
        rows.append((key, _number(value, unit), _number(other, unit), f"{other / value:.2f}" if value else ""))
    titles = [f"{Path(name).name}: {each['title']}" for name, each in zip(files, found, strict=True)]
    lists = _pair(
        f"<h2>{escape(title)}</h2>{findings(each['sentences'])}" for title, each in zip(titles, found, strict=True)
    )
    data = PageData()
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
