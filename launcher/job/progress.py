"""Says what the launcher waits for when it has been silent for some time."""

import time

from horovodish.launcher.job.output import draw, erase, is_drawable, say_unless_stuck

SILENT_SECONDS = 3.0


class Progress:
    """One line: on a terminal it changes and goes away, elsewhere it may be said once."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._shown = ""

    def show(self, text: str, *, draws: bool = True, says: bool = True) -> None:
        """Call it at every turn.

        Args:
            text: what the launcher waits for; empty if it waits for nothing.
            draws: whether to use the terminal. Ranks that train would write there meanwhile.
            says: whether to print the text where it does not use the terminal.
        """
        now = time.monotonic()
        if not text:
            erase()
            self._since, self._shown = None, ""
            return
        self._since = now if self._since is None else self._since
        if now - self._since < SILENT_SECONDS or text == self._shown:
            return
        if draws and is_drawable():
            draw(text)
        elif says and not self._shown:
            say_unless_stuck(text)
        self._shown = text
