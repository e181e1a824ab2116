"""The common parts of all pages: one file that needs no network, with style, data, scripts, tables and charts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from typing import Any

import numpy as np

__all__ = ["PageData", "document", "drawn", "findings", "step_chart", "table"]

MOST_POINTS = 800


class PageData:
    """The data that the page's script uses and another report reads."""

    def __init__(self, **known: Any) -> None:
        self.charts: list[dict[str, Any]] = []
        self.traces: list[list[dict[str, Any]]] = []
        self.known = known

    def element(self) -> str:
        """The data that the script reads at once."""
        return _json("report", {"charts": self.charts, **self.known})

    def trace_elements(self) -> str:
        """The traces, which the script hands on as they are."""
        return "".join(_json(f"trace-{number}", trace) for number, trace in enumerate(self.traces))


def _json(name: str, content: Any) -> str:
    text = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")  # so that no name ends the element
    return f'<script type="application/json" id="{name}">{text}</script>'


def document(title: str, body: str, data: PageData, more: str = "") -> str:
    """The text of the page.

    Args:
        title: of the window.
        body: HTML.
        data: what the scripts need.
        more: the name of a style and a script of its own, such as "prediction".
    """
    folder = resources.files("horovodish.reports") / "page_parts"

    def part(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    style = part("uPlot.min.css") + part("page.css") + (part(f"{more}.css") if more else "")
    own = f"<script>{part(f'{more}.js')}</script>" if more else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{style}</style></head><body>{body}'
        f"{data.element()}<script>{part('uPlot.iife.min.js')}</script><script>{part('page.js')}</script>{own}"
        f"{data.trace_elements()}</body></html>\n"
    )


def findings(texts: Iterable[str]) -> str:
    """Sentences to act on."""
    return f'<ol class="findings">{"".join(f"<li>{escape(text)}</li>" for text in texts)}</ol>'


def step_chart(data: PageData, steps: list[int], unit: str, series: Iterable[tuple[str, str, Any, str]]) -> str:
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
    figure = drawn(data, {"unit": unit, "series": labels, "data": columns, "top": top})
    stride = max(1, len(columns[0]) // 50)
    rows = list(zip(*(column[::stride] for column in columns), strict=True))
    head = ("step", *(f"{each['label']}, {unit}" for each in labels))
    return f"<figure>{figure}</figure><details><summary>as a table</summary>{table(head, rows)}</details>"


def drawn(data: PageData, chart: dict[str, Any]) -> str:
    """The place of a chart, which the page draws."""
    data.charts.append(chart)
    label = "chart; arrow keys move along it"
    return f'<div class="chart" tabindex="0" role="img" data-chart="{len(data.charts) - 1}" aria-label="{label}"></div>'


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """A table of texts and numbers."""
    heads = "".join(f"<th>{escape(each)}</th>" for each in head)
    cells = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class=scroll><table><thead><tr>{heads}</tr></thead>{cells}</table></div>"
