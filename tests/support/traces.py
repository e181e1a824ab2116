"""Traces of the timeline, read strictly."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]


@dataclass
class Slice:
    """A bar of a track; times in nanoseconds."""

    name: str
    begin: int
    end: int = -1
    arguments: dict[str, Any] = field(default_factory=dict)
    within: list[Slice] = field(default_factory=list)

    def phases(self) -> list[str]:
        return [phase.name for phase in self.within]


def events_of(path: Path) -> list[Event]:
    """The events of a trace, which may lack its closing bracket and nothing else."""
    text = path.read_text()
    events: list[Event] = json.loads(text if text.endswith("]\n") else text + "]")
    return events


def is_complete(path: Path) -> bool:
    return path.read_text().endswith("]\n")


def tracks_of(path: Path, rank: int) -> dict[str, list[Slice]]:
    """The operations of each track of a rank's trace, by name. Checks that all lasts and nests."""
    tracks = _all_tracks_of(path, rank)
    for other in ("steps", "waits"):
        tracks.pop(other, None)
    return tracks


def steps_of(path: Path, rank: int) -> list[Slice]:
    """The steps of wrapped optimizers in a rank's trace."""
    return _all_tracks_of(path, rank)["steps"]


def waits_of(path: Path, rank: int) -> list[Slice]:
    """When the script of a rank waited for the end of operations."""
    return _all_tracks_of(path, rank)["waits"]


def _all_tracks_of(path: Path, rank: int) -> dict[str, list[Slice]]:
    names: dict[int, str] = {}
    tracks: dict[str, list[Slice]] = defaultdict(list)
    for event in events_of(path):
        assert event["pid"] == rank
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                names[event["tid"]] = event["args"]["name"]
        elif event["ph"] != "i" and names[event["tid"]] == "waits":
            at = round(event["ts"] * 1000)
            tracks["waits"].append(Slice(event["name"], at, at + round(event["dur"] * 1000)))
        elif event["ph"] != "i":
            add(tracks[names[event["tid"]]], event)
    for slices in tracks.values():
        check(slices, 0, None)
    return tracks


def add(slices: list[Slice], event: Event) -> None:
    at = round(event["ts"] * 1000)
    if event["ph"] == "B":
        slices.append(Slice(event["name"], at, arguments=event.get("args", {})))
    elif event["ph"] == "E":
        slices[-1].end = at
        slices[-1].arguments |= event.get("args", {})
    else:
        assert event["ph"] == "X"
        assert slices[-1].end == -1, "a phase outside its operation"
        slices[-1].within.append(Slice(event["name"], at, at + round(event["dur"] * 1000)))


def check(slices: list[Slice], begin: int, end: int | None) -> None:
    """They last, follow each other and lie between `begin` and `end`. Only the last one of a trace may be open."""
    for one in slices:
        assert one.begin >= begin, one
        if one.end == -1:
            assert end is None and one is slices[-1], one
            check(one.within, one.begin, None)
        else:
            assert one.end > one.begin, one
            check(one.within, one.begin, one.end)
            begin = one.end
    assert end is None or begin <= end, slices


def marks_of(path: Path) -> list[Event]:
    return [event for event in events_of(path) if event["ph"] == "i"]
