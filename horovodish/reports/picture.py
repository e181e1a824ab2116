"""One step as a picture: what each rank did, and which operations were under way."""

from __future__ import annotations

from html import escape

import numpy as np

from horovodish.reports.durations import text_of_bytes, text_of_seconds
from horovodish.reports.figures import Figures

__all__ = ["step_picture"]

WIDTH, LEFT, LANE, GAP = 640, 62, 14, 3
MOST_RANKS, MOST_OPERATIONS, MOST_LANES = 16, 150, 8


def step_picture(figures: Figures, step: int) -> str:
    """The step of this index as SVG.

    The upper lane of a rank is its script: its own work, and its waits for late ranks and for communication. The lanes
    below are operations: first until the last rank has submitted them, then until they are settled.
    """
    begin = int(figures.begins[:, step].min())
    end = int((figures.begins[:, step] + figures.durations[:, step] * 1e9).max())
    scale = (WIDTH - LEFT) / max(1, end - begin)
    parts: list[str] = []
    y = 4

    def bar(kind: str, left: int, right: int, at: int, height: int, title: str) -> None:
        left, right = max(left, begin), min(right, end)
        if right > left:
            x, width = LEFT + (left - begin) * scale, max(0.5, (right - left) * scale)
            box = f'<rect class="{kind}" x="{x:.1f}" y="{at}" width="{width:.1f}" height="{height}">'
            parts.append(f"{box}<title>{escape(title)}</title></rect>")

    for index, each in enumerate(figures.records[:MOST_RANKS]):
        parts.append(f'<text x="0" y="{y + LANE - 3}">rank {each.rank}</text>')
        start = int(figures.begins[index, step])
        stop = start + int(figures.durations[index, step] * 1e9)
        bar("own", start, stop, y, LANE, f"rank {each.rank}: own work")
        last = figures.last_submissions[index]
        chosen = np.flatnonzero((each.settled > start) & (each.submitted < stop))[:MOST_OPERATIONS]
        waits = figures.waits[index]
        inside = np.flatnonzero((waits.ends > start) & (waits.begins < stop))
        for begins, ends in zip(waits.begins[inside], waits.ends[inside], strict=True):
            bar("exposed", int(begins), int(ends), y, LANE, f"waits {text_of_seconds((ends - begins) / 1e9)}")
            for one in chosen:
                left, right = max(int(each.submitted[one]), int(begins)), min(int(last[one]), int(ends))
                bar("late", left, right, y, LANE, f"waits for late ranks: {text_of_seconds((right - left) / 1e9)}")
        y += LANE + GAP
        free: list[int] = []  # when each lane is
        for one in chosen:
            submitted, settled = int(each.submitted[one]), int(each.settled[one])
            lane = next((number for number, time in enumerate(free) if time <= submitted), len(free))
            if lane >= MOST_LANES:
                continue
            free[lane : lane + 1] = [settled]
            track = each.tracks[int(each.track[one])]
            title = f"{track.kind} {track.name}, {text_of_bytes(track.bytes or 0)}: "
            waited, moved = int(last[one]) - submitted, settled - int(last[one])
            title += f"waits {text_of_seconds(waited / 1e9)}, communicates {text_of_seconds(moved / 1e9)}"
            at = y + lane * (LANE // 2 + 1)
            bar("late", submitted, int(last[one]), at, LANE // 2, title)
            bar("hidden-part", int(last[one]), settled, at, LANE // 2, title)
        y += len(free) * (LANE // 2 + 1) + 2 * GAP
    marks = []
    for part in range(5):
        x, seconds = LEFT + part * (WIDTH - LEFT - 1) / 4, (end - begin) / 1e9 * part / 4
        anchor = "end" if part == 4 else "middle" if part else "start"
        marks.append(f'<line class="axis" x1="{x:.0f}" x2="{x:.0f}" y1="0" y2="{y}"/>')
        marks.append(f'<text x="{x:.0f}" y="{y + 14}" text-anchor="{anchor}">{text_of_seconds(seconds)}</text>')
    name = f"step {figures.steps[step]}"
    return f'<svg viewBox="0 0 {WIDTH} {y + 20}" role="img" aria-label="{name}">{"".join(marks + parts)}</svg>'
