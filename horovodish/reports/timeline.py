"""The timeline: when each tensor was negotiated, queued, packed, reduced and unpacked on each rank, as a trace."""

import json
import os
import platform
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from horovodish.collectives.submission import gather_objects, generated_name
from horovodish.errors import SettingError
from horovodish.launch import run_folder
from horovodish.launch.output_files import opener
from horovodish.reports.merge_traces import SUFFIX
from horovodish.runtime import basics
from horovodish.runtime.starting import Running
from horovodish.settings import Settings
from horovodish.supported import FRAMEWORKS
from horovodish.version import __version__

__all__ = ["mark", "start_timeline", "stop_timeline"]

_CLOCK_READINGS = 9

_origin_ns = 0  # on this host's monotonic clock: when rank 0 had called init()
_path: Path | None = None  # of the timeline that is being recorded
_starts: dict[str, int] = {}  # how often ranks have begun each timeline that HOROVODISH_TIMELINE_FILENAME names


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record this rank's operations on each tensor, until `stop_timeline()` or `shutdown()`.

    Not collective and does not block: each rank that calls it records itself. With `trace.json`, rank 3 writes
    `trace.rank-3.json`, and replaces a file of that name. Open it with https://ui.perfetto.dev or chrome://tracing.
    There each rank is a process, and each tensor or bucket is a track with a slice for each operation. The slice has
    phases: "negotiate" (until every rank has submitted it), "queue" (behind other operations), and then for every chunk
    "pack", "reduce", "exchange" (between hosts) and "unpack". The track "steps" has the steps of wrapped optimizers and
    the marks of `mark()`. Operations that are already under way do not appear. Times are microseconds since `init()` on
    rank 0. Within a host they agree to a microsecond, between hosts as well as the hosts' clocks.

    A file whose name ends in ".records" has the same in a binary form, for `horovodish report`.

    The file can be read at any time, even after the process was killed. It is behind by a few hundredths of a second.

    Args:
        file_path: the name of the trace; its folder must exist. Each rank writes its own file beside it.
        mark_cycles: add a mark wherever the engine has learned that operations can start.

    Raises:
        ValueError: a timeline is being recorded already.
        OSError: the file cannot be written, or `file_path` is a folder.
        NotInitializedError: before `init()`.
        ForkedProcessError: in a forked child.

    Example:
        >>> hvd.start_timeline("trace.json")
        >>> train_one_epoch()
        >>> hvd.stop_timeline()
    """
    global _path
    running = basics.running()
    if _path is not None:
        raise ValueError(f"start_timeline({str(file_path)!r}): {_path} is being recorded; call stop_timeline() first")
    chosen = _path_of(file_path, running.topology.rank)
    name = f"rank {running.topology.rank} on {socket.gethostname()}"
    mark_cycles = bool(mark_cycles)  # the engine closes the descriptor, unless it refuses the type of an argument
    descriptor = opener(chosen, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    about = _about(running) if chosen.suffix == SUFFIX else ""
    running.engine.start_timeline(descriptor, name=name, about=about, origin=_origin_ns, mark_cycles=mark_cycles)
    _path = chosen


def stop_timeline() -> None:
    """End the timeline of `start_timeline` or HOROVODISH_TIMELINE_FILENAME. When it returns, the file is complete.

    Not collective. Slices of operations that are under way end here. You can start another timeline afterwards.

    Raises:
        ValueError: no timeline is being recorded.
        NotInitializedError: before `init()`, and after `shutdown()`, which has ended the timeline.
        ForkedProcessError: in a forked child.

    Example:
        >>> hvd.stop_timeline()
    """
    global _path
    engine = basics.engine()
    if _path is None:
        raise ValueError("stop_timeline(): no timeline is being recorded; start_timeline(path) begins one")
    _path = None
    engine.stop_timeline()


def mark(name: str) -> None:
    """Mark this moment in the timeline of this rank, such as the beginning of an epoch.

    Not collective. Does nothing while no timeline is recorded. Steps of wrapped optimizers need no mark.

    Args:
        name: the text of the mark, on the track "steps".

    Raises:
        NotInitializedError: before `init()`, and after `shutdown()`.
        ForkedProcessError: in a forked child.

    Example:
        >>> hvd.mark("epoch 3")
    """
    basics.engine().mark(str(name).encode(errors="backslashreplace").decode())


def _about(running: Running) -> str:
    """The JSON object at the beginning of records."""
    topology, usual = running.topology, Settings()
    changed = {key: value for key, value in asdict(running.settings).items() if value != getattr(usual, key)}
    modules = ("numpy", *FRAMEWORKS)
    loaded = {name: str(getattr(sys.modules[name], "__version__", "")) for name in modules if name in sys.modules}
    return json.dumps(
        {
            "rank": topology.rank,
            "hosts": topology.hosts,
            "host": socket.gethostname(),
            "begun": running.begun_ns,
            "command": sys.argv,
            "settings": changed,
            "versions": {"horovodish": __version__, "Python": platform.python_version(), **loaded},
        }
    )


def _path_of(path: str | os.PathLike[str], rank: int) -> Path:
    given = Path(path)
    if given.is_dir() or not os.path.basename(path):
        raise IsADirectoryError(
            f"start_timeline({os.fspath(path)!r}) on rank {rank}: that is a folder; name a file in it, such as "
            f"{os.path.join(path, 'trace.json')!r}"
        )
    return given.with_name(f"{given.stem}.rank-{rank}{given.suffix}")


def _start(_: Any) -> None:
    global _origin_ns
    running = basics.running()
    # Each rank finds the same moment on its own monotonic clock.
    _origin_ns = running.begun_ns - _time_of_day_minus_monotonic_ns()
    filename = running.settings.timeline_filename
    if not running.some_timeline:
        return
    # A rank of this world may have been outside an earlier one. Ranks may have files of other names, or none.
    before = _starts.get(filename, run_folder.worlds_before())
    start = max(gather_objects(before + 1, generated_name("timeline"), 0).values())
    if filename:
        try:
            start_timeline(_numbered(filename, start), running.settings.timeline_mark_cycles)
        except OSError as problem:
            raise SettingError(
                f"HOROVODISH_TIMELINE_FILENAME={filename!r} on rank {running.topology.rank}: {problem}"
            ) from problem
    _starts[filename] = start


def _numbered(filename: str, start: int) -> str:
    """Ranks may be numbered anew, so that a survivor would replace the trace of a rank that died."""
    root, suffix = os.path.splitext(filename)
    return filename if start == 1 else f"{root}.{start}{suffix}"


def _time_of_day_minus_monotonic_ns() -> int:
    """From the reading that was disturbed least."""
    readings = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(_CLOCK_READINGS)]
    before, wall, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return wall - (before + after) // 2


def _stop() -> None:
    global _path
    _path = None


basics.follow(started=_start, stopped=_stop)
