"""One trace of those of several ranks: `horovodish merge-traces`."""

import contextlib
import itertools
import sys
from collections.abc import Iterable, Iterator

__all__ = ["merge", "merged"]

_BEGINNING = '[\n{"ph":"M","pid":'


def merged(traces: Iterable[Iterable[str]]) -> Iterator[str]:
    """One trace of several, line by line; also of traces that were cut off.

    Args:
        traces: the lines of each file.

    Returns:
        The lines of the whole.

    Example:
        >>> list(merged([["[\\n", '{"pid":0}\\n', "]\\n"], ["[\\n", '{"pid":1}\\n', ',{"pid":1}\\n', ',{"pi']]))
        ['[\\n', '{"pid":0}\\n', ',{"pid":1}\\n', ',{"pid":1}\\n', ']\\n']
    """
    comma = ""
    yield "[\n"
    for trace in traces:
        for line in trace:
            if line.endswith("}\n"):  # what is cut off may end in a bracket, too
                yield comma + line.lstrip(",")
                comma = ","
    yield "]\n"


def merge(paths: Iterable[str]) -> int:
    """Writes one trace of several files to stdout, and returns the exit status."""
    try:
        with contextlib.ExitStack() as opened:
            files = [opened.enter_context(open(path, encoding="utf-8", errors="replace")) for path in paths]
            heads = [list(itertools.islice(file, 2)) for file in files]
            for path, head in zip(paths, heads, strict=True):
                # A process that was killed may have written nothing, and a host that crashed leaves NULs.
                if not _BEGINNING.startswith("".join(head).rstrip("\0")[: len(_BEGINNING)]):
                    print(f"horovodish: {path} is not a trace that the timeline wrote; leave it out", file=sys.stderr)
                    return 1
            sys.stdout.writelines(merged(map(itertools.chain, heads, files)))
    except OSError as problem:
        print(f"horovodish: {problem}", file=sys.stderr)
        return 1
    return 0
