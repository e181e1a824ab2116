"""A launcher that only lets supervisors in."""

from __future__ import annotations

import selectors
import threading
from pathlib import Path

from horovodish.launcher.job.launcher_end import LauncherEnd
from horovodish.launcher.job.listener import SupervisorListener


class Door:
    """A listener that is served by a thread.

    Attributes:
        admitted: the links of those that were let in.
        events: how often something was there to be done.
        address: what a supervisor is told.
    """

    def __init__(self, folder: Path) -> None:
        self.admitted: list[LauncherEnd] = []
        self.events = 0
        self._selector = selectors.DefaultSelector()
        self._listener = SupervisorListener(self._selector, folder / "socket", self.admitted.append, ["127.0.0.1"])
        self.address = self._listener.contact
        self._is_open = True
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._is_open = False
        self._thread.join()
        self._listener.close()
        for link in self.admitted:
            link.close()

    def _serve(self) -> None:
        while self._is_open:
            for key, _ in self._selector.select(0.02):
                self.events += 1
                key.data()
            self._listener.maintain()
