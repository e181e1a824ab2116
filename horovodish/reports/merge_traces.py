"""Merges the traces of several ranks into one: `horovodish merge-traces`."""

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

__all__ = ["SUFFIX", "events_beside", "merge", "merged"]

SUFFIX = ".records"
"""Suffix of the files where `start_timeline` writes records for `horovodish report`."""

_BEGINNING = '[\n{"ph":"M","pid":'


def events_beside(page: str) -> Path:
    """The file with the events of an elastic job, beside a page or the records that the page is made from."""
    return Path(page).with_suffix(".events.jsonl")


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
            if line.endswith("}\n"):  # a truncated line may end in a bracket, too
                yield comma + line.lstrip(",")
                comma = ","
    yield "]\n"


def merge(paths: Sequence[str]) -> int:
    """Writes one trace of several files to stdout, and returns the exit status."""
    if twice := [path for path in paths if paths.count(path) > 1]:
        return _failed(f"{twice[0]} is named twice")
    files: list[Iterator[str]] = []
    heads = []
    with contextlib.ExitStack() as opened:
        for path in paths:
            try:
                if path.endswith(SUFFIX):
                    files.append(_exported(path))
                else:
                    files.append(opened.enter_context(open(path, encoding="utf-8", errors="replace")))
                heads.append(list(itertools.islice(files[-1], 2)))
            except ValueError as problem:
                return _failed(str(problem))
            except OSError as problem:
                return _failed(f"{path} cannot be read: {problem.strerror}")
            # A process that was killed may have written nothing, and a host that crashed leaves NULs.
            if not _BEGINNING.startswith("".join(heads[-1]).rstrip("\0")[: len(_BEGINNING)]):
                return _failed(f"{path} is not a trace that the timeline wrote; leave it out")
        if not any(heads):
            return _failed(f"nothing was written to {', '.join(paths)}: a killed rank may write nothing")
        try:
            sys.stdout.writelines(merged(map(itertools.chain, heads, files)))
            sys.stdout.flush()
        except OSError as problem:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes what is left at its end
            return _failed(f"the trace cannot be written: {problem.strerror}")
    return 0


def _exported(path: str) -> Iterator[str]:
    """The trace of a file of records.

    Raises:
        ValueError: it has none.
        OSError: it cannot be read.
    """
    from horovodish.reports.records import read, trace_events  # the launcher starts without NumPy

    records = read(Path(path))
    yield "[\n"
    for event in trace_events(records, records.begin, records.end + 1):
        yield f"{json.dumps(event, separators=(',', ':'))}\n"
    yield "]\n"


def _failed(what: str) -> int:
    print(f"horovodish: {what}", file=sys.stderr)
    return 1
