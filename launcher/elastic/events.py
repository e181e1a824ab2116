"""Events of an elastic job. Each is a line for the user and a record for programs."""

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horovodish.errors import SettingError
from horovodish.launch.output_files import opener
from horovodish.launcher.hosts.allocation import counted
from horovodish.launcher.job.output import say_unless_stuck
from horovodish.reports.merge_traces import events_beside

FILE = "events.jsonl"


@dataclass(frozen=True)
class Event:
    """Something that has happened.

    Attributes:
        kind: a word or two for programs.
        text: for the user.
        details: what programs want to know, by name.
    """

    kind: str
    text: str
    details: Mapping[str, Any] = field(default_factory=dict)


class Events:
    """Tells the user, and writes a line of JSON for each event.

    Args:
        folder: of `--output-filename`, where the record is kept; None if it is not.
        page: of `--report`, which has its events beside it.

    Raises:
        SettingError: nothing can be written there.
    """

    def __init__(self, folder: str | None, page: str | None = None) -> None:
        self._paths = [Path(folder, FILE)] if folder else []
        self._paths += [events_beside(page)] if page else []
        self._began = time.monotonic()
        self._losses = 0
        self._pauses: dict[str, list[float]] = {"the same": [], "new": []}  # seconds, by the processes that went on
        for path in self._paths:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                open(path, "w", opener=opener).close()
            except OSError as problem:
                raise SettingError(f"--output-filename: {path} cannot be written: {problem.strerror}") from problem

    def add(self, event: Event) -> None:
        """Something has happened now."""
        say_unless_stuck(event.text)
        record = {"time": round(time.time(), 3), "event": event.kind, **event.details, "text": event.text}
        for path in self._paths:
            with contextlib.suppress(OSError), open(path, "a", opener=opener) as file:
                file.write(json.dumps(record) + "\n")
        if event.kind == "lost":
            self._losses += 1
        elif event.kind == "going on":
            self._pauses[event.details["processes"]].append(event.details["seconds"])

    def conclude(self, status: int) -> None:
        """The job has ended: sums up what has happened, if anything has.

        Args:
            status: the exit status of the job.
        """
        pauses = [*self._pauses["the same"], *self._pauses["new"]]
        if not self._losses and not pauses:
            return
        took = time.monotonic() - self._began
        ways = [f"{counted(len(each), 'time')} in {which} processes" for which, each in self._pauses.items() if each]
        went_on = f"; continued {' and '.join(ways)}, which took {sum(pauses):.1f} s in all" if pauses else ""
        text = f"ended after {took:.0f} s: {counted(self._losses, 'rank')} lost{went_on}"
        details = {"status": status, "seconds": round(took, 3), "lost": self._losses, "paused": round(sum(pauses), 3)}
        self.add(Event("ended", text, details))
