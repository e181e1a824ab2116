"""Makes the mistakes of a script: the one that the command line names, or all, one after the other."""

import sys
import traceback
from collections.abc import Callable


def make(mistakes: dict[str, object]) -> None:
    """Called by every rank, at the end of a script.

    Args:
        mistakes: the names of the script. Its functions with a docstring are mistakes.
    """
    named = [each for each in mistakes.values() if isinstance(each, Callable) and each.__module__ == "__main__"]
    for mistake in [each for each in named if each.__doc__ and sys.argv[1:] in ([], [each.__name__])]:
        if sys.argv[1:]:
            mistake()
            continue
        # In one piece: print() writes the end of the line by itself, and a thread may warn in between.
        sys.stderr.write(f"=== {mistake.__name__}\n")
        try:
            mistake()
        except Exception as error:
            print("".join(traceback.format_exception_only(error)), file=sys.stderr, flush=True)
