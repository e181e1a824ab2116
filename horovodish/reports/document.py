"""What all pages consist of: one file with its style, its data and its scripts, tables, and charts that it draws."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from typing import Any

__all__ = ["Data", "document", "drawn", "findings", "table"]


class Data:
    """What the page's scripts need, and what another report reads."""

    def __init__(self, **known: Any) -> None:
        self.charts: list[dict[str, Any]] = []
        self.traces: list[list[dict[str, Any]]] = []
        self.known = known

    def text(self) -> str:
        """As JSON that cannot end the element in which it stands."""
        whole = json.dumps({"charts": self.charts, "traces": self.traces, **self.known}, separators=(",", ":"))
        return whole.replace("<", "\\u003c")


def document(title: str, body: str, data: Data, more: str = "") -> str:
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
        f'<script type="application/json" id="report">{data.text()}</script>'
        f"<script>{part('uPlot.iife.min.js')}</script><script>{part('page.js')}</script>{own}</body></html>\n"
    )


def drawn(data: Data, chart: dict[str, Any]) -> str:
    """The place of a chart, which the page draws."""
    data.charts.append(chart)
    label = "chart; arrow keys move along it"
    return f'<div class="chart" tabindex="0" role="img" data-chart="{len(data.charts) - 1}" aria-label="{label}"></div>'


def findings(texts: Iterable[str]) -> str:
    """Sentences to act on."""
    return f'<ol class="findings">{"".join(f"<li>{escape(text)}</li>" for text in texts)}</ol>'


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """A table of texts and numbers."""
    cells = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f"<div class=scroll><table><tr>{''.join(f'<th>{escape(each)}</th>' for each in head)}</tr>{cells}</table></div>"
    )
