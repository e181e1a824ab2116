"""The signals to the launcher that concern a job."""

import contextlib
import signal
from collections.abc import Callable, Iterator

PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def signals_taken(by: Callable[[int], None]) -> Iterator[None]:
    """A context with a handler for the signals that concern a job, called in the main thread."""
    ours = [*ENDING, *PASSED_ON, signal.SIGTSTP]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        ours.remove(signal.SIGHUP)  # under nohup
    former = {number: signal.signal(number, lambda number, _: by(number)) for number in ours}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
