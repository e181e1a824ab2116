"""`horovodish run --report page.html`: ranks record to page.rank-N.records, and the launcher makes the page from it."""

import glob
import os
import re
from collections.abc import Mapping
from pathlib import Path

from horovodish.errors import SettingError
from horovodish.launcher.job.output import say
from horovodish.launcher.options import LaunchOptions
from horovodish.reports.merge_traces import SUFFIX, events_beside

TIMELINE = "timeline_filename"
TIMELINE_VARIABLES = ("HOROVODISH_TIMELINE_FILENAME", "HOROVOD_TIMELINE")


def settings(options: LaunchOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """The settings with which ranks record. Removes what an earlier run has recorded for the same page.

    Raises:
        SettingError: the page cannot be written there, or a timeline is asked for as well.
    """
    path = os.path.abspath(options.report or "")
    other = next((name for name in TIMELINE_VARIABLES if environ.get(name)), "")
    if options.settings.get(TIMELINE) or other:
        raise SettingError(f"--report and {other or '--timeline-filename'} both record the run: leave one of them out")
    folder = os.path.dirname(path)
    if not path.endswith(".html"):
        raise SettingError(f"--report {options.report}: the name of a page ends in .html")
    if not os.path.isdir(folder):
        raise SettingError(f"--report {options.report}: there is no folder {folder}")
    if os.path.isdir(path):
        raise SettingError(f"--report {options.report}: that is a folder; name a file in it")
    try:
        for old in (*_records(path), events_beside(path)):
            old.unlink(missing_ok=True)
        Path(path).write_text("The run has not ended, or was killed.\n")
    except OSError as problem:
        raise SettingError(f"--report {options.report}: {problem.strerror}") from problem
    return {TIMELINE: str(Path(path).with_suffix(SUFFIX))}


def make(path: str) -> None:
    """Make the page of what the ranks have recorded, and say so."""
    from horovodish.reports import page  # the launcher starts without NumPy

    path = os.path.abspath(path)
    records = sorted(map(str, _records(path)))
    if not records:
        Path(path).unlink(missing_ok=True)
        say(f"there is no report: no rank on this host has called hvd.init(), or none could write beside {path}")
    elif page.report(records, path) == 0:
        size = sum(os.path.getsize(each) for each in records)
        say(f"the report is {path}; its records lie beside it ({size / 1e6:.1f} MB)")
    else:
        Path(path).unlink(missing_ok=True)


def _records(path: str) -> list[Path]:
    """The files of all starts of the run: page.rank-0, page.2.rank-0. Without files of another page, page.2.html."""
    stem = path.removesuffix(".html")
    found = [Path(each) for each in glob.glob(f"{glob.escape(stem)}.*rank-*{SUFFIX}")]
    starts = {
        each: re.fullmatch(r"(\.\d+)?\.rank-\d+", str(each).removeprefix(stem).removesuffix(SUFFIX)) for each in found
    }
    return [each for each, its in starts.items() if its and not (its[1] and os.path.exists(f"{stem}{its[1]}.html"))]
