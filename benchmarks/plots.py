"""Plots as SVG: they take the colours of a page, light or dark, and can be read on a phone."""

import io
import re
from pathlib import Path
from typing import Any

WIDTH, PANEL_HEIGHT = 5.2, 3.4
"""In inches; a panel below the other, because a phone is narrow."""
LIGHT = {"ink": "#1f2328", "soft": "#8c959f"}
DARK = {"ink": "#e6edf3", "soft": "#7d8590"}
STYLE = {
    "text.color": LIGHT["ink"],
    "axes.labelcolor": LIGHT["ink"],
    "axes.edgecolor": LIGHT["soft"],
    "xtick.color": LIGHT["soft"],
    "ytick.color": LIGHT["soft"],
    "xtick.labelcolor": LIGHT["ink"],
    "ytick.labelcolor": LIGHT["ink"],
    "axes.titlesize": 11,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "savefig.transparent": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "horovodish",
    # Each has a contrast of 3 to 1 or more with white and with black.
    "axes.prop_cycle": "cycler('color', ['#2f81f7', '#d9730d', '#2da44e', '#a475f9'])",
}


def panels(number: int, height: float = PANEL_HEIGHT) -> tuple[Any, Any]:
    """A figure, and its axes from top to bottom."""
    from matplotlib import pyplot

    pyplot.rcParams.update(STYLE)
    drawing, axes = pyplot.subplots(number, 1, figsize=(WIDTH, height * number), squeeze=False)
    return drawing, axes[:, 0]


def write_in_full(axis: Any) -> None:
    """Write the numbers of a logarithmic axis without exponents, which are too small for a phone."""
    from matplotlib.ticker import LogFormatter

    base = axis.get_transform().base
    unit, prefixes = (1024, ("", " Ki", " Mi", " Gi")) if base == 2 else (1000, ("", " k", " M", " G"))

    class InFull(LogFormatter):
        def __call__(self, value: float, place: int | None = None) -> str:
            if not super().__call__(value, place):  # the axis has no room for this number
                return ""
            power = next(power for power in (3, 2, 1, 0) if power == 0 or value >= unit**power)
            return f"{value / unit**power:g}{prefixes[power]}"

    for formatter, replace in (
        (axis.get_major_formatter(), axis.set_major_formatter),
        (axis.get_minor_formatter(), axis.set_minor_formatter),
    ):
        if isinstance(formatter, LogFormatter):
            replace(InFull(base, labelOnlyBase=formatter.labelOnlyBase))


def save(drawing: Any, path: Path) -> None:
    """Write the figure to an SVG file. Its text and lines follow the theme of the page or of the system."""
    for axis in (each for axes in drawing.axes for each in (axes.xaxis, axes.yaxis)):
        if axis.get_scale() == "log":
            write_in_full(axis)
    drawing.tight_layout()
    file = io.StringIO()
    drawing.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    svg = file.getvalue()[file.getvalue().index("<svg") :]
    light, dark = (";".join(f"--{name}:{color}" for name, color in theme.items()) for theme in (LIGHT, DARK))
    style = f".picture {{ {light} }}\n@media (prefers-color-scheme: dark) {{ .picture {{ {dark} }} }}"
    for name, color in LIGHT.items():
        svg = svg.replace(color, f"var(--{name})")
    svg = re.sub(r"<svg ", '<svg class="picture plot" ', svg, count=1)
    svg = re.sub(r"<defs>", lambda _: f"<style>\n{style}\n</style>\n<defs>", svg, count=1)
    svg = svg.replace('<style type="text/css">*{', "<style>.plot *{")  # a page takes the figure as a part of itself
    svg = re.sub(r"<metadata>.*?</metadata>\n", "", svg, flags=re.DOTALL)
    # The font of the page, in place of one that matplotlib has measured with.
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", svg)
    path.write_text(re.sub(r"[ \t]+\n", "\n", svg))
